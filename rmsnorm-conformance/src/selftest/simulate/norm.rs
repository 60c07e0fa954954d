//! The forward pass of one row: math.md, equations (1) to (6), in f32.

use rmsnorm_spec::{CastOrder, DType, Norm, Tensor};

use super::call::Call;
use super::tensors::Tensors;
use crate::run::memory::round;
use crate::selftest::planted::NormBug;

#[derive(Clone, Copy)]
struct Statistics {
    mean: f32,
    var: f32,
    rstd: f32,
}

/// A normalized row.
#[derive(Default)]
pub(crate) struct Normalized {
    /// Not yet rounded. (cols)
    pub(crate) y: Vec<f32>,
    /// The mean to save.
    pub(crate) mean: f32,
    /// The rstd to save; `None` if a bug omits it.
    pub(crate) rstd: Option<f32>,
}

impl Normalized {
    /// Writes the requested statistics of the row.
    pub(crate) fn store_statistics(&self, tensors: &mut Tensors<'_, '_>, [mean, rstd]: [Tensor; 2], row: usize) {
        for (tensor, value) in [(mean, Some(self.mean)), (rstd, self.rstd)] {
            if let Some((out, value)) = tensors.get_mut(tensor).zip(value) {
                out.store(row, value);
            }
        }
    }
}

pub(crate) struct NormKernel<'c> {
    call: &'c Call,
    /// One value for every column, with the offset.
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
    /// Added to the variance.
    pub(crate) eps: f32,
    /// Where x_hat is rounded to 16 bits.
    pub(crate) cast_order: CastOrder,
    /// Statistics of the previous row, for the bugs that confuse rows.
    previous: Option<Statistics>,
}

impl<'c> NormKernel<'c> {
    /// The kernel of the norm of x.
    pub(crate) fn first(call: &'c Call, tensors: &Tensors<'_, '_>) -> Self {
        NormKernel::new(call, tensors.values(Tensor::Weight), tensors.values(Tensor::Bias))
    }

    pub(crate) fn new(call: &'c Call, weight: Option<Vec<f32>>, bias: Option<Vec<f32>>) -> Self {
        let (weight, bias) = match (weight, bias) {
            (Some(weight), Some(bias)) if call.has(NormBug::WeightBiasSwapped) => (Some(bias), Some(weight)),
            as_given => as_given,
        };
        let bias = bias.filter(|_| !call.has(NormBug::BiasMissing));
        let (eps, cast_order) = (call.spec.eps, call.spec.cast_order);
        NormKernel { call, weight: call.effective_weight(weight), bias, eps, cast_order, previous: None }
    }

    /// Normalizes the row `h`.
    pub(crate) fn normalize(&mut self, row: usize, h: &[f32]) -> Normalized {
        let mut statistics = self.statistics(row, h);
        if let Some(previous) = self.previous
            && self.call.has(NormBug::RowOff)
            && self.call.is_last_of_several(row)
        {
            statistics.rstd = previous.rstd;
        }
        let mut y = self.scale(h, statistics);
        if self.call.has(NormBug::ReadAfterWrite) {
            self.redo_second_half(row, h, &mut y);
        }
        let mean = round(statistics.mean, self.call.accumulator(NormBug::MeanStore16));
        let rstd = self.saved_rstd(statistics);
        self.previous = Some(statistics);
        Normalized { y, mean, rstd }
    }

    fn saved_rstd(&self, statistics: Statistics) -> Option<f32> {
        match self.call.bug() {
            Some(NormBug::RstdMissing) => None,
            Some(NormBug::RstdIsVariance) => Some(statistics.var),
            Some(NormBug::RstdOfOtherRow) => Some(self.previous.unwrap_or(statistics).rstd),
            Some(_) | None => Some(round(statistics.rstd, self.call.accumulator(NormBug::RstdStore16))),
        }
    }

