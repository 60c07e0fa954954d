//! A residual that is added after the norm, and the next norm: math.md, equations (13) and (14), in
//! f32.

use rmsnorm_spec::{CastOrder, Tensor};

use super::call::Call;
use super::forward::{ForwardKernel, ForwardRow};
use super::tensors::Tensors;
use crate::run::memory::round;
use crate::selftest::planted::Bug;

/// Makes the call.
pub(super) fn run(call: &Call, tensors: &mut Tensors<'_, '_>) {
    let mut first = ForwardKernel::new(call, tensors.values(Tensor::Weight), tensors.values(Tensor::Bias));
    let mut next = next_kernel(call, tensors);
    for row in 0..call.spec.rows {
        // Validation guarantees that there is a residual.
        let Some((x, addend)) = tensors.row(Tensor::X, row).zip(tensors.row(Tensor::Residual, row)) else { return };
        let normalized = match call.bug {
            Some(Bug::SumBeforeNorm) => x.iter().zip(&addend).map(|(x, addend)| x + addend).collect(),
            Some(_) | None => x.clone(),
        };
        let result = first.row(row, &normalized, None);
        let sum = sum(call, &result.y, (&x, &addend), first.bias.as_deref());
        let rounded: Vec<f32> = sum.iter().map(|&sum| round(sum, call.problem.dtypes.residual)).collect();
        tensors.store_residual(row, &rounded);
        tensors.store_statistics([(Tensor::Mean, Some(result.saved_mean)), (Tensor::Rstd, result.saved_rstd)], row);
        if !call.problem.has(Tensor::Y) {
            continue;
        }
        let h = match call.bug {
            Some(Bug::NextOfUnrounded) => sum,
            Some(Bug::NextOfNorm) => result.y.clone(),
            Some(Bug::NextOfResidual) => addend,
            Some(_) | None => rounded,
        };
        let mut last = next.row(row, &h, None);
        if call.has(Bug::NextByFirstRstd) {
            let factor = |of: &ForwardRow| of.saved_rstd.unwrap_or(1.0);
            let ratio = factor(&result) / factor(&last);
            last.y.iter_mut().for_each(|y| *y *= ratio);
        }
        tensors.store_result(Tensor::Y, row, &last.y);
        match call.bug {
            Some(Bug::NextRstdMissing) => last.saved_rstd = None,
            Some(Bug::NextRstdOfFirst) => last.saved_rstd = result.saved_rstd,
            Some(Bug::NextMeanOfFirst) => last.saved_mean = result.saved_mean,
            Some(_) | None => {}
        }
        tensors.store_statistics([(Tensor::NextMean, Some(last.saved_mean)), (Tensor::NextRstd, last.saved_rstd)], row);
    }
}

/// The kernel of the next norm.
fn next_kernel<'c>(call: &'c Call, tensors: &Tensors<'_, '_>) -> ForwardKernel<'c> {
    let vector = |next, first, of_first, missing| match call.bug {
        Some(bug) if bug == of_first => tensors.values(first),
        Some(bug) if bug == missing => None,
        Some(_) | None => tensors.values(next),
    };
    let weight = vector(Tensor::NextWeight, Tensor::Weight, Bug::NextWeightOfFirst, Bug::NextWeightMissing);
    let bias = vector(Tensor::NextBias, Tensor::Bias, Bug::NextBiasOfFirst, Bug::NextBiasMissing);
    let has_weight = weight.is_some();
    let mut kernel = ForwardKernel::new(call, weight, bias);
    match call.bug {
        Some(Bug::NextOffsetMissing) if has_weight => {
            kernel.weight.iter_mut().for_each(|weight| *weight -= call.spec.weight_offset);
        }
        Some(Bug::NextEpsMissing) => kernel.eps = 0.0,
        Some(Bug::NextCastOrderIgnored) => kernel.cast_order = CastOrder::AtStore,
        Some(_) | None => {}
    }
    kernel
}

/// The sum with the residual, before its rounding.
fn sum(call: &Call, norm: &[f32], (x, residual): (&[f32], &[f32]), bias: Option<&[f32]>) -> Vec<f32> {
    let bias = |col: usize| bias.map_or(0.0, |bias| bias[col]);
    let of = |(col, &norm): (usize, &f32)| match call.bug {
        Some(Bug::SumWithoutNorm) => residual[col],
        Some(Bug::SumWithoutResidual) => norm,
        Some(Bug::SumOfX) => x[col] + norm,
        Some(Bug::SumOfRounded) => residual[col] + round(norm, call.low()),
        Some(Bug::SumWithoutBias) => residual[col] + (norm - bias(col)),
        Some(Bug::SumBiasTwice) => residual[col] + (norm + bias(col)),
        Some(_) | None => residual[col] + norm,
    };
    norm.iter().enumerate().map(of).collect()
}
