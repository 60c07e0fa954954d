//! The forward pass of one row: math.md, equations (1) to (6), in f32.

use rmsnorm_spec::{CastOrder, DType, Norm, Tensor};

use super::call::Call;
use super::parts;
use super::tensors::Tensors;
use crate::run::memory::round;
use crate::selftest::planted::Bug;

#[derive(Clone, Copy)]
struct Statistics {
    mean: f32,
    var: f32,
    rstd: f32,
}

/// The results of one row. Matrix rows have (cols) elements.
pub(super) struct ForwardRow {
    /// The rounded sum with the residual, or `x`.
    pub(super) residual_out: Vec<f32>,
    /// Not yet rounded.
    pub(super) y: Vec<f32>,
    pub(super) saved_mean: f32,
    /// `None` if a bug omits it.
    pub(super) saved_rstd: Option<f32>,
}

/// Normalizes the rows of a call that adds the residual before the norm, stores the requested
/// outputs, and passes each row's result to `hand_on`. `part_stride` is the distance of the parts
/// of x in elements.
pub(super) fn run(call: &Call, tensors: &mut Tensors<'_, '_>, part_stride: usize, mut hand_on: impl FnMut(ForwardRow)) {
    let mut kernel = ForwardKernel::new(call, tensors.values(Tensor::Weight), tensors.values(Tensor::Bias));
    for row in 0..call.spec.rows {
        let addend = tensors.row(Tensor::Residual, row);
        let result = if call.problem.parts > 1 {
            kernel.row_of(row, parts::sum(call, tensors, part_stride, row, addend.as_deref()))
        } else {
            kernel.row(row, &tensors.row(Tensor::X, row).unwrap_or_default(), addend.as_deref())
        };
        tensors.store_residual(row, &result.residual_out);
        tensors.store_result(Tensor::Y, row, &result.y);
        tensors.store_statistics([(Tensor::Mean, Some(result.saved_mean)), (Tensor::Rstd, result.saved_rstd)], row);
        hand_on(result);
    }
}

pub(super) struct ForwardKernel<'c> {
    call: &'c Call,
    /// One value for every column, with the offset.
    pub(super) weight: Vec<f32>,
    pub(super) bias: Option<Vec<f32>>,
    /// Added to the variance.
    pub(super) eps: f32,
    /// Where x_hat is rounded to 16 bits.
    pub(super) cast_order: CastOrder,
    /// Statistics of the previous row, for the bugs that confuse rows.
    previous: Option<Statistics>,
}

impl<'c> ForwardKernel<'c> {
    pub(super) fn new(call: &'c Call, weight: Option<Vec<f32>>, bias: Option<Vec<f32>>) -> Self {
        let (weight, bias) = match (weight, bias) {
            (Some(weight), Some(bias)) if call.has(Bug::WeightBiasSwapped) => (Some(bias), Some(weight)),
            as_given => as_given,
        };
        let bias = bias.filter(|_| !call.has(Bug::BiasMissing));
        let (eps, cast_order) = (call.spec.eps, call.spec.cast_order);
        ForwardKernel { call, weight: call.effective_weight(weight), bias, eps, cast_order, previous: None }
    }

    /// Normalizes a row of `x`, plus the residual if there is one.
    pub(super) fn row(&mut self, row: usize, x: &[f32], residual: Option<&[f32]>) -> ForwardRow {
        let sum = self.add_residual(x, residual);
        self.row_of(row, sum)
    }

    /// Normalizes the row `h`, and returns everything that is stored for it.
    pub(super) fn row_of(&mut self, row: usize, (h, residual_out): (Vec<f32>, Vec<f32>)) -> ForwardRow {
        let mut statistics = self.statistics(row, &h);
        if let Some(previous) = self.previous
            && self.call.has(Bug::RowOff)
            && self.call.is_last_of_several(row)
        {
            statistics.rstd = previous.rstd;
        }
        let mut y = self.scale(&h, statistics);
        if self.call.has(Bug::ReadAfterWrite) {
            self.redo_second_half(row, &h, &mut y);
        }
        let saved_mean = round(statistics.mean, self.call.accumulator(Bug::MeanStore16));
        let saved_rstd = self.saved_rstd(statistics);
        self.previous = Some(statistics);
        ForwardRow { residual_out, y, saved_mean, saved_rstd }
    }

    fn saved_rstd(&self, statistics: Statistics) -> Option<f32> {
        match self.call.bug {
            Some(Bug::RstdMissing) => None,
            Some(Bug::RstdIsVariance) => Some(statistics.var),
            Some(Bug::RstdOfOtherRow) => Some(self.previous.unwrap_or(statistics).rstd),
            Some(_) | None => Some(round(statistics.rstd, self.call.accumulator(Bug::RstdStore16))),
        }
    }

    /// The values to normalize, and `residual_out`: in a correct kernel, both are the same rounded
    /// sum.
    fn add_residual(&self, x: &[f32], residual: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
        let Some(residual) = residual else { return (x.to_vec(), x.to_vec()) };
        let dtype = self.call.problem.dtypes.residual;
        let sums: Vec<f32> = x.iter().zip(residual).map(|(x, residual)| x + residual).collect();
        let rounded: Vec<f32> = sums.iter().map(|&sum| round(sum, dtype)).collect();
        match self.call.bug {
            Some(Bug::ResUnrounded) => (sums, rounded),
            Some(Bug::ResMissing) => (x.to_vec(), rounded),
            Some(Bug::ResOutBeforeAdd) => (rounded, x.to_vec()),
            Some(_) | None => (rounded.clone(), rounded),
        }
    }

