//! The choice of our kernels or burn's operations for a call.

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use rmsnorm_core::{NormParams, ResidualPlacement};

use crate::check::{Args, given, or_panic};
use crate::kernels::Maybe;
use crate::native::mix;
use crate::ops::NormOps;
use crate::slow;

/// The norm of `x`.
pub(crate) fn normalize<const D: usize>(
    spec: NormParams,
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    given("y", Args { x, residual: None, weight, bias, next_weight: None }.run(spec).0)
}

/// The norm of `residual + x`, and that sum.
pub(crate) fn add_normalize<const D: usize>(
    spec: NormParams,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> (Tensor<D>, Tensor<D>) {
    let (y, sum) = Args { x, residual: Some(residual), weight, bias, next_weight: None }.run(spec);
    (given("y", y), given("residual_out", sum))
}

/// `residual` plus the norm of `x`.
pub(crate) fn normalize_add<const D: usize>(
    spec: NormParams,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let args = Args { x, residual: Some(residual), weight, bias, next_weight: None };
    given("residual_out", args.run(spec.residual_after()).1)
}

/// The norm of that sum with `next_weight`, and the sum.
pub(crate) fn normalize_add_normalize<const D: usize>(
    spec: NormParams,
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    next_weight: Tensor<1>,
) -> (Tensor<D>, Tensor<D>) {
    let args = Args { x, residual: Some(residual), weight, bias: None, next_weight: Some(next_weight) };
    let (y, sum) = args.run(spec.residual_after());
    (given("y", y), given("residual_out", sum))
}

impl<const D: usize> Args<D> {
    /// y and the sum, if the call has them.
    fn run(self, spec: NormParams) -> (Option<Tensor<D>>, Option<Tensor<D>>) {
        or_panic(self.check(&spec));
        if !self.has_kernels(&spec) {
            return self.run_slowly(&spec);
        }
        let Args { x, residual, weight, bias, next_weight } = self;
        let residual = Maybe::of(residual.map(Tensor::into_dispatch));
        let [bias, next_weight] = [bias, next_weight].map(|vector| Maybe::of(vector.map(Tensor::into_dispatch)));
        let made = Dispatch::norm(x.into_dispatch(), residual, weight.into_dispatch(), bias, next_weight, spec);
        let [y, sum] = [made.y, made.residual_out].map(|tensor| tensor.into_option().map(Tensor::from_dispatch));
        (y, sum)
    }

    /// The same with burn's operations.
    fn run_slowly(self, spec: &NormParams) -> (Option<Tensor<D>>, Option<Tensor<D>>) {
        let Args { x, residual, weight, bias, next_weight } = self;
        let dtype = x.dtype();
        let Some(residual) = residual else {
            return (Some(slow::normalize(spec, x, weight, bias, dtype)), None);
        };
        let (sum, of_sum) = match spec.residual_placement {
            ResidualPlacement::Before => (slow::add(x, residual), Some((weight, bias))),
            ResidualPlacement::After => {
                let sum = slow::normalize_add(spec, x, residual, weight, bias);
                (sum, next_weight.map(|weight| (weight, None)))
            }
        };
        let y = of_sum.map(|(weight, bias)| slow::normalize(spec, sum.clone(), weight, bias, dtype));
        (y, Some(sum))
    }

    /// Whether our kernels take these tensors: their device and dtypes.
    fn has_kernels(&self, spec: &NormParams) -> bool {
        let Args { x, residual, weight, .. } = self;
        self.vectors().all(|(_, vector)| vector.dtype() == weight.dtype())
            && mix([x.dtype(), weight.dtype(), residual.as_ref().unwrap_or(x).dtype()]).is_some()
            // With or without autodiff.
            && (x.device() == Device::flex() || self.is_shared(spec))
    }

    /// Whether the tensors are on a shared device. Under fusion, burn would report a wrong device
    /// only later.
    #[cfg(feature = "wgpu")]
    fn is_shared(&self, spec: &NormParams) -> bool {
        // wgpu has no empty buffers.
        let is_shared = self.x.shape().num_elements() > 0 && crate::wgpu::has_kernels(&self.x.device());
        if is_shared {
            or_panic(self.check_devices(spec));
        }
        is_shared
    }

    #[cfg(not(feature = "wgpu"))]
    fn is_shared(&self, _: &NormParams) -> bool {
        false
    }
}
