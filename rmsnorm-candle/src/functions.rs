//! The functions, and the choice of our kernels or candle's operations.

use candle_core::{Result, Tensor, bail};
use rmsnorm_core::{Norm, NormParams};

use crate::check::Args;
use crate::native::mix;
use crate::ops::normalize::Normalize;
use crate::ops::{in_place, sum};
use crate::rows::{is_regular, regular};
use crate::slow;

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
    normalize(NormParams::new(Norm::Rms, eps), x, weight, None)
}

/// RMS norm with `1 + weight`, added in f32 and not rounded, as in Gemma. Otherwise as
/// [`rms_norm`].
pub fn gemma_rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalize(NormParams::gemma(eps), x, weight, None)
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
    normalize(NormParams::new(Norm::Layer, eps), x, weight, bias)
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
    add_normalize(NormParams::new(Norm::Rms, eps), x, residual, weight, None)
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
    add_normalize(NormParams::new(Norm::Layer, eps), x, residual, weight, bias)
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
    normalize_add(NormParams::new(Norm::Rms, eps), x, residual, weight, None)
}

/// As [`rms_norm_add`], with `1 + weight`, as in Gemma's layers.
pub fn gemma_rms_norm_add(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalize_add(NormParams::gemma(eps), x, residual, weight, None)
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
    normalize_add(NormParams::new(Norm::Layer, eps), x, residual, weight, bias)
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
    normalize_add_normalize(NormParams::new(Norm::Rms, eps), x, residual, weight, next_weight)
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
    normalize_add_normalize(NormParams::gemma(eps), x, residual, weight, next_weight)
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
    overwrite(NormParams::new(Norm::Rms, eps), x, weight, None)
}

/// [`gemma_rms_norm`] that overwrites `x`, as [`rms_norm_in_place`].
pub fn gemma_rms_norm_in_place(x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    overwrite(NormParams::gemma(eps), x, weight, None)
}

/// [`layer_norm`] that overwrites `x`, as [`rms_norm_in_place`].
pub fn layer_norm_in_place(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<()> {
    overwrite(NormParams::new(Norm::Layer, eps), x, weight, bias)
}

/// `x` normalized.
pub(crate) fn normalize(spec: NormParams, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if has_kernels(&spec, &Args { bias, ..Args::of(x, weight) })? {
        return Normalize::apply(spec, &regular(x)?, &weight.contiguous()?, contiguous(bias)?.as_ref());
    }
    slow::normalize(&spec, x, weight, bias, x.dtype())
}

/// `x + residual`, and its norm.
pub(crate) fn add_normalize(
    spec: NormParams,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    if has_kernels(&spec, &Args { residual: Some(residual), bias, ..Args::of(x, weight) })? {
        let (x, residual, weight) = (regular(x)?, regular(residual)?, weight.contiguous()?);
        return sum::add_normalize(spec, &x, &residual, &weight, contiguous(bias)?.as_ref());
    }
    let residual_out = slow::add(x, residual)?;
    Ok((slow::normalize(&spec, &residual_out, weight, bias, x.dtype())?, residual_out))
}

/// `residual` plus the norm of `x`.
pub(crate) fn normalize_add(
    spec: NormParams,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    if has_kernels(&spec, &Args { residual: Some(residual), bias, ..Args::of(x, weight) })? {
        let (x, residual, weight) = (regular(x)?, regular(residual)?, weight.contiguous()?);
        return sum::normalize_add(spec, &x, &residual, &weight, contiguous(bias)?.as_ref());
    }
    slow::normalize_add(&spec, x, residual, weight, bias)
}

/// `residual` plus the norm of `x`, and the next norm of that sum.
pub(crate) fn normalize_add_normalize(
    spec: NormParams,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    next_weight: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let args = Args { residual: Some(residual), next_weight: Some(next_weight), ..Args::of(x, weight) };
    if has_kernels(&spec, &args)? {
        let (weight, next_weight) = (weight.contiguous()?, next_weight.contiguous()?);
        return sum::normalize_add_normalize(spec, &regular(x)?, &regular(residual)?, &weight, &next_weight);
    }
    let residual_out = slow::normalize_add(&spec, x, residual, weight, None)?;
    Ok((slow::normalize(&spec, &residual_out, next_weight, None, x.dtype())?, residual_out))
}

/// Normalizes `x` in place.
pub(crate) fn overwrite(spec: NormParams, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let args = Args { bias, ..Args::of(x, weight) };
    let (has_kernels, name) = (has_kernels(&spec, &args)?, spec.name());
    if let Some((arg, _)) = args.all().find(|(_, tensor)| tensor.track_op()) {
        bail!(
            "{name} in place has no gradient, and {arg} is part of a graph: detach() it, or use the form that returns y"
        );
    }
    if !has_kernels {
        if !x.is_contiguous() {
            bail!("{name} in place with candle's own operations needs a contiguous x, got {:?}", x.layout());
        }
        let y = slow::normalize(&spec, x, weight, bias, x.dtype())?;
        return x.slice_set(&y, 0, 0);
    }
    if !is_regular(x.layout()) {
        let rule = "the rows of x must not overlap nor need more than two strides: use the form that returns y";
        bail!("{name} in place: {rule}, got {:?}", x.layout());
    }
    in_place::apply(spec, x, &weight.contiguous()?, contiguous(bias)?.as_ref())
}

fn contiguous(bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    bias.map(Tensor::contiguous).transpose()
}

/// Whether our kernels take these tensors: their device and dtypes.
///
/// # Errors
/// As [`Args::check`].
fn has_kernels(spec: &NormParams, args: &Args<'_>) -> Result<bool> {
    args.check(spec)?;
    let &Args { x, residual, weight, .. } = args;
    let is_one_dtype = args.vectors().all(|(_, vector)| vector.dtype() == weight.dtype());
    let is_on_device = x.device().is_cpu() || (cfg!(feature = "cuda") && x.device().is_cuda());
    Ok(is_on_device && is_one_dtype && mix(x.dtype(), weight.dtype(), residual.unwrap_or(x).dtype()).is_some())
}
