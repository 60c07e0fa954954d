//! The forward pass of one row: math.md, equations (1) to (6), in f32.

use rmsnorm_spec::{CastOrder, DType, Norm, Tensor};

use super::call::Call;
use super::tensors::Tensors;
use crate::case::cast_orders::{CastOrderBug, WeightBug};
use crate::case::groups::GroupBug;
use crate::case::l2::L2Bug;
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
    /// The mean to save of each group of columns.
    pub(crate) mean: Vec<f32>,
    /// The rstd to save of each group; `None` if a bug omits it.
    pub(crate) rstd: Option<Vec<f32>>,
}

impl Normalized {
    /// Writes the requested statistics of the row.
    pub(crate) fn store_statistics(&self, tensors: &mut Tensors<'_, '_>, [mean, rstd]: [Tensor; 2], row: usize) {
        for (tensor, values) in [(mean, Some(&self.mean)), (rstd, self.rstd.as_ref())] {
            if let Some((out, values)) = tensors.get_mut(tensor).zip(values) {
                out.store_from(row * values.len(), values);
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
    /// Where it rounds to 16 bits on the way to y.
    pub(crate) cast_order: CastOrder,
    /// Statistics of the previous row, for the bugs that confuse rows.
    previous: Option<Statistics>,
}

/// The weight that multiplies the normalized row.
pub(crate) fn weight_of_norm(call: &Call, tensors: &Tensors<'_, '_>) -> Option<Vec<f32>> {
    let is_first = call.spec.cast_order.is_weight_first() && !call.has(WeightBug::After);
    tensors.values(Tensor::Weight).filter(|_| !is_first)
}

impl<'c> NormKernel<'c> {
    /// The kernel of the norm of x.
    pub(crate) fn first(call: &'c Call, tensors: &Tensors<'_, '_>) -> Self {
        NormKernel::new(call, weight_of_norm(call, tensors), tensors.values(Tensor::Bias))
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
        let mut result = Normalized { rstd: Some(Vec::new()), ..Normalized::default() };
        for group in 0..self.call.spec.groups {
            let (y, mean, rstd) = self.normalize_group(row, group, h);
            result.y.extend(y);
            result.mean.push(mean);
            result.rstd = result.rstd.zip(rstd).map(|(rstds, rstd)| [rstds, vec![rstd]].concat());
        }
        result
    }

    /// A group's part of `y`, its mean and its rstd.
    fn normalize_group(&mut self, row: usize, group: usize, h: &[f32]) -> (Vec<f32>, f32, Option<f32>) {
        let width = self.call.width();
        let mut statistics = self.statistics(row, &h[self.call.columns(group)]);
        let (first_col, h) = (group * width, &h[group * width..][..width]);
        if let Some(previous) = self.previous
            && self.call.has(NormBug::RowOff)
            && self.call.is_last_of_several(row)
        {
            statistics.rstd = previous.rstd;
        }
        let mut y = self.scale(first_col, h, statistics);
        if self.call.has(NormBug::ReadAfterWrite) {
            self.redo_second_half((row, first_col), h, &mut y);
        }
        let mean = round(statistics.mean, self.call.accumulator(NormBug::MeanStore16));
        let rstd = self.saved_rstd(statistics);
        self.previous = Some(statistics);
        (y, mean, rstd)
    }

    fn saved_rstd(&self, statistics: Statistics) -> Option<f32> {
        match self.call.bug() {
            Some(NormBug::RstdMissing) => None,
            Some(NormBug::RstdIsVariance) => Some(statistics.var),
            Some(NormBug::RstdOfOtherRow) => Some(self.previous.unwrap_or(statistics).rstd),
            Some(_) | None if self.cast_order.rounds_rstd() && self.call.has(CastOrderBug::RstdStored) => {
                Some(round(statistics.rstd, self.call.problem.dtypes.activation))
            }
            Some(_) | None => Some(round(statistics.rstd, self.call.accumulator(NormBug::RstdStore16))),
        }
    }

    fn statistics(&self, row: usize, h: &[f32]) -> Statistics {
        let call = self.call;
        let counted = self.counted(h);
        let mut mean = match call.spec.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 0.0,
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
        let cols = if self.call.has(GroupBug::OfRow) { self.call.spec.cols } else { self.call.width() };
        let divisor = match self.call.bug() {
            Some(NormBug::NMinusOne) => (cols - 1).max(1),
            Some(NormBug::NPadded8) => cols.next_multiple_of(8),
            Some(NormBug::NPow2) => cols.next_power_of_two(),
            Some(_) | None if self.call.has(L2Bug::DividedByCols) => cols,
            Some(_) | None => self.call.spec.norm.divisor(cols),
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
        // NaN stays.
        let at_least = |least: f32| if var < least { least } else { var };
        let inside = match (call.spec.norm, call.bug()) {
            (Norm::Rms | Norm::Layer | Norm::L2, _) => var + eps,
            (Norm::L2Clamped, Some(L2Bug::ClampIgnored)) => var,
            (Norm::L2Clamped, Some(L2Bug::ClampAdds)) => var + eps * eps,
            (Norm::L2Clamped, Some(L2Bug::ClampOfEps)) => at_least(eps),
            (Norm::L2Clamped, Some(_) | None) => at_least(eps * eps),
        };
        if call.has(L2Bug::EpsOutside) {
            return 1.0 / (var.sqrt() + eps);
        }
        match call.bug() {
            Some(NormBug::EpsOutside) => 1.0 / (var.sqrt() + eps),
            Some(NormBug::EpsMissing) => inverse_root(var),
            Some(NormBug::EpsBeforeDiv) => inverse_root(self.divide_by_cols(sum + eps)),
            Some(NormBug::EpsAfter) => inverse_root(var) + eps,
            Some(NormBug::EpsMax) => inverse_root(var.max(eps)),
            Some(NormBug::Rsqrt12) => f32::from_bits(inverse_root(inside).to_bits() & !0xfff),
            Some(NormBug::RsqrtF16) => round(inverse_root(inside), DType::F16),
            Some(_) | None => round(inverse_root(inside), call.accumulator(NormBug::RsqrtStore)),
        }
    }

    fn scale(&self, first_col: usize, h: &[f32], statistics: Statistics) -> Vec<f32> {
        let activation = self.call.problem.dtypes.activation;
        let x_hat_dtype = match self.cast_order {
            CastOrder::BeforeWeight if self.call.has(NormBug::CastOrderIgnored) => DType::F32,
            CastOrder::RstdFirst if self.call.has(CastOrderBug::XHatUnrounded) => DType::F32,
            CastOrder::BeforeWeight | CastOrder::RstdFirst => activation,
            CastOrder::AtStore | CastOrder::WeightFirst => self.call.accumulator(NormBug::CastLlama),
        };
        let rounds_rstd = self.cast_order.rounds_rstd() && !self.call.has(CastOrderBug::RstdUnrounded);
        let rstd = round(statistics.rstd, if rounds_rstd { activation } else { DType::F32 });
        let scale_one = |(i, h): (usize, &f32)| {
            let col = self.call.affine_col(first_col + i);
            let x_hat = round((h - statistics.mean) * rstd, x_hat_dtype);
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
    fn redo_second_half(&self, (row, first_col): (usize, usize), h: &[f32], y: &mut [f32]) {
        let half = h.len() / 2;
        let overwritten = y[..half].iter().map(|&y| round(y, self.call.problem.dtypes.activation));
        let seen: Vec<f32> = overwritten.chain(h[half..].iter().copied()).collect();
        let late = self.scale(first_col, &seen, self.statistics(row, &seen));
        y[half..].copy_from_slice(&late[half..]);
    }
}
