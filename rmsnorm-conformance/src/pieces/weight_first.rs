//! A weight before the norm: math.md, equations (24) and (25), and its bounds in section 5.7. It is
//! a cast order, and has no kinds of its own: [`cast_orders`](crate::case::cast_orders) has its cases.

use rmsnorm_spec::Tensor;

use super::math::{BackwardRow, Bug, BugList, Call, ForwardRow, PieceMath, Tensors, bugs, round};

bugs! {
    /// The bugs of a weight before the norm.
    WeightBug:
    After "weight_after" BOTH WEIGHT_FIRST "the weight multiplies the normalized row";
    HUnrounded "weighted_h_unrounded" BOTH WEIGHT_FIRST "x times the weight is not rounded";
    NormalizesX "backward_normalizes_unweighted_x" BOTH WEIGHT_FIRST_BACKWARD "backward normalizes x without the weight";
    AgainUnrounded "backward_h_unrounded" BOTH WEIGHT_FIRST_BACKWARD "backward does not round x times the weight";
    DweightOfDy "dweight_of_dy" BOTH WEIGHT_FIRST_BACKWARD "dweight is made of dy and x_hat";
    DweightOfH "dweight_of_h" BOTH WEIGHT_FIRST_BACKWARD "dweight is made of x times the weight";
    DxOfH "dx_without_weight" BOTH WEIGHT_FIRST_BACKWARD "dx is the gradient of x times the weight";
}

/// The piece.
pub(crate) struct WeightFirst;

/// The weight that multiplies the normalized row.
pub(crate) fn weight_of_norm(call: &Call, tensors: &Tensors<'_, '_>) -> Option<Vec<f32>> {
    let is_first = call.spec.cast_order.is_weight_first() && !call.has(WeightBug::After);
    tensors.values(Tensor::Weight).filter(|_| !is_first)
}

/// A row's terms of dweight, after the norm's own gradients; `None` if they are those of the norm.
pub(crate) fn dweight_terms(
    call: &Call,
    tensors: &Tensors<'_, '_>,
    index: usize,
    row: &BackwardRow,
) -> Option<Vec<f32>> {
    let is_first = call.spec.cast_order.is_weight_first() && !call.has(WeightBug::DweightOfDy);
    let x = if call.has(WeightBug::DweightOfH) { Some(row.x.clone()) } else { tensors.row(Tensor::X, index) };
    let x = x.filter(|_| is_first)?;
    Some(row.dx.iter().zip(x).map(|(dh, x)| dh * x).collect())
}

fn weights(call: &Call, tensors: &Tensors<'_, '_>) -> Vec<f32> {
    let weight = call.effective_weight(tensors.values(Tensor::Weight));
    (0..call.spec.cols).map(|col| weight[call.affine_col(col)]).collect()
}

fn weighted(call: &Call, x: &[f32], weights: &[f32], is_rounded: bool) -> Vec<f32> {
    let product = |(x, weight): (&f32, &f32)| match is_rounded {
        true => round(x * weight, call.problem.dtypes.activation),
        false => x * weight,
    };
    x.iter().zip(weights).map(product).collect()
}

impl PieceMath for WeightFirst {
    const BUGS: &'static [Bug] = WeightBug::BUGS;

    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        let weights = weights(call, tensors);
        for row in rows.iter_mut().filter(|_| !call.has(WeightBug::After)) {
            row.h = weighted(call, &row.h, &weights, !call.has(WeightBug::HUnrounded));
        }
    }

    fn again(call: &Call, tensors: &Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let weights = weights(call, tensors);
        for row in rows.iter_mut().filter(|_| !call.has(WeightBug::NormalizesX)) {
            row.x = weighted(call, &row.x, &weights, !call.has(WeightBug::AgainUnrounded));
        }
    }

    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let weights = weights(call, tensors);
        for row in rows.iter_mut().filter(|_| !call.has(WeightBug::DxOfH)) {
            for (dx, weight) in row.dx.iter_mut().zip(&weights) {
                *dx *= weight;
            }
        }
    }
}
