//! The functions: which path a call takes.

use candle_core::{Result, Tensor, bail};
use rmsnorm_core::{Norm, UnsizedNorm};

use crate::check::Args;
use crate::native::mix;
use crate::ops::normalize::Normalize;
use crate::ops::{in_place, sum};
use crate::rows::{is_regular, regular};
use crate::slow;

/// RMS norm over the last dimension: `x / sqrt(avg(x^2) + eps) * weight`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`: (cols). The result has the shape and the dtype of `x`.
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
    normalize(UnsizedNorm::new(Norm::Rms, eps), x, weight, None)
}

/// RMS norm by `1 + weight`, which is added in f32 and not rounded: Gemma's. Otherwise as [`rms_norm`].
pub fn gemma_rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalize(UnsizedNorm::gemma(eps), x, weight, None)
}

/// Layer norm over the last dimension: `(x - mean) / sqrt(var + eps) * weight + bias`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`, `bias`: (cols). The result has the shape and the dtype of `x`.
///
/// # Gradients
/// Of `x`, `weight` and `bias`. See [the crate](crate) for dtypes, devices and errors.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    normalize(UnsizedNorm::new(Norm::Layer, eps), x, weight, bias)
}

/// `residual + x`, rounded to the dtype of `residual`, and the RMS norm of that sum in the dtype of `x`, in one pass over
/// memory: `(y, residual_out)`. The sum is the next layer's residual.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`: (cols).
///
/// # Gradients
/// Of `x`, `residual` and `weight`, from either result or both. That of an f32 residual beside 16-bit activations is not
/// rounded to 16 bits on its way. See [the crate](crate) for dtypes, devices and errors.
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
    add_normalize(UnsizedNorm::new(Norm::Rms, eps), x, residual, weight, None)
}

/// `residual + x`, rounded to the dtype of `residual`, and the layer norm of that sum: as [`add_rms_norm`], with gradients of `bias` too.
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
    add_normalize(UnsizedNorm::new(Norm::Layer, eps), x, residual, weight, bias)
}

/// The RMS norm of `x` added to `residual`: `residual + x / sqrt(avg(x^2) + eps) * weight`, in the dtype of `residual`, rounded once.
///
/// # Shapes
/// `x`, `residual`, and the result: (.., cols), of any rank from 1. `weight`: (cols).
///
/// # Gradients
/// Of `x`, `residual` and `weight`. That of `residual` is the sum's as it is; the norm's backward takes it in the dtype of `x`, as it
/// would the gradient of a y. See [the crate](crate) for dtypes, devices and errors.
pub fn rms_norm_add(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalize_add(UnsizedNorm::new(Norm::Rms, eps), x, residual, weight, None)
}

/// As [`rms_norm_add`], by `1 + weight`: of Gemma's layers.
pub fn gemma_rms_norm_add(x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalize_add(UnsizedNorm::gemma(eps), x, residual, weight, None)
}

/// The layer norm of `x` added to `residual`: as [`rms_norm_add`], with gradients of `bias` too. Where the bias has one, the graph
/// has a copy of weight and bias, and computes the weight's, frozen or not.
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
    normalize_add(UnsizedNorm::new(Norm::Layer, eps), x, residual, weight, bias)
}

/// [`rms_norm_add`], and the RMS norm of that sum in the dtype of `x`, in one pass over memory: `(y, residual_out)`. Both norms have
/// the same `eps`.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`, `next_weight`: (cols). Where they differ in dtype,
/// candle's own operations compute both norms.
///
/// # Gradients
/// Of `x`, `residual`, `weight` and `next_weight`, from either result or both.
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
    normalize_add_normalize(UnsizedNorm::new(Norm::Rms, eps), x, residual, weight, next_weight)
}

/// As [`rms_norm_add_rms_norm`], both by `1 + weight`: what stands between the parts of Gemma's layers.
pub fn gemma_rms_norm_add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    next_weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    normalize_add_normalize(UnsizedNorm::gemma(eps), x, residual, weight, next_weight)
}

