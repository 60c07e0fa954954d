//! y and the sum of x and residual: one kernel, two nodes, since both have gradients.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use super::normalize::take;
use super::{Tracked, in_dtype};
use crate::check::or_panic;
use crate::flex::{ForwardCall, Normalized};

/// The step of the sum, whose parents are x and residual. Its state is the dtype of x.
#[derive(Debug)]
struct AddStep;

impl Backward<Flex, 2> for AddStep {
    type State = DType;

    /// The gradient of a sum, in the dtype of each summand.
    fn backward(self, ops: Ops<DType, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let [x, residual] = ops.parents;
        if let Some(x) = x {
            grads.register::<Flex>(x.id, in_dtype(gradient.clone(), ops.state));
        }
        if let Some(residual) = residual {
            grads.register::<Flex>(residual.id, gradient);
        }
    }
}

/// y and the sum.
pub(super) fn apply<C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked,
    residual: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
) -> (Tracked, Tracked) {
    // The sum is tracked where x or residual is, and y where the sum or a parameter is.
    let save = [&x, &residual, &weight].into_iter().chain(&bias).any(Tracked::is_tracked);
    let ((x, x_node), (residual, residual_node)) = (x.into_parts(), residual.into_parts());
    let dtype = x.dtype();
    let (residual, bias_values) = (Some(residual), bias.as_ref().map(|bias| bias.primitive().clone()));
    let call = ForwardCall { spec, x, residual, weight: weight.primitive().clone(), bias: bias_values, save };
    let (y, residual_out, statistics) = or_panic(call.run().and_then(Normalized::with_sum));
    // The sum is what the next layers and this norm's backward need: it is kept.
    let sum = match AddStep.prepare::<C>([x_node, residual_node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dtype, residual_out),
        OpsKind::UnTracked(prep) => prep.finish(residual_out),
    };
    (take::<C>(spec, &sum, &weight, bias.as_ref(), (y, statistics)), sum)
}
