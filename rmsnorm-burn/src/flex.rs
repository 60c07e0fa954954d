//! The calls on tensors of burn's CPU backend. Results are new vectors, whose matrices are not
//! zeroed before they are written; or, as in burn's own operations, they overwrite an argument
//! without another owner.

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
