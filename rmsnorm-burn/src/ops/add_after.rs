//! The sum of residual and the norm of x, and y, which is the next norm of that sum: one kernel for both.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use super::normalize::{State, differentiate, take};
use super::{Tracked, in_dtype};
use crate::check::or_panic;
use crate::flex::{AddAfterCall, Added};

/// The step of the sum: its parents are residual and those of the norm, which are x, weight and, if there is one, bias. Its state
/// is the norm's and the dtype of x, where one of these three is tracked.
#[derive(Debug)]
struct AddAfterStep;

impl<const N: usize> Backward<Flex, N> for AddAfterStep {
    type State = Option<(State, DType)>;

    /// The gradient of a sum: that of the residual as it is, and that of the norm's result in the dtype of x.
    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<Flex>(&ops.node);
        let mut parents = ops.parents.into_iter().map(|parent| parent.map(|parent| parent.id));
        if let Some(residual) = parents.next().flatten() {
            grads.register::<Flex>(residual, gradient.clone());
        }
        if let Some((norm, dtype)) = ops.state {
            differentiate(norm, in_dtype(gradient, dtype), parents, grads, checkpointer);
        }
    }
}

/// The sum.
pub(super) fn apply<C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked,
    residual: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
) -> Tracked {
    let norm = Operands { x, weight, bias };
    let (residual, residual_node) = residual.into_parts();
    let made = or_panic(norm.call(spec, residual).run());
    norm.node::<C>(spec, residual_node, made)
}

/// y and the sum.
pub(super) fn apply_with_next<C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked,
    residual: Tracked,
    weight: Tracked,
    next_weight: Tracked,
) -> (Tracked, Tracked) {
    let norm = Operands { x, weight, bias: None };
    let save_next = norm.is_tracked() || residual.is_tracked() || next_weight.is_tracked();
    let (residual, residual_node) = residual.into_parts();
    let of_next = Some(next_weight.primitive().clone());
    let call = AddAfterCall { next_weight: of_next, save_next, ..norm.call(spec, residual) };
    let mut made = or_panic(call.run());
    let next = or_panic(made.take_next());
    let sum = norm.node::<C>(spec, residual_node, made);
    (take::<C>(spec, &sum, &next_weight, None, next), sum)
}

/// What the norm of x is computed from.
struct Operands {
    x: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
}

impl Operands {
    fn is_tracked(&self) -> bool {
        self.x.is_tracked() || self.weight.is_tracked() || self.bias.as_ref().is_some_and(Tracked::is_tracked)
    }

    /// The sum, without a next norm. The residual comes without its node, so that the sum may take its place: no gradient needs it.
    fn call(&self, spec: UnsizedNorm, residual: FlexTensor) -> AddAfterCall {
        let (x, weight) = (self.x.primitive().clone(), self.weight.primitive().clone());
        let bias = self.bias.as_ref().map(|bias| bias.primitive().clone());
        AddAfterCall { bias, save: self.is_tracked(), ..AddAfterCall::new(spec, x, residual, weight) }
    }

    /// The sum with its node.
    fn node<C: CheckpointStrategy>(&self, spec: UnsizedNorm, residual: NodeGuard, made: Added) -> Tracked {
        let (x, weight) = (self.x.node(), self.weight.node());
        match &self.bias {
            None => self.finish::<C, 3>(spec, [residual, x, weight], made),
            Some(bias) => self.finish::<C, 4>(spec, [residual, x, weight, bias.node()], made),
        }
    }

    /// The sum is what the next layers and the next norm's backward need: it is kept.
    fn finish<C: CheckpointStrategy, const N: usize>(
        &self,
        spec: UnsizedNorm,
        nodes: [NodeGuard; N],
        Added { sum, statistics, .. }: Added,
    ) -> Tracked {
        match AddAfterStep.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = self.is_tracked().then(|| {
                    let (x, weight) = (prep.checkpoint(&self.x), prep.checkpoint(&self.weight));
                    (State { spec, x, weight, statistics: Arc::new(statistics) }, self.x.dtype())
                });
                prep.finish(state, sum)
            }
            OpsKind::UnTracked(prep) => prep.finish(sum),
        }
    }
}
