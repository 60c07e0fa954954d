//! The operations as burn's dispatch and its autodiff know them, on any backend that brings [`Kernels`].
//!
//! A step of burn's graph has a state, which is where the statistics go. What it needs of its arguments it keeps by their nodes'
//! numbers, so that a checkpointing strategy may drop and recompute them.
//!
//! | operation | is a node that gives | its state has |
//! |---|---|---|
//! | [`normalize`] | y from x, weight and bias | the statistics |
//! | [`sum`] | the sum of x and residual, or of residual and the norm of x, and from it y by `normalize`'s node: one kernel for both | the dtype of x, and the statistics of its norm |

mod call;
mod normalize;
mod sum;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::DType;
use rmsnorm_core::{TensorSet, UnsizedNorm};

use crate::kernels::{ForwardCall, Forwarded, Kernels, Maybe};

#[cfg(feature = "wgpu")]
use burn::backend::Cube;

/// The operation, on backends with kernels and on autodiff over them. Callers have checked arguments, and that there are kernels.
#[backend_extension(Flex, Cube: cfg(feature = "wgpu"), Autodiff)]
pub(crate) trait NormOps: Backend {
    /// y and the sum: that of x and residual if there is one or, as `spec` says, that of residual and the norm of x. Such a sum has a y if it
    /// has a next weight.
    fn norm(
        x: FloatTensor<Self>,
        #[extension_type] residual: Maybe<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Maybe<Self>,
        #[extension_type] next_weight: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> Forwarded<Self>;
}

/// Without autodiff: the call, and nothing saved. An `impl` for all backends with kernels would be one for burn's dispatch, too.
macro_rules! without_autodiff {
    ($backend:ty) => {
        impl NormOps for $backend {
            fn norm(
                x: FloatTensor<Self>,
                residual: Maybe<Self>,
                weight: FloatTensor<Self>,
                bias: Maybe<Self>,
                next_weight: Maybe<Self>,
                spec: UnsizedNorm,
            ) -> Forwarded<Self> {
                let [residual, bias, next_weight] = [residual, bias, next_weight].map(Maybe::into_option);
                let wanted = TensorSet::NONE;
                ForwardCall::<Self> { spec, x, residual, weight, bias, next_weight, wanted }.call()
            }
        }
    };
}

without_autodiff!(Flex);
#[cfg(feature = "wgpu")]
without_autodiff!(Cube);

/// A tensor with its node.
type Tracked<B> = FloatTensor<Autodiff<B>>;

impl<B: Kernels, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn norm(
        x: Tracked<B>,
        residual: Maybe<Self>,
        weight: Tracked<B>,
        bias: Maybe<Self>,
        next_weight: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> Forwarded<Self> {
        let [residual, bias, next_weight] = [residual, bias, next_weight].map(Maybe::into_option);
        match residual {
            None => Forwarded::of(Some(normalize::apply::<B, C>(spec, x, weight, bias, None)), None),
            Some(residual) => {
                let (y, sum) = sum::apply::<B, C>(spec, x, residual, weight, bias, next_weight);
                Forwarded::of(y, Some(sum))
            }
        }
    }
}

/// A gradient on its way to a tensor of that dtype.
fn in_dtype<B: Backend>(gradient: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if gradient.dtype() == dtype { gradient } else { B::float_cast(gradient, dtype.into()) }
}
