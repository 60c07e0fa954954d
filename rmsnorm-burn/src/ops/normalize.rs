//! y from x, weight and bias.

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
use rmsnorm_core::{NormParams, Tensor, TensorSet};

use super::Tracked;
use crate::check::given;
use crate::kernels::{ForwardCall, Kernels, Maybe};

/// The state of a norm's step.
#[derive(Clone, Debug)]
pub(super) struct State<B: Backend> {
    pub(super) spec: NormParams,
    /// The node of the normalized tensor.
    pub(super) x: NodeId,
    pub(super) weight: NodeId,
    /// The forward pass's statistics: f32, (rows). Only layer norm has a mean.
    pub(super) mean: Maybe<B>,
    pub(super) rstd: Maybe<B>,
}

/// The step of y: its parents are x, weight and, with a bias, bias.
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

/// Registers the gradients of the tracked `parents` (x, weight, bias), from the gradient of the
/// norm.
pub(super) fn differentiate<B: Kernels>(
    state: State<B>,
    dy: FloatTensor<B>,
    parents: impl Iterator<Item = Option<NodeId>>,
    grads: &mut Gradients,
    checkpointer: &mut Checkpointer,
) {
    let State { spec, x, weight, mean, rstd } = state;
    let (x, weight) = (checkpointer.retrieve_node_output(x), checkpointer.retrieve_node_output(weight));
    let parents: Vec<_> = parents.collect();
    let is_wanted = |parent: usize| parents.get(parent).is_some_and(Option::is_some);
    let wanted = TensorSet::NONE.set(Tensor::Dweight, is_wanted(1)).set(Tensor::Dbias, is_wanted(2));
    let made = B::backward(dy, x, weight, mean, given("rstd", rstd.into_option()), spec, wanted);
    let gradients = [Some(made.dx), made.dweight.into_option(), made.dbias.into_option()];
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
    bias: Option<NodeId>,
    backend: PhantomData<B>,
}

impl<B: Kernels> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let mut state = |node: &NodeId| states.get_state::<FloatTensor<B>>(node);
        let (x, weight, bias) = (state(&self.x), state(&self.weight), self.bias.as_ref().map(&mut state));
        states.save(out_node, Normalized::<B>::of(self.spec, x, weight, bias, false).y);
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
        bias: Option<FloatTensor<B>>,
        save: bool,
    ) -> Self {
        let (residual, next_weight, next_bias, wanted) = (None, None, None, TensorSet::NONE);
        let call = ForwardCall::<B> { spec, x, residual, weight, bias, next_weight, next_bias, wanted };
        let made = call.saving(save).call();
        Normalized { y: given("y", made.y.into_option()), mean: made.mean, rstd: made.rstd }
    }
}

/// y with its node. For a sum x, y was computed together with the sum, and is `taken`.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: NormParams,
    x: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
    taken: Option<Normalized<B>>,
) -> Tracked<B> {
    match bias {
        None => with_nodes::<B, C, 2>(spec, [x.node(), weight.node()], x, weight, None, taken),
        Some(bias) => with_nodes::<B, C, 3>(spec, [x.node(), weight.node(), bias.node()], x, weight, Some(bias), taken),
    }
}

/// `nodes` are the nodes of x, weight and bias.
fn with_nodes<B: Kernels, C: CheckpointStrategy, const N: usize>(
    spec: NormParams,
    nodes: [NodeGuard; N],
    x: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
    taken: Option<Normalized<B>>,
) -> Tracked<B> {
    let prep = Backward::<B, N>::prepare::<C>(NormStep, nodes);
    // No kernel normalizes a single tensor to another dtype, so such a y is kept.
    let prep = if taken.as_ref().is_none_or(|taken| taken.y.dtype() == x.dtype()) {
        let bias_id = bias.as_ref().map(Tracked::<B>::id);
        let again = Again::<B> { spec, x: x.id(), weight: weight.id(), bias: bias_id, backend: PhantomData };
        prep.memory_bound().retro_forward(again).parents([&x, &weight].into_iter().chain(&bias))
    } else {
        prep.compute_bound()
    };
    let make = |x: Tracked<B>, weight: Tracked<B>, save| {
        let bias = bias.map(|bias| bias.into_primitive());
        taken.unwrap_or_else(|| Normalized::of(spec, x.into_primitive(), weight.into_primitive(), bias, save))
    };
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let (x_node, weight_node) = (prep.checkpoint(&x), prep.checkpoint(&weight));
            let Normalized { y, mean, rstd } = make(x, weight, true);
            prep.finish(State { spec, x: x_node, weight: weight_node, mean, rstd }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(make(x, weight, false).y),
    }
}
