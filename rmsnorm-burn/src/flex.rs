//! The calls on tensors of burn's CPU backend. Results are new vectors, of which nobody zeroes the matrices first, or, as in
//! burn's own operations, take the place of what they are computed from, if nobody else has that.

mod backward;
mod forward;
mod rows;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use rmsnorm_core::{TensorSet, UnsizedNorm};

use crate::check::or_panic;
use crate::kernels::{BackwardCall, ForwardCall, Forwarded, Gradients, Kernels, Maybe};

impl Kernels for Flex {
    fn forward(
        x: FlexTensor,
        residual: Maybe<Flex>,
        weight: FlexTensor,
        bias: Maybe<Flex>,
        next_weight: Maybe<Flex>,
        spec: UnsizedNorm,
        wanted: TensorSet,
    ) -> Forwarded<Flex> {
        let (residual, bias, next_weight) = (residual.into_option(), bias.into_option(), next_weight.into_option());
        or_panic(ForwardCall { spec, x, residual, weight, bias, next_weight, wanted }.run())
    }

    fn backward(
        dy: FlexTensor,
        x: FlexTensor,
        weight: FlexTensor,
        mean: Maybe<Flex>,
        rstd: FlexTensor,
        spec: UnsizedNorm,
        wanted: TensorSet,
    ) -> Gradients<Flex> {
        or_panic(BackwardCall { spec, dy, x, weight, mean: mean.into_option(), rstd, wanted }.run())
    }
}
