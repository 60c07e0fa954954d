//! The operations as burn's dispatch and its autodiff know them, on any backend that brings [`Kernels`].
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
mod call;
mod normalize;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, TensorMetadata, backend_extension};
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use crate::kernels::{ForwardCall, Kernels, Maybe};
use call::{both, sum, y};

#[cfg(feature = "wgpu")]
use burn::backend::Cube;

/// The operations, on backends with kernels and on autodiff over them. Callers have checked arguments, and that there are kernels.
#[backend_extension(Flex, Cube: cfg(feature = "wgpu"), Autodiff)]
pub(crate) trait NormOps: Backend {
    /// y from x, weight and bias.
    fn normalize(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self>;

    /// y and the sum of x and residual.
    fn add_normalize(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The sum of residual and the norm of x.
    fn normalize_add(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Maybe<Self>,
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

/// Without autodiff: the calls, and nothing saved. An `impl` for all backends with kernels would be one for burn's dispatch, too.
macro_rules! without_autodiff {
    ($backend:ty) => {
        impl NormOps for $backend {
            fn normalize(
                x: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Maybe<Self>,
                spec: UnsizedNorm,
            ) -> FloatTensor<Self> {
                y(ForwardCall { bias: bias.into_option(), ..ForwardCall::<Self>::new(spec, x, weight) }.call())
            }

            fn add_normalize(
                x: FloatTensor<Self>,
                residual: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Maybe<Self>,
                spec: UnsizedNorm,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let bias = bias.into_option();
                both(ForwardCall { residual: Some(residual), bias, ..ForwardCall::<Self>::new(spec, x, weight) }.call())
            }

            fn normalize_add(
                x: FloatTensor<Self>,
                residual: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                bias: Maybe<Self>,
                spec: UnsizedNorm,
            ) -> FloatTensor<Self> {
                sum(ForwardCall { bias: bias.into_option(), ..ForwardCall::<Self>::onto(spec, x, residual, weight) }
                    .call())
            }

            fn normalize_add_normalize(
                x: FloatTensor<Self>,
                residual: FloatTensor<Self>,
                weight: FloatTensor<Self>,
                next_weight: FloatTensor<Self>,
                spec: UnsizedNorm,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                let next_weight = Some(next_weight);
                both(ForwardCall { next_weight, ..ForwardCall::<Self>::onto(spec, x, residual, weight) }.call())
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
    fn normalize(x: Tracked<B>, weight: Tracked<B>, bias: Maybe<Self>, spec: UnsizedNorm) -> Tracked<B> {
        normalize::apply::<B, C>(spec, x, weight, bias.into_option())
    }

    fn add_normalize(
        x: Tracked<B>,
        residual: Tracked<B>,
        weight: Tracked<B>,
        bias: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> (Tracked<B>, Tracked<B>) {
        add::apply::<B, C>(spec, x, residual, weight, bias.into_option())
    }

    fn normalize_add(
        x: Tracked<B>,
        residual: Tracked<B>,
        weight: Tracked<B>,
        bias: Maybe<Self>,
        spec: UnsizedNorm,
    ) -> Tracked<B> {
        add_after::apply::<B, C>(spec, x, residual, weight, bias.into_option())
    }

    fn normalize_add_normalize(
        x: Tracked<B>,
        residual: Tracked<B>,
        weight: Tracked<B>,
        next_weight: Tracked<B>,
        spec: UnsizedNorm,
    ) -> (Tracked<B>, Tracked<B>) {
        add_after::apply_with_next::<B, C>(spec, x, residual, weight, next_weight)
    }
}

/// A gradient on its way to a tensor of that dtype.
fn in_dtype<B: Backend>(gradient: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if gradient.dtype() == dtype { gradient } else { B::float_cast(gradient, dtype.into()) }
}
