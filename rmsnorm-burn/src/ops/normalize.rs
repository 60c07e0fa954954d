//! y from x, weight and bias.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use rmsnorm_core::{Tensor, TensorSet, UnsizedNorm};

use super::NormOps;
use crate::check::or_panic;
use crate::flex::{BackwardCall, ForwardCall, Statistics};

/// A tensor with its node.
pub(super) type Tracked = FloatTensor<Autodiff<Flex>>;

/// What [`NormStep`] keeps.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) spec: UnsizedNorm,
    /// The node of what was normalized.
    pub(super) x: NodeId,
    pub(super) weight: NodeId,
    pub(super) statistics: Arc<Statistics>,
}

/// The step of y: its parents are x, weight and, if there is one, bias.
#[derive(Debug)]
pub(super) struct NormStep;

impl<const N: usize> Backward<Flex, N> for NormStep {
    type State = State;

    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let State { spec, x, weight, statistics } = ops.state;
        let (x, weight) = (checkpointer.retrieve_node_output(x), checkpointer.retrieve_node_output(weight));
        let is_wanted = |parent: usize| ops.parents.get(parent).is_some_and(Option::is_some);
        let wanted = TensorSet::NONE.set(Tensor::Dweight, is_wanted(1)).set(Tensor::Dbias, is_wanted(2));
        let made = or_panic(BackwardCall { spec, dy, x, weight, statistics: &statistics, wanted }.run());
        for (parent, gradient) in ops.parents.into_iter().zip([Some(made.dx), made.dweight, made.dbias]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// y once more, where checkpointing has dropped it.
#[derive(Debug)]
struct Again {
    spec: UnsizedNorm,
    x: NodeId,
    weight: NodeId,
    bias: Option<NodeId>,
}

impl RetroForward for Again {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let mut state = |node: &NodeId| states.get_state::<FlexTensor>(node);
        let (x, weight, bias) = (state(&self.x), state(&self.weight), self.bias.as_ref().map(&mut state));
        let call = ForwardCall { spec: self.spec, x, residual: None, weight, bias, save: false };
        states.save(out_node, or_panic(call.run()).y);
    }
}

/// `nodes` are those of x, weight and bias.
fn apply<C: CheckpointStrategy, const N: usize>(
    spec: UnsizedNorm,
    nodes: [NodeGuard; N],
    x: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
) -> Tracked {
    let again = Again { spec, x: x.id(), weight: weight.id(), bias: bias.as_ref().map(|bias| bias.id()) };
    let parents = [&x, &weight].into_iter().chain(&bias);
    let prep = NormStep.prepare::<C>(nodes).memory_bound().retro_forward(again).parents(parents);
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let (x_node, weight_node) = (prep.checkpoint(&x), prep.checkpoint(&weight));
            let made = or_panic(call(spec, x, weight, bias, true).run());
            let statistics = Arc::new(made.statistics);
            prep.finish(State { spec, x: x_node, weight: weight_node, statistics }, made.y)
        }
        OpsKind::UnTracked(prep) => prep.finish(or_panic(call(spec, x, weight, bias, false).run()).y),
    }
}

fn call(spec: UnsizedNorm, x: Tracked, weight: Tracked, bias: Option<Tracked>, save: bool) -> ForwardCall {
    let (x, weight) = (x.into_primitive(), weight.into_primitive());
    ForwardCall { spec, x, residual: None, weight, bias: bias.map(|bias| bias.into_primitive()), save }
}

/// y, which was computed with the sum that it is the norm of.
pub(super) fn take<C: CheckpointStrategy>(
    spec: UnsizedNorm,
    h: &Tracked,
    weight: &Tracked,
    y: FlexTensor,
    statistics: Statistics,
) -> Tracked {
    let prep = NormStep.prepare::<C>([h.node(), weight.node()]);
    // The kernels have no norm of one tensor alone whose result has another dtype.
    let prep = if y.dtype() == h.dtype() {
        let again = Again { spec, x: h.id(), weight: weight.id(), bias: None };
        prep.memory_bound().retro_forward(again).parents([h, weight])
    } else {
        prep.compute_bound()
    };
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let (x, weight) = (prep.checkpoint(h), prep.checkpoint(weight));
            prep.finish(State { spec, x, weight, statistics: Arc::new(statistics) }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

impl<C: CheckpointStrategy> NormOps for Autodiff<Flex, C> {
    fn normalize(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: UnsizedNorm) -> FloatTensor<Self> {
        apply::<C, 2>(spec, [x.node(), weight.node()], x, weight, None)
    }

    fn normalize_affine(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> FloatTensor<Self> {
        apply::<C, 3>(spec, [x.node(), weight.node(), bias.node()], x, weight, Some(bias))
    }

    fn add_normalize(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        spec: UnsizedNorm,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::add::apply::<C>(spec, x, residual, weight)
    }
}
