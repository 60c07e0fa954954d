//! A weight before the norm: math.md, equations (24) and (25), and its bounds in section 5.7. It is
//! a cast order, and has no kinds of its own: [`cast_orders`](crate::case::cast_orders) has its cases.

use rmsnorm_spec::Tensor;

use super::math::{BackwardRow, Bug, BugList, Call, ForwardRow, PieceMath, Tensors, round};
use crate::case::cast_orders::WeightBug;

/// The piece.
pub(crate) struct WeightFirst;

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
