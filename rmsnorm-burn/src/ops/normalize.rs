//! y from x, weight, gate and bias.

use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use rmsnorm_core::{NormParams, Slot, Tensor, TensorSet};

use super::Tracked;
use crate::check::given;
use crate::kernels::{ForwardCall, Kernels, Maybe, Saved};

/// The state of a norm's step.
#[derive(Clone, Debug)]
pub(super) struct State<B: Backend> {
    pub(super) spec: NormParams,
    /// The node of the normalized tensor.
    pub(super) x: NodeId,
    pub(super) weight: NodeId,
    pub(super) gate: Option<NodeId>,
    /// Only with a gate after the norm, whose gradient needs it.
    pub(super) bias: Option<NodeId>,
    /// The forward pass's statistics: f32, (rows * groups). Only layer norm has a mean.
    pub(super) mean: Maybe<B>,
    pub(super) rstd: Maybe<B>,
}

/// The step of y: its parents are x, weight and, where the norm has them, gate and bias.
#[derive(Debug)]
struct NormStep;

impl<B: Kernels, const N: usize> Backward<B, N> for NormStep {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let parents = ops.parents.into_iter().map(|parent| parent.map(|parent| parent.id));
        differentiate::<B>(ops.state, dy, parents, grads, checkpointer);
    }
}

/// Registers the gradients of the tracked `parents` (x, weight, gate and bias where the norm has
/// them), from the gradient of the norm.
pub(super) fn differentiate<B: Kernels>(
    state: State<B>,
    dy: FloatTensor<B>,
    parents: impl Iterator<Item = Option<NodeId>>,
    grads: &mut Gradients,
    checkpointer: &mut Checkpointer,
) {
    let State { spec, x, weight, gate, bias, mean, rstd } = state;
    let has_gate = gate.is_some();
    let (x, weight) = (checkpointer.retrieve_node_output(x), checkpointer.retrieve_node_output(weight));
    let [gate, bias] = [gate, bias].map(|node| Maybe::of(node.map(|node| checkpointer.retrieve_node_output(node))));
    let parents: Vec<_> = parents.collect();
    let is_wanted = |parent: usize| parents.get(parent).is_some_and(Option::is_some);
    let wanted = TensorSet::NONE.set(Tensor::Dweight, is_wanted(1)).set(Tensor::Dgate, has_gate && is_wanted(2));
    let wanted = wanted.set(Tensor::Dbias, is_wanted(2 + usize::from(has_gate)));
    let saved = Saved { mean, gate, bias };
    let made = B::backward(dy, x, weight, given("rstd", rstd.into_option()), saved, spec, wanted);
    let of_gate = has_gate.then(|| made.dgate.into_option());
    let gradients = [Some(made.dx), made.dweight.into_option()].into_iter();
    let gradients = gradients.chain(of_gate).chain([made.dbias.into_option()]);
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(parent, gradient);
        }
    }
}

/// Recomputes y after checkpointing dropped it.
#[derive(Debug)]
struct Again<B> {
    spec: NormParams,
    x: NodeId,
    weight: NodeId,
    gate: Option<NodeId>,
    bias: Option<NodeId>,
    backend: PhantomData<B>,
}

impl<B: Kernels> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let mut state = |node: &NodeId| states.get_state::<FloatTensor<B>>(node);
        let (x, weight) = (state(&self.x), state(&self.weight));
        let optional = [&self.gate, &self.bias].map(|node| node.as_ref().map(&mut state));
        states.save(out_node, Normalized::<B>::of(self.spec, x, weight, optional, false).y);
    }
}

/// y, and the statistics if there will be a backward pass.
pub(super) struct Normalized<B: Backend> {
    pub(super) y: FloatTensor<B>,
    pub(super) mean: Maybe<B>,
    pub(super) rstd: Maybe<B>,
}

impl<B: Kernels> Normalized<B> {
    fn of(
        spec: NormParams,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        [gate, bias]: [Option<FloatTensor<B>>; 2],
        save: bool,
    ) -> Self {
        let (residual, next_weight, next_bias, wanted) = (None, None, None, TensorSet::NONE);
        let call = ForwardCall::<B> { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted };
        let made = call.saving(save).call();
        Normalized { y: given("y", made.y.into_option()), mean: made.mean, rstd: made.rstd }
    }
}

/// y with its node. For a sum x, y was computed together with the sum, and is `taken`.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: NormParams,
    x: Tracked<B>,
    weight: Tracked<B>,
    gate: Option<Tracked<B>>,
    bias: Option<Tracked<B>>,
    taken: Option<Normalized<B>>,
) -> Tracked<B> {
    let node = |tensor: &Option<Tracked<B>>| tensor.as_ref().map(Tracked::<B>::node);
    let (first, second, of_gate, of_bias) = (x.node(), weight.node(), node(&gate), node(&bias));
    let optional = [gate, bias];
    match (of_gate, of_bias) {
        (None, None) => with_nodes::<B, C, 2>(spec, [first, second], x, weight, optional, taken),
        (Some(one), None) | (None, Some(one)) => {
            with_nodes::<B, C, 3>(spec, [first, second, one], x, weight, optional, taken)
        }
        (Some(gate), Some(bias)) => {
            with_nodes::<B, C, 4>(spec, [first, second, gate, bias], x, weight, optional, taken)
        }
    }
}

/// `nodes` are the nodes of x, weight and, where the norm has them, gate and bias.
fn with_nodes<B: Kernels, C: CheckpointStrategy, const N: usize>(
    spec: NormParams,
    nodes: [NodeGuard; N],
    x: Tracked<B>,
    weight: Tracked<B>,
    optional: [Option<Tracked<B>>; 2],
    taken: Option<Normalized<B>>,
) -> Tracked<B> {
    let prep = Backward::<B, N>::prepare::<C>(NormStep, nodes);
    // A y that was taken from a sum of another dtype is kept, as `spec` does not tell its dtype.
    let prep = if taken.as_ref().is_none_or(|taken| taken.y.dtype() == x.dtype()) {
        let [gate, bias] = optional.each_ref().map(|tensor| tensor.as_ref().map(Tracked::<B>::id));
        let again = Again::<B> { spec, x: x.id(), weight: weight.id(), gate, bias, backend: PhantomData };
        prep.memory_bound().retro_forward(again).parents([&x, &weight].into_iter().chain(optional.iter().flatten()))
    } else {
        prep.compute_bound()
    };
    let make = |x: Tracked<B>, weight: Tracked<B>, optional: [Option<Tracked<B>>; 2], save| {
        let optional = optional.map(|tensor| tensor.map(|tensor| tensor.into_primitive()));
        taken.unwrap_or_else(|| Normalized::of(spec, x.into_primitive(), weight.into_primitive(), optional, save))
    };
    let is_after = spec.gate.is_some_and(|gate| gate.slot == Slot::After);
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let (x_node, weight_node) = (prep.checkpoint(&x), prep.checkpoint(&weight));
            let [gate, bias] = &optional;
            let gate = gate.as_ref().map(|gate| prep.checkpoint(gate));
            let bias = bias.as_ref().filter(|_| is_after).map(|bias| prep.checkpoint(bias));
            let Normalized { y, mean, rstd } = make(x, weight, optional, true);
            prep.finish(State { spec, x: x_node, weight: weight_node, gate, bias, mean, rstd }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(make(x, weight, optional, false).y),
    }
}
