//! Common norms as functions of one line.

use candle_core::{Result, Tensor};

use crate::Norm;

/// RMS norm over the last dimension: `x / sqrt(avg(x^2) + eps) * weight`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`: (cols). The result has the shape and the dtype of
/// `x`.
///
/// # Gradients
/// Of `x` and `weight`. See [the crate](crate) for dtypes, devices and errors.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// # fn main() -> candle_core::Result<()> {
/// let x = Var::new(&[[3f32, 4.0], [5.0, 0.0]], &Device::Cpu)?;
/// let weight = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let y = rmsnorm_candle::rms_norm(&x, &weight, 1e-6)?;
/// let gradients = y.sum_all()?.backward()?;
/// assert!(gradients.get(&x).is_some() && gradients.get(&weight).is_some());
/// # Ok(())
/// # }
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm::rms(eps).apply(x, weight)
}

/// RMS norm with `1 + weight`, added in f32 and not rounded, as in Gemma. Otherwise as
/// [`rms_norm`].
pub fn gemma_rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm::gemma(eps).apply(x, weight)
}

/// Layer norm over the last dimension: `(x - mean) / sqrt(var + eps) * weight + bias`, rounded
/// once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`, `bias`: (cols). The result has the shape and the
/// dtype of `x`.
///
/// # Gradients
/// Of `x`, `weight` and `bias`. See [the crate](crate) for dtypes, devices and errors.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    Norm::layer(eps).bias(bias).apply(x, weight)
}

/// `h = residual + x`, rounded to the dtype of `residual`, and the RMS norm of `h` in the dtype of
/// `x`, in one pass over memory. Returns `(y, h)`; `h` is the next layer's residual.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`: (cols).
///
/// # Gradients
/// `x`, `residual` and `weight` have gradients, from either result or both. The gradient of an f32
/// residual with 16-bit activations is never rounded to 16 bits. See [the crate](crate) for dtypes,
/// devices and errors.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let (x, residual) = (Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?, Tensor::new(&[[1f32, -2.0]], &Device::Cpu)?);
/// let weight = Tensor::new(&[1f32, 1.0], &Device::Cpu)?;
/// let (y, residual) = rmsnorm_candle::add_rms_norm(&x, &residual, &weight, 1e-6)?;
/// assert_eq!(residual.to_vec2::<f32>()?, [[4.0, 2.0]]);
/// # Ok(())
/// # }
/// ```
pub fn add_rms_norm(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    Norm::rms(eps).residual(residual).apply(x, weight)
}

/// `h = residual + x`, rounded to the dtype of `residual`, and the layer norm of `h`: as
/// [`add_rms_norm`], with a gradient of `bias` too.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`, `bias`: (cols).
pub fn add_layer_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    Norm::layer(eps).residual(residual).bias(bias).apply(x, weight)
}

/// `residual` plus the RMS norm of `x`: `residual + x / sqrt(avg(x^2) + eps) * weight`, in the
/// dtype of `residual`, rounded once.
///
/// # Shapes
/// `x`, `residual`, and the result: (.., cols), of any rank from 1. `weight`: (cols).
///
/// # Gradients
/// `x`, `residual` and `weight` have gradients. The gradient of `residual` is the sum's, unchanged;
/// the norm's backward takes it in the dtype of `x`, like the gradient of a y. See
/// [the crate](crate) for dtypes, devices and errors.
pub fn rms_norm_add(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm::rms(eps).residual_after(residual).apply(x, weight)
}

/// As [`rms_norm_add`], with `1 + weight`, as in Gemma's layers.
pub fn gemma_rms_norm_add(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Norm::gemma(eps).residual_after(residual).apply(x, weight)
}

/// `residual` plus the layer norm of `x`: as [`rms_norm_add`], with a gradient of `bias` too. If
/// `bias` is tracked, the graph holds a copy of weight and bias, and the weight's gradient is
/// computed even for a frozen weight.
///
/// # Shapes
/// `x`, `residual`, and the result: (.., cols), of any rank from 1. `weight`, `bias`: (cols).
pub fn layer_norm_add(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Norm::layer(eps).residual_after(residual).bias(bias).apply(x, weight)
}

/// `h` of [`rms_norm_add`], and the RMS norm of `h` in the dtype of `x`, in one pass over memory.
/// Returns `(y, h)`. Both norms have the same `eps`.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`, `next_weight`:
/// (cols). If the weights differ in dtype, candle's own operations compute both norms.
///
/// # Gradients
/// `x`, `residual`, `weight` and `next_weight` have gradients, from either result or both.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let (x, residual) = (Tensor::new(&[[3f32, -3.0]], &Device::Cpu)?, Tensor::new(&[[1f32, 3.0]], &Device::Cpu)?);
/// let (weight, next_weight) = (Tensor::new(&[1f32, 1.0], &Device::Cpu)?, Tensor::new(&[4f32, 5.0], &Device::Cpu)?);
/// let (y, residual) = rmsnorm_candle::rms_norm_add_rms_norm(&x, &residual, &weight, &next_weight, 0.0)?;
/// assert_eq!(residual.to_vec2::<f32>()?, [[2.0, 2.0]]);
/// assert_eq!(y.to_vec2::<f32>()?, [[4.0, 5.0]]);
/// # Ok(())
/// # }
/// ```
pub fn rms_norm_add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    next_weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    Norm::rms(eps).residual_after(residual).next_norm(next_weight).apply(x, weight)
}

/// As [`rms_norm_add_rms_norm`], both with `1 + weight`: the norms after one part of a Gemma layer
/// and before the next.
pub fn gemma_rms_norm_add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    next_weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    Norm::gemma(eps).residual_after(residual).next_norm(next_weight).apply(x, weight)
}

/// [`rms_norm`] that overwrites `x`, for inference.
///
/// # Aliases
/// Tensors that share memory with `x` see the new values, as with candle's own in-place operations.
/// Elements between the rows of a narrowed `x` are unchanged. A graph that saved a frozen `x`, or a
/// detached alias of it, for its backward pass is not detected: its gradients are wrong then.
///
/// # Errors
/// As [`rms_norm`]. An error means that nothing was written. It is an error if
/// - `x`, `weight` or `bias` is a variable or depends on one: the call has no gradient, and would
///   overwrite values that a gradient needs. Pass `weight.detach()` if no gradient is wanted;
/// - a contiguous `weight` or `bias` shares its storage with `x`, or elements of `x` share memory;
/// - the rows of `x` need more than two strides or, with candle's own operations, are not
///   contiguous.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// // The queries of a fused buffer, in place.
/// let qkv = Tensor::ones((5, 3 * 8), DType::F32, &Device::Cpu)?;
/// let queries = qkv.narrow(1, 0, 8)?;
/// rmsnorm_candle::rms_norm_in_place(&queries, &Tensor::full(2f32, 8, &Device::Cpu)?, 0.0)?;
/// assert_eq!(qkv.get(4)?.narrow(0, 7, 2)?.to_vec1::<f32>()?, [2.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn rms_norm_in_place(x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    Norm::rms(eps).apply_in_place(x, weight)
}

/// [`gemma_rms_norm`] that overwrites `x`, as [`rms_norm_in_place`].
pub fn gemma_rms_norm_in_place(x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    Norm::gemma(eps).apply_in_place(x, weight)
}

/// [`layer_norm`] that overwrites `x`, as [`rms_norm_in_place`].
pub fn layer_norm_in_place(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<()> {
    Norm::layer(eps).bias(bias).apply_in_place(x, weight)
}
