//! y from x, weight and bias.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, TensorMetadata};
use rmsnorm_core::{Tensor, TensorSet, UnsizedNorm};

use super::Tracked;
use crate::check::or_panic;
use crate::flex::{BackwardCall, ForwardCall, Statistics};

/// What the step of a norm keeps.
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
struct NormStep;

impl<const N: usize> Backward<Flex, N> for NormStep {
    type State = State;

    fn backward(self, ops: Ops<State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let parents = ops.parents.into_iter().map(|parent| parent.map(|parent| parent.id));
        differentiate(ops.state, dy, parents, grads, checkpointer);
    }
}

/// Gives the tracked ones of x, weight and bias, `parents`, their gradients from that of the norm.
pub(super) fn differentiate(
    state: State,
    dy: FlexTensor,
    parents: impl Iterator<Item = Option<NodeId>>,
    grads: &mut Gradients,
    checkpointer: &mut Checkpointer,
) {
    let State { spec, x, weight, statistics } = state;
    let (x, weight) = (checkpointer.retrieve_node_output(x), checkpointer.retrieve_node_output(weight));
    let parents: Vec<_> = parents.collect();
    let is_wanted = |parent: usize| parents.get(parent).is_some_and(Option::is_some);
    let wanted = TensorSet::NONE.set(Tensor::Dweight, is_wanted(1)).set(Tensor::Dbias, is_wanted(2));
    let made = or_panic(BackwardCall { spec, dy, x, weight, statistics: &statistics, wanted }.run());
    for (parent, gradient) in parents.into_iter().zip([Some(made.dx), made.dweight, made.dbias]) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            grads.register::<Flex>(parent, gradient);
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

impl Again {
    fn of(spec: UnsizedNorm, x: &Tracked, weight: &Tracked, bias: Option<&Tracked>) -> Self {
        Again { spec, x: x.id(), weight: weight.id(), bias: bias.map(Tracked::id) }
    }
}

impl RetroForward for Again {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let mut state = |node: &NodeId| states.get_state::<FlexTensor>(node);
        let (x, weight, bias) = (state(&self.x), state(&self.weight), self.bias.as_ref().map(&mut state));
        let call = ForwardCall { spec: self.spec, x, residual: None, weight, bias, save: false };
        states.save(out_node, or_panic(call.run()).y);
    }
}

/// y.
pub(super) fn apply<C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
) -> Tracked {
    match bias {
        None => normalize::<C, 2>(spec, [x.node(), weight.node()], x, weight, None),
        Some(bias) => normalize::<C, 3>(spec, [x.node(), weight.node(), bias.node()], x, weight, Some(bias)),
    }
}

/// `nodes` are those of x, weight and bias.
fn normalize<C: CheckpointStrategy, const N: usize>(
    spec: UnsizedNorm,
    nodes: [NodeGuard; N],
    x: Tracked,
    weight: Tracked,
    bias: Option<Tracked>,
) -> Tracked {
    let again = Again::of(spec, &x, &weight, bias.as_ref());
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
    bias: Option<&Tracked>,
    made: (FlexTensor, Statistics),
) -> Tracked {
    match bias {
        None => keep::<C, 2>(spec, [h.node(), weight.node()], h, weight, None, made),
        Some(bias) => keep::<C, 3>(spec, [h.node(), weight.node(), bias.node()], h, weight, Some(bias), made),
    }
}

/// `nodes` are those of h, weight and bias.
fn keep<C: CheckpointStrategy, const N: usize>(
    spec: UnsizedNorm,
    nodes: [NodeGuard; N],
    h: &Tracked,
    weight: &Tracked,
    bias: Option<&Tracked>,
    (y, statistics): (FlexTensor, Statistics),
) -> Tracked {
    let prep = NormStep.prepare::<C>(nodes);
    // The kernels have no norm of one tensor alone whose result has another dtype.
    let prep = if y.dtype() == h.dtype() {
        let parents = [h, weight].into_iter().chain(bias);
        prep.memory_bound().retro_forward(Again::of(spec, h, weight, bias)).parents(parents)
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
