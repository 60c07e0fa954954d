//! The functions: which path a call takes.

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::{Norm, UnsizedNorm};

use crate::check::{Args, or_panic};
use crate::native::mix;
use crate::ops::NormOps;
use crate::slow;

/// RMS norm over the last dimension: `x / sqrt(avg(x^2) + eps) * weight`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`: (cols). The result has the shape and the dtype of `x`.
///
/// # Gradients
/// Of `x` and `weight`. See [the crate](crate) for dtypes and devices.
///
/// # Panics
/// As [the crate](crate#panics) says.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<2>::from_floats([[3.0, 4.0], [5.0, 0.0]], &device).require_grad();
/// let weight = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();
/// let gradients = rmsnorm_burn::rms_norm(x.clone(), weight.clone(), 1e-6).sum().backward();
/// assert!(x.grad(&gradients).is_some() && weight.grad(&gradients).is_some());
/// ```
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    normalize(UnsizedNorm::new(Norm::Rms, eps), x, weight, None)
}

/// RMS norm by `1 + weight`, which is added in f32 and not rounded: Gemma's. Otherwise as [`rms_norm`].
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn gemma_rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    normalize(UnsizedNorm::gemma(eps), x, weight, None)
}

/// Layer norm over the last dimension: `(x - mean) / sqrt(var + eps) * weight + bias`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`, `bias`: (cols). The result has the shape and the dtype of `x`.
///
/// # Gradients
/// Of `x`, `weight` and `bias`. See [the crate](crate) for dtypes and devices.
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn layer_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, bias: Option<Tensor<1>>, eps: f64) -> Tensor<D> {
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
/// rounded to 16 bits on its way. See [the crate](crate) for dtypes and devices.
///
/// # Panics
/// As [the crate](crate#panics) says.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[3.0, 4.0]], &device);
/// let residual = Tensor::<2>::from_floats([[1.0, -2.0]], &device);
/// let (y, residual) = rmsnorm_burn::add_rms_norm(x, residual, Tensor::ones([2], &device), 1e-6);
/// assert_eq!(residual.into_data().try_to_vec::<f32>().unwrap(), [4.0, 2.0]);
/// ```
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let spec = UnsizedNorm::new(Norm::Rms, eps);
    let args = Args { x: &x, residual: Some(&residual), weight: &weight, bias: None };
    or_panic(args.check(&spec));
    if has_kernels(&args) {
        let (x, residual, weight) = (x.into_dispatch(), residual.into_dispatch(), weight.into_dispatch());
        let (y, residual_out) = Dispatch::add_normalize(x, residual, weight, spec);
        return (Tensor::from_dispatch(y), Tensor::from_dispatch(residual_out));
    }
    let dtype = x.dtype();
    let residual_out = slow::add(x, residual);
    (slow::normalize(&spec, residual_out.clone(), weight, None, dtype), residual_out)
}

/// `x` normalized.
pub(crate) fn normalize<const D: usize>(
    spec: UnsizedNorm,
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let args = Args { x: &x, residual: None, weight: &weight, bias: bias.as_ref() };
    or_panic(args.check(&spec));
    if !has_kernels(&args) {
        let dtype = x.dtype();
        return slow::normalize(&spec, x, weight, bias, dtype);
    }
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(match bias {
        None => Dispatch::normalize(x, weight, spec),
        Some(bias) => Dispatch::normalize_affine(x, weight, bias.into_dispatch(), spec),
    })
}

/// Whether kernels of ours take such tensors: on this device, of these dtypes.
fn has_kernels<const D: usize>(args: &Args<'_, D>) -> bool {
    let &Args { x, residual, weight, bias } = args;
    let is_one_dtype = bias.is_none_or(|bias| bias.dtype() == weight.dtype());
    is_one_dtype
        && mix([x.dtype(), weight.dtype(), residual.unwrap_or(x).dtype()]).is_some()
        // Whether or not there is autodiff on it.
        && x.device() == Device::flex()
}
