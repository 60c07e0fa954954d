//! A forward call: the pieces before the norm, the norm, the pieces after it.

use rmsnorm_spec::{Slot, Tensor};

use super::call::Call;
use super::norm::NormKernel;
use super::rows::ForwardRow;
use super::tensors::Tensors;
use crate::case::cast::CastBug;
use crate::pieces;

/// Makes the call.
pub(super) fn run(call: &Call, tensors: &mut Tensors<'_, '_>) {
    let of_row = |row: usize| ForwardRow::new(tensors.row(Tensor::X, row).unwrap_or_default());
    let mut rows: Vec<ForwardRow> = (0..call.spec.rows).map(of_row).collect();
    rows.iter_mut().for_each(|row| call.spoil_cast(CastBug::XOfY, &mut row.h));
    pieces::forward(Slot::Before, call, tensors, &mut rows);
    let mut kernel = NormKernel::first(call, tensors);
    for (index, row) in rows.iter_mut().enumerate() {
        row.result = kernel.normalize(index, &row.h);
    }
    pieces::forward(Slot::After, call, tensors, &mut rows);
    rows.iter_mut().for_each(|row| call.spoil_cast(CastBug::YOfX, &mut row.result.y));
    for (index, row) in rows.iter().enumerate() {
        tensors.store_residual(index, &row.sum);
        tensors.store_result(Tensor::Y, index, row.y.as_ref().unwrap_or(&row.result.y));
        row.result.store_statistics(tensors, [Tensor::Mean, Tensor::Rstd], index);
    }
}
