//! The calls on tensors of burn's CPU backend. Results are new vectors, of which nobody zeroes the matrices first, or, as in
//! burn's own operations, take the place of what they are computed from, if nobody else has that.

mod backward;
mod forward;
mod rows;

use burn::backend::Flex;
use rmsnorm_core::Error;

use crate::kernels::{BackwardCall, ForwardCall, Forwarded, Gradients, Run};

impl Run for Flex {
    fn run_forward(call: ForwardCall<Flex>) -> Result<Forwarded<Flex>, Error> {
        forward::forward(call)
    }

    fn run_backward(call: BackwardCall<Flex>) -> Result<Gradients<Flex>, Error> {
        backward::backward(call)
    }
}
