//! The sum of residual and the norm of x, and y, which is the next norm of that sum: one kernel for both.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use rmsnorm_core::UnsizedNorm;

use super::call::{Statistics, given};
use super::normalize::{State, Taken, differentiate};
use super::{Tracked, in_dtype};
use crate::kernels::{ForwardCall, Kernels};

/// The step of the sum: its parents are residual and those of the norm, which are x, weight and, if there is one, bias. Its state
/// is the norm's and the dtype of x, where one of these three is tracked.
#[derive(Debug)]
struct AddAfterStep;

impl<B: Kernels, const N: usize> Backward<B, N> for AddAfterStep {
    type State = Option<(State<B>, DType)>;

    /// The gradient of a sum: that of the residual as it is, and that of the norm's result in the dtype of x.
    fn backward(self, ops: Ops<Option<(State<B>, DType)>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let mut parents = ops.parents.into_iter().map(|parent| parent.map(|parent| parent.id));
        if let Some(residual) = parents.next().flatten() {
            grads.register::<B>(residual, gradient.clone());
        }
        if let Some((norm, dtype)) = ops.state {
            differentiate::<B>(norm, in_dtype::<B>(gradient, dtype), parents, grads, checkpointer);
        }
    }
}

/// The sum.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked<B>,
    residual: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
) -> Tracked<B> {
    let norm = Operands { x, weight, bias };
    let (residual, residual_node) = residual.into_parts();
    let made = norm.forward(spec, residual).call();
    norm.node::<C>(spec, residual_node, given("residual_out", made.residual_out), || {
        Statistics::of(made.mean, made.rstd)
    })
}

/// y and the sum.
pub(super) fn apply_with_next<B: Kernels, C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked<B>,
    residual: Tracked<B>,
    weight: Tracked<B>,
    next_weight: Tracked<B>,
) -> (Tracked<B>, Tracked<B>) {
    let norm = Operands { x, weight, bias: None };
    let save_next = norm.is_tracked() || residual.is_tracked() || next_weight.is_tracked();
    let (residual, residual_node) = residual.into_parts();
    let of_next = Some(next_weight.primitive().clone());
    let made = ForwardCall { next_weight: of_next, ..norm.forward(spec, residual) }.saving_next(save_next).call();
    let residual_out = given("residual_out", made.residual_out);
    let sum = norm.node::<C>(spec, residual_node, residual_out, || Statistics::of(made.mean, made.rstd));
    let taken = Taken { spec, h: &sum, weight: &next_weight, bias: None };
    (taken.node::<C>(given("y", made.y), || Statistics::of(made.next_mean, made.next_rstd)), sum)
}

/// What the norm of x is computed from.
struct Operands<B: Kernels> {
    x: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
}

impl<B: Kernels> Operands<B> {
    fn is_tracked(&self) -> bool {
        [&self.x, &self.weight].into_iter().chain(&self.bias).any(Tracked::<B>::is_tracked)
    }

    /// The sum, without a next norm. The residual comes without its node, so that the sum may take its place: no gradient needs it.
    fn forward(&self, spec: UnsizedNorm, residual: FloatTensor<B>) -> ForwardCall<B> {
        let (x, weight) = (self.x.primitive().clone(), self.weight.primitive().clone());
        let bias = self.bias.as_ref().map(|bias| bias.primitive().clone());
        ForwardCall { bias, ..ForwardCall::onto(spec, x, residual, weight) }.saving(self.is_tracked())
    }

    /// The sum with its node. The statistics are asked for if something of the norm is tracked.
    fn node<C: CheckpointStrategy>(
        &self,
        spec: UnsizedNorm,
        residual: NodeGuard,
        sum: FloatTensor<B>,
        statistics: impl FnOnce() -> Statistics<B>,
    ) -> Tracked<B> {
        let (x, weight) = (self.x.node(), self.weight.node());
        match &self.bias {
            None => self.finish::<C, 3>(spec, [residual, x, weight], sum, statistics),
            Some(bias) => self.finish::<C, 4>(spec, [residual, x, weight, bias.node()], sum, statistics),
        }
    }

    /// The sum is what the next layers and the next norm's backward need: it is kept.
    fn finish<C: CheckpointStrategy, const N: usize>(
        &self,
        spec: UnsizedNorm,
        nodes: [NodeGuard; N],
        sum: FloatTensor<B>,
        statistics: impl FnOnce() -> Statistics<B>,
    ) -> Tracked<B> {
        match Backward::<B, N>::prepare::<C>(AddAfterStep, nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = self.is_tracked().then(|| {
                    let (x, weight) = (prep.checkpoint(&self.x), prep.checkpoint(&self.weight));
                    (State { spec, x, weight, statistics: statistics() }, self.x.dtype())
                });
                prep.finish(state, sum)
            }
            OpsKind::UnTracked(prep) => prep.finish(sum),
        }
    }
}
