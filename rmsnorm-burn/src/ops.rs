//! The operations as burn's dispatch and its autodiff know them.
//!
//! A step of burn's graph has a state, which is where the statistics go. What it needs of its arguments it keeps by their nodes'
//! numbers, so that a checkpointing strategy may drop and recompute them.
//!
//! | operation | is a node that gives | its state has |
//! |---|---|---|
//! | [`normalize`] | y from x, weight and bias | the statistics |
//! | [`add`] | the sum of x and residual, and from it y by `normalize`'s node: one kernel for both | the dtype of x |

mod add;
mod normalize;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use rmsnorm_core::UnsizedNorm;

use crate::check::or_panic;
use crate::flex::{ForwardCall, Normalized};

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
}

impl NormOps for Flex {
    fn normalize(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: UnsizedNorm) -> FloatTensor<Self> {
        or_panic(ForwardCall { spec, x, residual: None, weight, bias: None, save: false }.run()).y
    }

    fn normalize_affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self> {
        or_panic(ForwardCall { spec, x, residual: None, weight, bias: Some(bias), save: false }.run()).y
    }

    fn add_normalize(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let call = ForwardCall { spec, x, residual: Some(residual), weight, bias: None, save: false };
        let (y, residual_out, _) = or_panic(call.run().and_then(Normalized::with_sum));
        (y, residual_out)
    }
}
