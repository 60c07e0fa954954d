//! Which path a call takes: kernels of ours, or burn's operations.

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::UnsizedNorm;

use crate::check::{Args, or_panic};
use crate::kernels::Maybe;
use crate::native::mix;
use crate::ops::NormOps;
use crate::slow;

/// `x` normalized.
pub(crate) fn normalize<const D: usize>(
    spec: UnsizedNorm,
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let args = Args { x: &x, residual: None, weight: &weight, bias: bias.as_ref(), next_weight: None };
    or_panic(args.check(&spec));
    if !has_kernels(&args, &spec) {
        let dtype = x.dtype();
        return slow::normalize(&spec, x, weight, bias, dtype);
    }
    let bias = Maybe::of(bias.map(Tensor::into_dispatch));
    Tensor::from_dispatch(Dispatch::normalize(x.into_dispatch(), weight.into_dispatch(), bias, spec))
}

/// `residual + x` normalized, and that sum.
pub(crate) fn add_normalize<const D: usize>(
    spec: UnsizedNorm,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> (Tensor<D>, Tensor<D>) {
    let args = Args { x: &x, residual: Some(&residual), weight: &weight, bias: bias.as_ref(), next_weight: None };
    or_panic(args.check(&spec));
    if !has_kernels(&args, &spec) {
        let dtype = x.dtype();
        let residual_out = slow::add(x, residual);
        return (slow::normalize(&spec, residual_out.clone(), weight, bias, dtype), residual_out);
    }
    let (x, residual, weight) = (x.into_dispatch(), residual.into_dispatch(), weight.into_dispatch());
    let bias = Maybe::of(bias.map(Tensor::into_dispatch));
    let (y, residual_out) = Dispatch::add_normalize(x, residual, weight, bias, spec);
    (Tensor::from_dispatch(y), Tensor::from_dispatch(residual_out))
}

/// `residual` and `x` normalized, added.
pub(crate) fn normalize_add<const D: usize>(
    spec: UnsizedNorm,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let args = Args { x: &x, residual: Some(&residual), weight: &weight, bias: bias.as_ref(), next_weight: None };
    or_panic(args.check(&spec));
    if !has_kernels(&args, &spec) {
        return slow::normalize_add(&spec, x, residual, weight, bias);
    }
    let (x, residual, weight) = (x.into_dispatch(), residual.into_dispatch(), weight.into_dispatch());
    let bias = Maybe::of(bias.map(Tensor::into_dispatch));
    Tensor::from_dispatch(Dispatch::normalize_add(x, residual, weight, bias, spec))
}

/// The norm of that sum by `next_weight`, and the sum.
pub(crate) fn normalize_add_normalize<const D: usize>(
    spec: UnsizedNorm,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    next_weight: Tensor<1>,
) -> (Tensor<D>, Tensor<D>) {
    let next = Some(&next_weight);
    let args = Args { x: &x, residual: Some(&residual), weight: &weight, bias: None, next_weight: next };
    or_panic(args.check(&spec));
    if !has_kernels(&args, &spec) {
        let dtype = x.dtype();
        let sum = slow::normalize_add(&spec, x, residual, weight, None);
        return (slow::normalize(&spec, sum.clone(), next_weight, None, dtype), sum);
    }
    let (x, residual) = (x.into_dispatch(), residual.into_dispatch());
    let (weight, next_weight) = (weight.into_dispatch(), next_weight.into_dispatch());
    let (y, sum) = Dispatch::normalize_add_normalize(x, residual, weight, next_weight, spec);
    (Tensor::from_dispatch(y), Tensor::from_dispatch(sum))
}

/// Whether kernels of ours take such tensors: on this device, of these dtypes.
fn has_kernels<const D: usize>(args: &Args<'_, D>, spec: &UnsizedNorm) -> bool {
    let &Args { x, residual, weight, bias, next_weight } = args;
    let is_one_dtype = [bias, next_weight].into_iter().flatten().all(|vector| vector.dtype() == weight.dtype());
    is_one_dtype
        && mix([x.dtype(), weight.dtype(), residual.unwrap_or(x).dtype()]).is_some()
        // Whether or not there is autodiff on it.
        && (x.device() == Device::flex() || is_shared(args, spec))
}

/// Whether the tensors are on a device that was shared. Under fusion burn would find out only later that one is not.
#[cfg(feature = "wgpu")]
fn is_shared<const D: usize>(args: &Args<'_, D>, spec: &UnsizedNorm) -> bool {
    // A buffer of no elements is none.
    let is_shared = args.x.shape().num_elements() > 0 && crate::wgpu::has_kernels(&args.x.device());
    if is_shared {
        or_panic(args.check_devices(spec));
    }
    is_shared
}

#[cfg(not(feature = "wgpu"))]
fn is_shared<const D: usize>(_: &Args<'_, D>, _: &UnsizedNorm) -> bool {
    false
}
