//! y and the sum of x and residual: one kernel, two nodes, since both have gradients.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use super::call::{Statistics, given};
use super::normalize::Taken;
use super::{Tracked, in_dtype};
use crate::kernels::{ForwardCall, Kernels};

/// The step of the sum, whose parents are x and residual. Its state is the dtype of x.
#[derive(Debug)]
struct AddStep;

impl<B: Kernels> Backward<B, 2> for AddStep {
    type State = DType;

    /// The gradient of a sum, in the dtype of each summand.
    fn backward(self, ops: Ops<DType, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [x, residual] = ops.parents;
        if let Some(x) = x {
            grads.register::<B>(x.id, in_dtype::<B>(gradient.clone(), ops.state));
        }
        if let Some(residual) = residual {
            grads.register::<B>(residual.id, gradient);
        }
    }
}

/// y and the sum.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked<B>,
    residual: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
) -> (Tracked<B>, Tracked<B>) {
    // The sum is tracked where x or residual is, and y where the sum or a parameter is.
    let save = [&x, &residual, &weight].into_iter().chain(&bias).any(Tracked::<B>::is_tracked);
    let ((x, x_node), (residual, residual_node)) = (x.into_parts(), residual.into_parts());
    let dtype = x.dtype();
    let (residual, bias_values) = (Some(residual), bias.as_ref().map(|bias| bias.primitive().clone()));
    let call = ForwardCall::<B>::new(spec, x, weight.primitive().clone());
    let made = ForwardCall { residual, bias: bias_values, ..call }.saving(save).call();
    let residual_out = given("residual_out", made.residual_out);
    // The sum is what the next layers and this norm's backward need: it is kept.
    let sum = match Backward::<B, 2>::prepare::<C>(AddStep, [x_node, residual_node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dtype, residual_out),
        OpsKind::UnTracked(prep) => prep.finish(residual_out),
    };
    let taken = Taken { spec, h: &sum, weight: &weight, bias: bias.as_ref() };
    (taken.node::<C>(given("y", made.y), || Statistics::of(made.mean, made.rstd)), sum)
}
