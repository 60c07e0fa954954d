//! Common norms as functions of one line.

use burn::tensor::Tensor;

use crate::Norm;

/// RMS norm over the last dimension: `x / sqrt(avg(x^2) + eps) * weight`, rounded once.
///
/// # Shapes
/// `x`: (.., cols), of any rank from 1. `weight`: (cols). The result has the shape and the dtype of
/// `x`.
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
    Norm::rms(eps).apply(x, weight)
}

/// RMS norm with `1 + weight`, added in f32 and not rounded, as in Gemma. Otherwise as
/// [`rms_norm`].
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn gemma_rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
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
/// Of `x`, `weight` and `bias`. See [the crate](crate) for dtypes and devices.
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn layer_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, bias: Option<Tensor<1>>, eps: f64) -> Tensor<D> {
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
/// residual with 16-bit activations is never rounded to 16 bits. See [the crate](crate) for dtypes
/// and devices.
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
    Norm::rms(eps).residual(residual).apply(x, weight)
}

/// `h = residual + x`, rounded to the dtype of `residual`, and the layer norm of `h`: as
/// [`add_rms_norm`], with a gradient of `bias` too.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`, `bias`: (cols).
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn add_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    Norm::layer(eps).residual(residual).bias(bias).apply(x, weight)
}

/// `residual` plus the RMS norm of `x`, rounded once, to the dtype of `residual`, as at the end of
/// a post-norm block.
///
/// # Shapes
/// `x`, `residual` and the result: (.., cols), of any rank from 1. `weight`: (cols).
///
/// # Gradients
/// `x`, `residual` and `weight` have gradients. The gradient of `residual` is the result's,
/// unchanged; the norm takes it rounded to the dtype of `x`, like other gradients of norms. See
/// [the crate](crate) for dtypes and devices.
///
/// # Memory
/// On the CPU the sum overwrites a `residual` without another owner.
///
/// # Panics
/// As [the crate](crate#panics) says.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[5.0, -5.0]], &device);
/// let residual = Tensor::<2>::from_floats([[1.0, 2.0]], &device);
/// let residual = rmsnorm_burn::rms_norm_add(x, residual, Tensor::ones([2], &device), 0.0);
/// assert_eq!(residual.into_data().try_to_vec::<f32>().unwrap(), [2.0, 1.0]);
/// ```
pub fn rms_norm_add<const D: usize>(x: Tensor<D>, residual: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    Norm::rms(eps).residual_after(residual).apply(x, weight)
}

/// [`rms_norm_add`] with `1 + weight`, which is not rounded: the norms after attention and after
/// the feed-forward part of Gemma 2 and later.
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn gemma_rms_norm_add<const D: usize>(x: Tensor<D>, residual: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    Norm::gemma(eps).residual_after(residual).apply(x, weight)
}

/// `residual` plus the layer norm of `x`, rounded once: as [`rms_norm_add`], with a gradient of
/// `bias` too.
///
/// # Shapes
/// `x`, `residual` and the result: (.., cols), of any rank from 1. `weight`, `bias`: (cols).
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn layer_norm_add<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    eps: f64,
) -> Tensor<D> {
    Norm::layer(eps).residual_after(residual).bias(bias).apply(x, weight)
}

/// Two norms around a residual, in one pass over memory. Returns `(y, h)`: `h` is [`rms_norm_add`]
/// of `x`, `residual` and `weight`, and `y` its RMS norm with `next_weight`, in the dtype of `x`.
/// On the CPU the bits equal those of two calls.
///
/// # Shapes
/// `x`, `residual`, and both results: (.., cols), of any rank from 1. `weight`, `next_weight`:
/// (cols), of one dtype.
///
/// # Gradients
/// `x`, `residual` and both weights have gradients, from either result or both. See
/// [the crate](crate) for dtypes and devices.
///
/// # Memory
/// Both results are new tensors.
///
/// # Panics
/// As [the crate](crate#panics) says.
///
/// # Example
/// The end of one part of a block and the beginning of the next:
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let device = Device::flex();
/// let attention = Tensor::<2>::from_floats([[5.0, -5.0]], &device);
/// let residual = Tensor::<2>::from_floats([[2.0, 4.0]], &device);
/// let [after_attention, before_mlp] = [1.0, 2.0].map(|weight| Tensor::full([2], weight, &device));
/// let (y, residual) = rmsnorm_burn::rms_norm_add_rms_norm(attention, residual, after_attention, before_mlp, 0.0);
/// assert_eq!(residual.into_data().try_to_vec::<f32>().unwrap(), [3.0, 3.0]);
/// assert_eq!(y.into_data().try_to_vec::<f32>().unwrap(), [2.0, 2.0]);
/// ```
pub fn rms_norm_add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    next_weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    Norm::rms(eps).residual_after(residual).next_norm(next_weight).apply(x, weight)
}

/// [`rms_norm_add_rms_norm`] with `1 + weight` and `1 + next_weight`, which are not rounded: the
/// norms after one part of a Gemma block (version 2 or later) and before the next.
///
/// # Panics
/// As [the crate](crate#panics) says.
pub fn gemma_rms_norm_add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    next_weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    Norm::gemma(eps).residual_after(residual).next_norm(next_weight).apply(x, weight)
}
