//! x + residual, or residual + norm(x), and y, the norm of that sum: one kernel for both, but two
//! nodes, because both have gradients.

use burn::backend::TensorMetadata;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use rmsnorm_core::{NormParams, ResidualPlacement, TensorSet};

use super::normalize::{Normalized, State, apply as normalize, differentiate};
use super::{Tracked, in_dtype};
use crate::check::given;
use crate::kernels::{ForwardCall, Kernels, Maybe};

/// The step of the sum. Its parents are residual and x; if x is normalized first, residual and the
/// parents of the norm: x, weight and, with a bias, bias. Its state is the dtype of x, and the
/// norm's state if one of these three is tracked.
#[derive(Debug)]
struct SumStep;

impl<B: Kernels, const N: usize> Backward<B, N> for SumStep {
    type State = (DType, Option<State<B>>);

    /// The gradients of the sum: unchanged for the residual; in the dtype of x for x, or as the
    /// norm's dy.
    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let mut parents = ops.parents.into_iter().map(|parent| parent.map(|parent| parent.id));
        if let Some(residual) = parents.next().flatten() {
            grads.register::<B>(residual, gradient.clone());
        }
        let (dtype, norm) = ops.state;
        if let Some(norm) = norm {
            differentiate::<B>(norm, in_dtype::<B>(gradient, dtype), parents, grads, checkpointer);
        } else if let Some(x) = parents.next().flatten() {
            grads.register::<B>(x, in_dtype::<B>(gradient, dtype));
        }
    }
}

/// y, if wanted, and the sum.
pub(super) fn apply<B: Kernels, C: CheckpointStrategy>(
    spec: NormParams,
    x: Tracked<B>,
    residual: Tracked<B>,
    weight: Tracked<B>,
    [gate, bias, next_weight, next_bias]: [Option<Tracked<B>>; 4],
) -> (Option<Tracked<B>>, Tracked<B>) {
    let is_tracked = [&x, &weight].into_iter().chain(&bias).any(Tracked::<B>::is_tracked);
    // The sum is tracked if x, residual or a parameter of x's norm is; y is tracked if the sum, the
    // gate or a parameter of y's norm is.
    let of_y = [gate.as_ref(), next_weight.as_ref(), next_bias.as_ref()];
    let is_y_tracked = is_tracked || residual.is_tracked() || of_y.into_iter().flatten().any(Tracked::<B>::is_tracked);
    let dtype = x.dtype();
    // The spec of each norm, without the residual.
    let alone = NormParams { residual_placement: ResidualPlacement::default(), ..spec };
    let values = |tensor: &Option<Tracked<B>>| tensor.as_ref().map(|tensor| tensor.primitive().clone());
    let (of_weight, of_gate, of_bias) = (weight.primitive().clone(), values(&gate), values(&bias));
    let (of_next_weight, of_next_bias) = (values(&next_weight), values(&next_bias));
    // Without its node, so that the sum may overwrite the residual, which no gradient needs.
    let (residual, residual_node) = residual.into_parts();
    let call = |x, save, save_next| {
        let (residual, gate, wanted) = (Some(residual), of_gate, TensorSet::NONE);
        let (weight, bias, next_weight, next_bias) = (of_weight, of_bias, of_next_weight, of_next_bias);
        let call = ForwardCall::<B> { spec, x, residual, gate, weight, bias, next_weight, next_bias, wanted };
        call.saving(save).saving_next(save_next).call()
    };
    match spec.residual_placement {
        ResidualPlacement::Before => {
            // Without its node, as the residual.
            let (x, x_node) = x.into_parts();
            let made = call(x, is_y_tracked, false);
            let residual_out = given("residual_out", made.residual_out.into_option());
            let sum = node::<B, C, 2>([residual_node, x_node], residual_out, dtype, None);
            let taken = Normalized { y: given("y", made.y.into_option()), mean: made.mean, rstd: made.rstd };
            (Some(normalize::<B, C>(alone, sum.clone(), weight, gate, bias, Some(taken))), sum)
        }
        ResidualPlacement::After => {
            let made = call(x.primitive().clone(), is_tracked, next_weight.is_some() && is_y_tracked);
            let residual_out = given("residual_out", made.residual_out.into_option());
            let norm = NormOfX { spec: alone, x: &x, weight: &weight, mean: made.mean, rstd: made.rstd };
            let norm = is_tracked.then_some(norm);
            let nodes = [residual_node, x.node(), weight.node()];
            let sum = match &bias {
                None => node::<B, C, 3>(nodes, residual_out, dtype, norm),
                Some(bias) => {
                    let [residual, x, weight] = nodes;
                    node::<B, C, 4>([residual, x, weight, bias.node()], residual_out, dtype, norm)
                }
            };
            let y = next_weight.map(|weight| {
                let y = given("y", made.y.into_option());
                let taken = Normalized { y, mean: made.next_mean, rstd: made.next_rstd };
                normalize::<B, C>(alone, sum.clone(), weight, None, next_bias, Some(taken))
            });
            (y, sum)
        }
    }
}

/// The inputs of the sum's step for the gradients of the norm of x.
struct NormOfX<'a, B: Kernels> {
    spec: NormParams,
    x: &'a Tracked<B>,
    weight: &'a Tracked<B>,
    mean: Maybe<B>,
    rstd: Maybe<B>,
}

/// The sum with its node. It is kept, because the next layers and y's backward pass need it.
fn node<B: Kernels, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    sum: FloatTensor<B>,
    dtype: DType,
    norm: Option<NormOfX<'_, B>>,
) -> Tracked<B> {
    match Backward::<B, N>::prepare::<C>(SumStep, nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let norm = norm.map(|NormOfX { spec, x, weight, mean, rstd }| {
                let (x, weight) = (prep.checkpoint(x), prep.checkpoint(weight));
                State { spec, x, weight, gate: None, bias: None, mean, rstd }
            });
            prep.finish((dtype, norm), sum)
        }
        OpsKind::UnTracked(prep) => prep.finish(sum),
    }
}
