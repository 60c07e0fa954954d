//! The operations as burn's dispatch and its autodiff know them.
//!
//! A step of burn's graph has a state, which is where the statistics go. What it needs of its arguments it keeps by their nodes'
//! numbers, so that a checkpointing strategy may drop and recompute them.
//!
//! | operation | is a node that gives | its state has |
//! |---|---|---|
//! | [`normalize`] | y from x, weight and bias | the statistics |
//! | [`add`] | the sum of x and residual, and from it y by `normalize`'s node: one kernel for both | the dtype of x |
//! | [`add_after`] | the sum of residual and the norm of x, and from it y in the same way | the statistics, the dtype of x |

mod add;
mod add_after;
mod normalize;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use crate::check::or_panic;
use crate::flex::{AddAfterCall, ForwardCall, Normalized};

/// The operations, on burn's CPU backend and on autodiff over it. Callers have checked arguments, and that there are kernels.
#[backend_extension(Flex, Autodiff)]
pub(crate) trait NormOps: Backend {
    /// y from x and weight.
    fn normalize(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: UnsizedNorm) -> FloatTensor<Self>;

    /// y from x, weight and bias.
    fn normalize_affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self>;

    /// y and the sum of x and residual.
    fn add_normalize(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The same by a weight and a bias.
    fn add_normalize_affine(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The sum of residual and the norm of x.
    fn normalize_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self>;

    /// The same by a weight and a bias.
    fn normalize_add_affine(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self>;

    /// The norm of that sum by a weight of its own, and the sum.
    fn normalize_add_normalize(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl NormOps for Flex {
    fn normalize(x: FlexTensor, weight: FlexTensor, spec: UnsizedNorm) -> FlexTensor {
        or_panic(ForwardCall { spec, x, residual: None, weight, bias: None, save: false }.run()).y
    }

    fn normalize_affine(x: FlexTensor, weight: FlexTensor, bias: FlexTensor, spec: UnsizedNorm) -> FlexTensor {
        or_panic(ForwardCall { spec, x, residual: None, weight, bias: Some(bias), save: false }.run()).y
    }

    fn add_normalize(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        spec: UnsizedNorm,
    ) -> (FlexTensor, FlexTensor) {
        y_and_sum(ForwardCall { spec, x, residual: Some(residual), weight, bias: None, save: false })
    }

    fn add_normalize_affine(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        spec: UnsizedNorm,
    ) -> (FlexTensor, FlexTensor) {
        y_and_sum(ForwardCall { spec, x, residual: Some(residual), weight, bias: Some(bias), save: false })
    }

    fn normalize_add(x: FlexTensor, residual: FlexTensor, weight: FlexTensor, spec: UnsizedNorm) -> FlexTensor {
        or_panic(AddAfterCall::new(spec, x, residual, weight).run()).sum
    }

    fn normalize_add_affine(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        bias: FlexTensor,
        spec: UnsizedNorm,
    ) -> FlexTensor {
        or_panic(AddAfterCall { bias: Some(bias), ..AddAfterCall::new(spec, x, residual, weight) }.run()).sum
    }

    fn normalize_add_normalize(
        x: FlexTensor,
        residual: FlexTensor,
        weight: FlexTensor,
        next_weight: FlexTensor,
        spec: UnsizedNorm,
    ) -> (FlexTensor, FlexTensor) {
        let call = AddAfterCall { next_weight: Some(next_weight), ..AddAfterCall::new(spec, x, residual, weight) };
        let mut made = or_panic(call.run());
        let (y, _) = or_panic(made.take_next());
        (y, made.sum)
    }
}

/// Of a call with a residual.
fn y_and_sum(call: ForwardCall) -> (FlexTensor, FlexTensor) {
    let (y, residual_out, _) = or_panic(call.run().and_then(Normalized::with_sum));
    (y, residual_out)
}

/// A tensor with its node.
type Tracked = FloatTensor<Autodiff<Flex>>;

impl<C: CheckpointStrategy> NormOps for Autodiff<Flex, C> {
    fn normalize(x: Tracked, weight: Tracked, spec: UnsizedNorm) -> Tracked {
        normalize::apply::<C>(spec, x, weight, None)
    }

    fn normalize_affine(x: Tracked, weight: Tracked, bias: Tracked, spec: UnsizedNorm) -> Tracked {
        normalize::apply::<C>(spec, x, weight, Some(bias))
    }

    fn add_normalize(x: Tracked, residual: Tracked, weight: Tracked, spec: UnsizedNorm) -> (Tracked, Tracked) {
        add::apply::<C>(spec, x, residual, weight, None)
    }

    fn add_normalize_affine(
        x: Tracked,
        residual: Tracked,
        weight: Tracked,
        bias: Tracked,
        spec: UnsizedNorm,
    ) -> (Tracked, Tracked) {
        add::apply::<C>(spec, x, residual, weight, Some(bias))
    }

    fn normalize_add(x: Tracked, residual: Tracked, weight: Tracked, spec: UnsizedNorm) -> Tracked {
        add_after::apply::<C>(spec, x, residual, weight, None)
    }

    fn normalize_add_affine(
        x: Tracked,
        residual: Tracked,
        weight: Tracked,
        bias: Tracked,
        spec: UnsizedNorm,
    ) -> Tracked {
        add_after::apply::<C>(spec, x, residual, weight, Some(bias))
    }

    fn normalize_add_normalize(
        x: Tracked,
        residual: Tracked,
        weight: Tracked,
        next_weight: Tracked,
        spec: UnsizedNorm,
    ) -> (Tracked, Tracked) {
        add_after::apply_with_next::<C>(spec, x, residual, weight, next_weight)
    }
}

/// A gradient on its way to a tensor of that dtype.
fn in_dtype(gradient: FlexTensor, dtype: DType) -> FlexTensor {
    if gradient.dtype() == dtype { gradient } else { Flex::float_cast(gradient, dtype.into()) }
}
