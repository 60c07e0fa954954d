//! The sum of several parts: math.md, equation (1'), in f32.

use rmsnorm_spec::{DType, Tensor};

use super::call::Call;
use super::tensors::Tensors;
use crate::run::memory::round;
use crate::selftest::planted::Bug;

/// The values to normalize, and `residual_out`: in a correct kernel, both are the same sum of the
/// parts of a row. `stride` is the distance of the parts in elements.
pub(super) fn sum(
    call: &Call,
    tensors: &Tensors<'_, '_>,
    stride: usize,
    row: usize,
    residual: Option<&[f32]>,
) -> (Vec<f32>, Vec<f32>) {
    let count = call.problem.parts;
    let stride = if call.has(Bug::PartsDense) { call.spec.rows * call.spec.cols } else { stride };
    let part = |part: usize| tensors.get(Tensor::X).map(|x| x.row_from(part * stride, row));
    let mut parts: Vec<Vec<f32>> = (0..count).filter_map(part).collect();
    match call.bug {
        Some(Bug::PartMissing) => parts.truncate(count - 1),
        Some(Bug::PartTwice) => parts.push(parts[0].clone()),
        Some(Bug::PartsReversed) => parts.reverse(),
        Some(_) | None => {}
    }
    let residual = residual.filter(|_| !(call.has(Bug::ResidualOfLastPart) && count > 2));
    let activation = call.problem.dtypes.activation;
    let sum_of = |col: usize| {
        let values: Vec<f32> = parts.iter().map(|part| part[col]).collect();
        let addend = residual.map(|residual| residual[col]);
        let step = if call.has(Bug::PartsEachRounded) { activation } else { DType::F32 };
        let add = |sum: f32, value: f32| {
            let again = addend.filter(|_| call.has(Bug::ResidualPerPart)).unwrap_or(0.0);
            round(sum + value + again, step)
        };
        let serial = |values: &[f32]| values.iter().copied().reduce(add).unwrap_or(0.0);
        let sum = match call.bug {
            Some(Bug::PartsInF64) => {
                let sum: f64 = values.iter().chain(&addend).map(|value| f64::from(*value)).sum();
                return sum as f32;
            }
            Some(Bug::ResidualFirst) => {
                return addend.iter().chain(&values).copied().reduce(|sum, value| sum + value).unwrap_or(0.0);
            }
            Some(Bug::PartsByTree) => {
                let (first, second) = values.split_at(values.len().div_ceil(2));
                serial(first) + serial(second)
            }
            Some(Bug::PartsRounded) => round(serial(&values), activation),
            Some(_) | None => serial(&values),
        };
        addend.map_or(sum, |addend| sum + addend)
    };
    let sums: Vec<f32> = (0..call.spec.cols).map(sum_of).collect();
    let rounded: Vec<f32> = sums.iter().map(|&sum| round(sum, call.problem.dtypes.residual)).collect();
    (if call.has(Bug::PartsUnrounded) { sums } else { rounded.clone() }, rounded)
}
