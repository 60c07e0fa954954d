//! A residual that is added before the norm: math.md, equation (1), and its gradient.

use rmsnorm_spec::Tensor;

use crate::case::cast::CastBug;

use super::math::{Arithmetic, BackwardRow, Bug, BugList, Call, Expected, ForwardRow, PieceMath, Tensors, bugs, round};

bugs! {
    /// The bugs of a residual that is added before the norm.
    ResidualBug:
    ResUnrounded "res_unrounded" BOTH EVERY_BEFORE "the norm works on the unrounded sum with the residual";
    ResMissing "res_missing" BOTH BEFORE "the norm works on x without the residual";
    ResOutBeforeAdd "res_out_before_add" BOTH BEFORE "residual_out holds x, stored before the addition";
    DresMissing "dres_missing" BOTH BACKWARD "dresidual_out is not added";
    DresBeforeR "dres_before_r" BOTH BACKWARD "dresidual_out is multiplied by rstd";
    DresAfterStore "dres_after_store" BOTH BACKWARD "dx is rounded before dresidual_out is added";
    DresidualOfDx "dresidual_of_dx" BOTH BACKWARD "dresidual is dx after its rounding to 16 bits";
}

/// The piece.
pub(crate) struct Residual;

impl PieceMath for Residual {
    const BUGS: &'static [Bug] = ResidualBug::BUGS;

    /// In a correct kernel, the values to normalize and `residual_out` are the same rounded sum.
    fn forward(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [ForwardRow]) {
        let dtype = call.problem.dtypes.residual;
        for (index, row) in rows.iter_mut().enumerate() {
            // The sum of parts has the residual already, because it is rounded once.
            let Some(residual) = tensors.row(Tensor::Residual, index).filter(|_| call.problem.parts == 1) else {
                return;
            };
            let sums: Vec<f32> = row.x.iter().zip(&residual).map(|(x, residual)| x + residual).collect();
            let rounded: Vec<f32> = sums.iter().map(|&sum| round(sum, dtype)).collect();
            (row.h, row.sum) = match call.bug() {
                Some(ResidualBug::ResUnrounded) => (sums, rounded),
                Some(ResidualBug::ResMissing) => (row.x.clone(), rounded),
                Some(ResidualBug::ResOutBeforeAdd) => (rounded, row.x.clone()),
                Some(_) | None => (rounded.clone(), rounded),
            };
        }
    }

    /// The sum, if additions do not round to nearest. Both addends may be flushed to zero.
    fn bound(value: Expected, operand: f64, arithmetic: &Arithmetic) -> Expected {
        let sum = value.reference + operand;
        Expected::new(sum, sum.abs() * arithmetic.unit_roundoff + arithmetic.flush_loss(2.0))
    }

    fn pull(call: &Call, tensors: &mut Tensors<'_, '_>, rows: &mut [BackwardRow]) {
        let activation = call.problem.dtypes.activation;
        for (index, row) in rows.iter_mut().enumerate() {
            for (col, given) in tensors.row(Tensor::DresidualOut, index).into_iter().flatten().enumerate() {
                let dx = row.dx[col];
                row.dx[col] = match call.bug() {
                    Some(ResidualBug::DresMissing) => dx,
                    Some(ResidualBug::DresBeforeR) => (row.inner[col] + given) * row.rstd[col / call.width()],
                    Some(ResidualBug::DresAfterStore) => round(dx, activation) + given,
                    Some(_) | None => dx + given,
                };
            }
            call.spoil_cast(CastBug::DxOfDy, &mut row.dx);
            let value = |&dx: &f32| if call.has(ResidualBug::DresidualOfDx) { round(dx, activation) } else { dx };
            tensors.store_result(Tensor::Dresidual, index, &row.dx.iter().map(value).collect::<Vec<_>>());
        }
    }
}