    fn statistics(&self, row: usize, h: &[f32]) -> Statistics {
        let call = self.call;
        let counted = self.counted(h);
        let mut mean = match call.spec.norm {
            Norm::Rms => 0.0,
            Norm::Layer => self.divide_by_cols(call.sum(&counted, call.accumulator(Bug::MeanLowacc))),
        };
        let squares = self.squares(row, &counted, mean);
        let mut sum = call.sum(&squares, call.accumulator(Bug::SqLowacc));
        if call.spec.norm == Norm::Layer && !call.has(Bug::MeanUncorrected) {
            let deviations: Vec<f32> = counted.iter().map(|h| h - mean).collect();
            let deviations = call.sum(&deviations, DType::F32);
            let missed = self.divide_by_cols(deviations);
            // A non-finite mean is not corrected.
            if missed.is_finite() {
                mean += missed;
                sum = (sum - deviations * missed).max(0.0);
            }
        }
        let mut var = self.divide_by_cols(sum);
        if call.has(Bug::Onepass) {
            let squares: Vec<f32> = h.iter().map(|h| h * h).collect();
            var = (self.divide_by_cols(call.sum(&squares, DType::F32)) - mean * mean).max(0.0);
        }
        if let Some(previous) = self.previous
            && call.has(Bug::NanLeak)
        {
            var += 0.0 * previous.var;
        }
        Statistics { mean, var, rstd: self.rstd(sum, var) }
    }

    /// The elements that enter the statistics: all elements in a correct kernel.
    fn counted(&self, h: &[f32]) -> Vec<f32> {
        let mut counted = h.to_vec();
        match self.call.bug {
            Some(Bug::DropLastCol) => counted.truncate(h.len() - 1),
            Some(Bug::DropTail8) => counted.truncate(h.len() - h.len() % 8),
            Some(Bug::DupFirstCol) => counted.push(h[0]),
            Some(_) | None => {}
        }
        counted
    }

    fn squares(&self, row: usize, counted: &[f32], mean: f32) -> Vec<f32> {
        let dtype = self.call.accumulator(Bug::SqF16);
        let square = |h: &f32| {
            let deviation = round(h - mean, dtype);
            round(deviation * deviation, dtype)
        };
        let mut squares: Vec<f32> = counted.iter().map(square).collect();
        if self.call.has(Bug::WarpLost) && row == 0 {
            squares.truncate(squares.len().saturating_sub(32));
        }
        squares
    }

    fn divide_by_cols(&self, sum: f32) -> f32 {
        let cols = self.call.spec.cols;
        let divisor = match self.call.bug {
            Some(Bug::NMinusOne) => (cols - 1).max(1),
            Some(Bug::NPadded8) => cols.next_multiple_of(8),
            Some(Bug::NPow2) => cols.next_power_of_two(),
            Some(_) | None => cols,
        };
        // A multiplication with the rounded reciprocal, as in most kernels.
        sum * (1.0 / divisor as f64) as f32
    }

    fn rstd(&self, sum: f32, var: f32) -> f32 {
        let call = self.call;
        let eps = match call.bug {
            Some(Bug::EpsDefault) => 1e-5,
            Some(Bug::EpsDtype) => round(self.eps, call.problem.dtypes.activation),
            Some(_) | None => self.eps,
        };
        let inverse_root = |value: f32| 1.0 / value.sqrt();
        match call.bug {
            Some(Bug::EpsOutside) => 1.0 / (var.sqrt() + eps),
            Some(Bug::EpsMissing) => inverse_root(var),
            Some(Bug::EpsBeforeDiv) => inverse_root(self.divide_by_cols(sum + eps)),
            Some(Bug::EpsAfter) => inverse_root(var) + eps,
            Some(Bug::EpsMax) => inverse_root(var.max(eps)),
            Some(Bug::Rsqrt12) => f32::from_bits(inverse_root(var + eps).to_bits() & !0xfff),
            Some(Bug::RsqrtF16) => round(inverse_root(var + eps), DType::F16),
            Some(_) | None => round(inverse_root(var + eps), call.accumulator(Bug::RsqrtStore)),
        }
    }

    fn scale(&self, h: &[f32], statistics: Statistics) -> Vec<f32> {
        let x_hat_dtype = match self.cast_order {
            CastOrder::BeforeWeight if self.call.has(Bug::CastOrderIgnored) => DType::F32,
            CastOrder::BeforeWeight => self.call.problem.dtypes.activation,
            CastOrder::AtStore => self.call.accumulator(Bug::CastLlama),
        };
        let scale_one = |(col, h): (usize, &f32)| {
            let x_hat = round((h - statistics.mean) * statistics.rstd, x_hat_dtype);
            match &self.bias {
                Some(bias) if self.call.has(Bug::BiasBeforeW) => (x_hat + bias[col]) * self.weight[col],
                Some(bias) => x_hat * self.weight[col] + bias[col],
                None => x_hat * self.weight[col],
            }
        };
        h.iter().enumerate().map(scale_one).collect()
    }

    /// The race of an in-place kernel without a barrier: the second half of a row is normalized
    /// with statistics that are computed after the first half was overwritten with `y`.
    fn redo_second_half(&self, row: usize, h: &[f32], y: &mut [f32]) {
        let half = h.len() / 2;
        let overwritten = y[..half].iter().map(|&y| round(y, self.call.problem.dtypes.activation));
        let seen: Vec<f32> = overwritten.chain(h[half..].iter().copied()).collect();
        let late = self.scale(&seen, self.statistics(row, &seen));
        y[half..].copy_from_slice(&late[half..]);
    }
}
