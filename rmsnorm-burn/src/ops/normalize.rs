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
use rmsnorm_core::{Tensor, TensorSet, UnsizedNorm};

use super::Tracked;
use super::call::{Statistics, given, y};
use crate::kernels::{ForwardCall, Kernels};

/// What the step of a norm keeps.
#[derive(Clone, Debug)]
pub(super) struct State<B: Backend> {
    pub(super) spec: UnsizedNorm,
    /// The node of what was normalized.
    pub(super) x: NodeId,
    pub(super) weight: NodeId,
    pub(super) statistics: Statistics<B>,
}

/// The step of y: its parents are x, weight and, if there is one, bias.
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

/// Gives the tracked ones of x, weight and bias, `parents`, their gradients from that of the norm.
pub(super) fn differentiate<B: Kernels>(
    state: State<B>,
    dy: FloatTensor<B>,
    parents: impl Iterator<Item = Option<NodeId>>,
    grads: &mut Gradients,
    checkpointer: &mut Checkpointer,
) {
    let State { spec, x, weight, statistics: Statistics { mean, rstd } } = state;
    let (x, weight) = (checkpointer.retrieve_node_output(x), checkpointer.retrieve_node_output(weight));
    let parents: Vec<_> = parents.collect();
    let is_wanted = |parent: usize| parents.get(parent).is_some_and(Option::is_some);
    let wanted = TensorSet::NONE.set(Tensor::Dweight, is_wanted(1)).set(Tensor::Dbias, is_wanted(2));
    let made = B::backward(dy, x, weight, mean, rstd, spec, wanted);
    let gradients = [Some(made.dx), made.dweight.into_option(), made.dbias.into_option()];
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(parent, gradient);
        }
    }
}

/// y once more, where checkpointing has dropped it.
#[derive(Debug)]
struct Again<B> {
    spec: UnsizedNorm,
    x: NodeId,
    weight: NodeId,
    bias: Option<NodeId>,
    backend: PhantomData<B>,
}

impl<B: Kernels> Again<B> {
    fn of(spec: UnsizedNorm, x: &Tracked<B>, weight: &Tracked<B>, bias: Option<&Tracked<B>>) -> Self {
        Again { spec, x: x.id(), weight: weight.id(), bias: bias.map(Tracked::<B>::id), backend: PhantomData }
    }
}

impl<B: Kernels> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let mut state = |node: &NodeId| states.get_state::<FloatTensor<B>>(node);
        let (x, weight, bias) = (state(&self.x), state(&self.weight), self.bias.as_ref().map(&mut state));
        states.save(out_node, y(ForwardCall { bias, ..ForwardCall::<B>::new(self.spec, x, weight) }.call()));
    }
}

/// y.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: UnsizedNorm,
    x: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
) -> Tracked<B> {
    match bias {
        None => normalize::<B, C, 2>(spec, [x.node(), weight.node()], x, weight, None),
        Some(bias) => normalize::<B, C, 3>(spec, [x.node(), weight.node(), bias.node()], x, weight, Some(bias)),
    }
}

/// `nodes` are those of x, weight and bias.
fn normalize<B: Kernels, C: CheckpointStrategy, const N: usize>(
    spec: UnsizedNorm,
    nodes: [NodeGuard; N],
    x: Tracked<B>,
    weight: Tracked<B>,
    bias: Option<Tracked<B>>,
) -> Tracked<B> {
    let again = Again::<B>::of(spec, &x, &weight, bias.as_ref());
    let parents = [&x, &weight].into_iter().chain(&bias);
    let prep = Backward::<B, N>::prepare::<C>(NormStep, nodes).memory_bound().retro_forward(again).parents(parents);
    match prep.stateful() {
        OpsKind::Tracked(mut prep) => {
            let (x_node, weight_node) = (prep.checkpoint(&x), prep.checkpoint(&weight));
            let made = call(spec, x, weight, bias).saving(true).call();
            let statistics = Statistics::of(made.mean, made.rstd);
            prep.finish(State { spec, x: x_node, weight: weight_node, statistics }, given("y", made.y))
        }
        OpsKind::UnTracked(prep) => prep.finish(y(call(spec, x, weight, bias).call())),
    }
}

fn call<B: Kernels>(spec: UnsizedNorm, x: Tracked<B>, weight: Tracked<B>, bias: Option<Tracked<B>>) -> ForwardCall<B> {
    let bias = bias.map(|bias| bias.into_primitive());
    ForwardCall { bias, ..ForwardCall::new(spec, x.into_primitive(), weight.into_primitive()) }
}

/// What y of a sum was computed from, h, and by.
pub(super) struct Taken<'a, B: Kernels> {
    pub(super) spec: UnsizedNorm,
    pub(super) h: &'a Tracked<B>,
    pub(super) weight: &'a Tracked<B>,
    pub(super) bias: Option<&'a Tracked<B>>,
}

impl<B: Kernels> Taken<'_, B> {
    /// y with its node, where it was computed together with the sum. The statistics are asked for if it is tracked.
    pub(super) fn node<C: CheckpointStrategy>(
        self,
        y: FloatTensor<B>,
        statistics: impl FnOnce() -> Statistics<B>,
    ) -> Tracked<B> {
        let (h, weight) = (self.h.node(), self.weight.node());
        match self.bias {
            None => self.finish::<C, 2>([h, weight], y, statistics),
            Some(bias) => self.finish::<C, 3>([h, weight, bias.node()], y, statistics),
        }
    }

    fn finish<C: CheckpointStrategy, const N: usize>(
        self,
        nodes: [NodeGuard; N],
        y: FloatTensor<B>,
        statistics: impl FnOnce() -> Statistics<B>,
    ) -> Tracked<B> {
        let Taken { spec, h, weight, bias } = self;
        let prep = Backward::<B, N>::prepare::<C>(NormStep, nodes);
        // The kernels have no norm of one tensor alone whose result has another dtype.
        let prep = if y.dtype() == h.dtype() {
            let parents = [h, weight].into_iter().chain(bias);
            prep.memory_bound().retro_forward(Again::<B>::of(spec, h, weight, bias)).parents(parents)
        } else {
            prep.compute_bound()
        };
        match prep.stateful() {
            OpsKind::Tracked(mut prep) => {
                let (x, weight) = (prep.checkpoint(h), prep.checkpoint(weight));
                prep.finish(State { spec, x, weight, statistics: statistics() }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
