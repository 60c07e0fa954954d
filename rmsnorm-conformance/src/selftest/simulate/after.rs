//! A residual that is added after the norm, and the norm of the sum: math.md, equations (13) and (14), in f32.

use rmsnorm_spec::{CastOrder, Element, Forward};

use super::SimulatedBackend;
use super::call::Call;
use super::forward::{ForwardKernel, ForwardRow, SavedStatistics};
use super::matrix::{Input, Matrix, round};
use crate::selftest::planted::Bug;

/// Makes the call.
pub(super) fn run<T: Element, W: Element, R: Element>(call: &Call, args: Forward<'_, SimulatedBackend, T, W, R>) {
    let mut saved = SavedStatistics { mean: args.mean, rstd: args.rstd };
    let mut next_saved = SavedStatistics { mean: args.next_mean, rstd: args.next_rstd };
    let mut first = ForwardKernel::new(call, args.weight, args.bias);
    let mut next = next_kernel(call, [args.weight, args.next_weight], [args.bias, args.next_bias]);
    let mut y = args.y.map(|rows| Matrix::new(rows, call, [Bug::YStrideIgnored, Bug::YGroupsIgnored]));
    let mut residual_out =
        args.residual_out.map(|rows| Matrix::new(rows, call, [Bug::ResOutStrideIgnored, Bug::ResOutGroupsIgnored]));
    let x = Input::new(args.x, call, [Bug::XStrideIgnored, Bug::XGroupsIgnored]);
    let residual = args.residual.map(|source| Input::new(source, call, [Bug::ResStrideIgnored, Bug::ResGroupsIgnored]));
    // Validation has seen to it that there is one.
    let Some(mut residual) = residual else { return };
    for row in 0..call.spec.rows {
        let (x, addend) = (x.row(row), residual.row(row));
        let normalized = if call.has(Bug::SumBeforeNorm) { add(&x, &addend) } else { x.clone() };
        let result = first.row(row, &normalized, None);
        let sum = sum(call, &result.y, (&x, &addend), first.bias.as_deref());
        let rounded: Vec<f32> = sum.iter().map(|&sum| round(sum, R::DTYPE)).collect();
        if let Some(out) = residual.overwritten().or(residual_out.as_mut()) {
            out.store_residual(call, row, &rounded);
        }
        saved.store(row, &result);
        let Some(y) = &mut y else { continue };
        let h = if call.has(Bug::NextOfUnrounded) {
            sum
        } else if call.has(Bug::NextOfNorm) {
            result.y.clone()
        } else if call.has(Bug::NextOfResidual) {
            addend
        } else {
            rounded
        };
        let mut last = next.row(row, &h, None);
        if call.has(Bug::NextByFirstRstd) {
            let factor = |of: &ForwardRow| of.saved_rstd.unwrap_or(1.0);
            let ratio = factor(&result) / factor(&last);
            last.y.iter_mut().for_each(|y| *y *= ratio);
        }
        y.store_result(call, row, &last.y);
        next_saved.store(row, &as_saved(call, last, &result));
    }
}

/// The kernel of the sum's norm. Each list has what the first norm has, then what the next has.
fn next_kernel<'c, W: Element>(
    call: &'c Call,
    weights: [Option<&[W]>; 2],
    biases: [Option<&[W]>; 2],
) -> ForwardKernel<'c> {
    let weight = if call.has(Bug::NextWeightOfFirst) { weights[0] } else { weights[1] };
    let bias = if call.has(Bug::NextBiasOfFirst) { biases[0] } else { biases[1] };
    let mut kernel = ForwardKernel::new(
        call,
        weight.filter(|_| !call.has(Bug::NextWeightMissing)),
        bias.filter(|_| !call.has(Bug::NextBiasMissing)),
    );
    if call.has(Bug::NextOffsetMissing) && weight.is_some() {
        kernel.weight.iter_mut().for_each(|weight| *weight -= call.spec.weight_offset);
    }
    if call.has(Bug::NextEpsMissing) {
        kernel.eps = 0.0;
    }
    if call.has(Bug::NextCastOrderIgnored) {
        kernel.cast_order = CastOrder::AtStore;
    }
    kernel
}

/// What the residual becomes, before its rounding.
fn sum(call: &Call, norm: &[f32], (x, residual): (&[f32], &[f32]), bias: Option<&[f32]>) -> Vec<f32> {
    let bias = |col: usize| bias.map_or(0.0, |bias| bias[col]);
    let of = |(col, &norm): (usize, &f32)| {
        if call.has(Bug::SumWithoutNorm) {
            residual[col]
        } else if call.has(Bug::SumWithoutResidual) {
            norm
        } else if call.has(Bug::SumOfX) {
            x[col] + norm
        } else if call.has(Bug::SumOfRounded) {
            residual[col] + round(norm, call.low())
        } else if call.has(Bug::SumWithoutBias) {
            residual[col] + (norm - bias(col))
        } else if call.has(Bug::SumBiasTwice) {
            residual[col] + (norm + bias(col))
        } else {
            residual[col] + norm
        }
    };
    norm.iter().enumerate().map(of).collect()
}

/// What is saved of the sum's norm.
fn as_saved(call: &Call, last: ForwardRow, first: &ForwardRow) -> ForwardRow {
    let saved_rstd = if call.has(Bug::NextRstdMissing) {
        None
    } else if call.has(Bug::NextRstdOfFirst) {
        first.saved_rstd
    } else {
        last.saved_rstd
    };
    let saved_mean = if call.has(Bug::NextMeanOfFirst) { first.saved_mean } else { last.saved_mean };
    ForwardRow { saved_rstd, saved_mean, ..last }
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}
