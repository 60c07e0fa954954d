//! The operations, as burn's dispatch and autodiff see them, on every backend with [`Kernels`].
//!
//! A step of burn's graph has a state, which holds the statistics. It keeps its arguments as node
//! ids, so that a checkpointing strategy may drop and recompute them.
//!
//! | operation | node | state |
//! |---|---|---|
//! | [`normalize`] | y from x, weight, gate and bias | the statistics |
//! | [`sum`] | x + residual, or residual + norm(x); y of the sum has the node of `normalize`: one kernel for both | the dtype of x, and the statistics of its norm |

mod call;
mod normalize;
mod sum;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::DType;
use rmsnorm_core::{NormParams, TensorSet};

use crate::kernels::{ForwardCall, Forwarded, Kernels, Optional};

#[cfg(feature = "wgpu")]
use burn::backend::Cube;

/// The operation, on backends with kernels and on autodiff over them. Callers have checked the
/// arguments and that kernels exist.
#[backend_extension(Flex, Cube: cfg(feature = "wgpu"), Autodiff)]
pub(crate) trait NormOps: Backend {
    /// y, and with a residual the sum: x + residual or, depending on `spec`, residual + norm(x).
    /// The latter has a y only with a next weight.
    fn norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] optional: Optional<Self>,
        spec: NormParams,
    ) -> Forwarded<Self>;
}

/// Without autodiff: the call, without saved tensors. One `impl` for all backends with kernels
/// would include burn's dispatch.
macro_rules! without_autodiff {
    ($backend:ty) => {
        impl NormOps for $backend {
            fn norm(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                optional: Optional<Self>,
                spec: NormParams,
            ) -> Forwarded<Self> {
                ForwardCall::<Self>::new(spec, x, weight, optional, TensorSet::NONE).call()
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
    fn norm(x: Tracked<B>, weight: Tracked<B>, optional: Optional<Self>, spec: NormParams) -> Forwarded<Self> {
        let call = ForwardCall::<Self>::new(spec, x, weight, optional, TensorSet::NONE);
        let ForwardCall { spec, x, residual, gate, weight, bias, next_weight, next_bias, .. } = call;
        match residual {
            None => Forwarded::of(Some(normalize::apply::<B, C>(spec, x, weight, gate, bias, None)), None),
            Some(residual) => {
                let (y, sum) = sum::apply::<B, C>(spec, x, residual, weight, [gate, bias, next_weight, next_bias]);
                Forwarded::of(y, Some(sum))
            }
        }
    }
}

/// A gradient in the dtype of its tensor.
fn in_dtype<B: Backend>(gradient: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if gradient.dtype() == dtype { gradient } else { B::float_cast(gradient, dtype.into()) }
}