/// [`rms_norm`] whose result takes the place of `x`, for inference.
///
/// # Aliases
/// Whatever shares memory with `x` sees the new values, as with candle's own operations in place; elements between the rows of
/// a narrowed `x` stay as they are. A graph that has saved a frozen `x` for its backward pass, or a detached alias of it, is not
/// recognized: its gradients are wrong then.
///
/// # Errors
/// As [`rms_norm`]. An error has written nothing, and is the answer where
/// - `x`, `weight` or `bias` is a variable or depends on one: this has no gradient, and would overwrite what another needs.
///   `weight.detach()` says that no gradient is wanted;
/// - a contiguous `weight` or `bias` lies in the same storage as `x`, or elements of `x` share memory with each other;
/// - the rows of `x` cannot be written where they lie: they have more than two strides or, on candle's own path, are not
///   contiguous.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// // The queries of a fused buffer, where they lie.
/// let qkv = Tensor::ones((5, 3 * 8), DType::F32, &Device::Cpu)?;
/// let queries = qkv.narrow(1, 0, 8)?;
/// rmsnorm_candle::rms_norm_in_place(&queries, &Tensor::full(2f32, 8, &Device::Cpu)?, 0.0)?;
/// assert_eq!(qkv.get(4)?.narrow(0, 7, 2)?.to_vec1::<f32>()?, [2.0, 1.0]);
/// # Ok(())
/// # }
/// ```
pub fn rms_norm_in_place(x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    overwrite(UnsizedNorm::new(Norm::Rms, eps), x, weight, None)
}

/// [`gemma_rms_norm`] whose result takes the place of `x`, as [`rms_norm_in_place`] does.
pub fn gemma_rms_norm_in_place(x: &Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    overwrite(UnsizedNorm::gemma(eps), x, weight, None)
}

/// [`layer_norm`] whose result takes the place of `x`, as [`rms_norm_in_place`] does.
pub fn layer_norm_in_place(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<()> {
    overwrite(UnsizedNorm::new(Norm::Layer, eps), x, weight, bias)
}

/// `x` normalized.
pub(crate) fn normalize(spec: UnsizedNorm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if has_kernels(&spec, &Args { bias, ..Args::of(x, weight) })? {
        return Normalize::apply(spec, &regular(x)?, &weight.contiguous()?, contiguous(bias)?.as_ref());
    }
    slow::normalize(&spec, x, weight, bias, x.dtype())
}

/// `x` and `residual` added, and the sum normalized.
pub(crate) fn add_normalize(
    spec: UnsizedNorm,
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

/// `x` normalized, and added to `residual`.
pub(crate) fn normalize_add(
    spec: UnsizedNorm,
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

/// `x` normalized and added to `residual`, and the sum normalized.
pub(crate) fn normalize_add_normalize(
    spec: UnsizedNorm,
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

/// `x` normalized where it is.
pub(crate) fn overwrite(spec: UnsizedNorm, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let args = Args { bias, ..Args::of(x, weight) };
    let (has_kernels, name) = (has_kernels(&spec, &args)?, spec.name());
    if let Some((arg, _)) = args.all().find(|(_, tensor)| tensor.track_op()) {
        bail!(
            "{name} in place has no gradient, and {arg} is part of a graph: detach() it, or use the form that returns y"
        );
    }
    if !has_kernels {
        if !x.is_contiguous() {
            bail!("{name} in place on candle's own path needs a contiguous x, got {:?}", x.layout());
        }
        let y = slow::normalize(&spec, x, weight, bias, x.dtype())?;
        return x.slice_set(&y, 0, 0);
    }
    if !is_regular(x.layout()) {
        bail!("{name} in place: rows at more than two distances, or that overlap, got {:?}", x.layout());
    }
    in_place::apply(spec, x, &weight.contiguous()?, contiguous(bias)?.as_ref())
}

fn contiguous(bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    bias.map(Tensor::contiguous).transpose()
}

/// Whether kernels of ours take such tensors: on this device, of these dtypes.
///
/// # Errors
/// As [`Args::check`].
fn has_kernels(spec: &UnsizedNorm, args: &Args<'_>) -> Result<bool> {
    args.check(spec)?;
    let &Args { x, residual, weight, .. } = args;
    let is_one_dtype = args.vectors().all(|(_, vector)| vector.dtype() == weight.dtype());
    let is_on_device = x.device().is_cpu() || (cfg!(feature = "cuda") && x.device().is_cuda());
    Ok(is_on_device && is_one_dtype && mix(x.dtype(), weight.dtype(), residual.unwrap_or(x).dtype()).is_some())
}