    fn statistics(&self, row: usize, h: &[f32]) -> Statistics {
        let call = self.call;
        let counted = self.counted(h);
        let mut mean = match call.spec.norm {
            Norm::Rms => 0.0,
            Norm::Layer => self.divide_by_cols(call.sum(&counted, call.accumulator(NormBug::MeanLowacc))),
        };
        let squares = self.squares(row, &counted, mean);
        let mut sum = call.sum(&squares, call.accumulator(NormBug::SqLowacc));
        if call.spec.norm == Norm::Layer && !call.has(NormBug::MeanUncorrected) {
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
        if call.has(NormBug::Onepass) {
            let squares: Vec<f32> = h.iter().map(|h| h * h).collect();
            var = (self.divide_by_cols(call.sum(&squares, DType::F32)) - mean * mean).max(0.0);
        }
        if let Some(previous) = self.previous
            && call.has(NormBug::NanLeak)
        {
            var += 0.0 * previous.var;
        }
        Statistics { mean, var, rstd: self.rstd(sum, var) }
    }

    /// The elements that enter the statistics: all elements in a correct kernel.
    fn counted(&self, h: &[f32]) -> Vec<f32> {
        let mut counted = h.to_vec();
        match self.call.bug() {
            Some(NormBug::DropLastCol) => counted.truncate(h.len() - 1),
            Some(NormBug::DropTail8) => counted.truncate(h.len() - h.len() % 8),
            Some(NormBug::DupFirstCol) => counted.push(h[0]),
            Some(_) | None => {}
        }
        counted
    }

    fn squares(&self, row: usize, counted: &[f32], mean: f32) -> Vec<f32> {
        let dtype = self.call.accumulator(NormBug::SqF16);
        let square = |h: &f32| {
            let deviation = round(h - mean, dtype);
            round(deviation * deviation, dtype)
        };
        let mut squares: Vec<f32> = counted.iter().map(square).collect();
        if self.call.has(NormBug::WarpLost) && row == 0 {
            squares.truncate(squares.len().saturating_sub(32));
        }
        squares
    }

    fn divide_by_cols(&self, sum: f32) -> f32 {
        let cols = self.call.spec.cols;
        let divisor = match self.call.bug() {
            Some(NormBug::NMinusOne) => (cols - 1).max(1),
            Some(NormBug::NPadded8) => cols.next_multiple_of(8),
            Some(NormBug::NPow2) => cols.next_power_of_two(),
            Some(_) | None => cols,
        };
        // A multiplication with the rounded reciprocal, as in most kernels.
        sum * (1.0 / divisor as f64) as f32
    }

    fn rstd(&self, sum: f32, var: f32) -> f32 {
        let call = self.call;
        let eps = match call.bug() {
            Some(NormBug::EpsDefault) => 1e-5,
            Some(NormBug::EpsDtype) => round(self.eps, call.problem.dtypes.activation),
            Some(_) | None => self.eps,
        };
        let inverse_root = |value: f32| 1.0 / value.sqrt();
        match call.bug() {
            Some(NormBug::EpsOutside) => 1.0 / (var.sqrt() + eps),
            Some(NormBug::EpsMissing) => inverse_root(var),
            Some(NormBug::EpsBeforeDiv) => inverse_root(self.divide_by_cols(sum + eps)),
            Some(NormBug::EpsAfter) => inverse_root(var) + eps,
            Some(NormBug::EpsMax) => inverse_root(var.max(eps)),
            Some(NormBug::Rsqrt12) => f32::from_bits(inverse_root(var + eps).to_bits() & !0xfff),
            Some(NormBug::RsqrtF16) => round(inverse_root(var + eps), DType::F16),
            Some(_) | None => round(inverse_root(var + eps), call.accumulator(NormBug::RsqrtStore)),
        }
    }

    fn scale(&self, h: &[f32], statistics: Statistics) -> Vec<f32> {
        let x_hat_dtype = match self.cast_order {
            CastOrder::BeforeWeight if self.call.has(NormBug::CastOrderIgnored) => DType::F32,
            CastOrder::BeforeWeight => self.call.problem.dtypes.activation,
            CastOrder::AtStore => self.call.accumulator(NormBug::CastLlama),
        };
        let scale_one = |(col, h): (usize, &f32)| {
            let x_hat = round((h - statistics.mean) * statistics.rstd, x_hat_dtype);
            match &self.bias {
                Some(bias) if self.call.has(NormBug::BiasBeforeW) => (x_hat + bias[col]) * self.weight[col],
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
