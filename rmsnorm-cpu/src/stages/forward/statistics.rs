//! The statistic slot: math.md, equations (2) to (4) and (15). Layer norm's variance is computed from deviations, in a
//! second visit, because `avg(h^2) - mean^2` cancels. That visit also sums the deviations, which correct the rounding
//! error of the mean and its effect on the variance.

use rmsnorm_spec::{DType, Norm, bf16, f16};

use super::before::Source;
use crate::lanes::{self, Part, Simd};
use crate::stages::{Call, Split};

/// The statistics of rows.
pub(crate) trait Statistic: Split {
    /// Whether rows can be visited in batches.
    const IS_BATCHED: bool;

    /// Those of row `r`.
    fn of<S: Simd, H: Source>(&self, r: usize, call: &Call, row: &mut H) -> Statistics;
}

/// A row's own statistics, of all its columns.
#[derive(Clone, Copy)]
pub(crate) struct OfRow;

impl Split for OfRow {
    fn split_at(self, _: usize) -> (Self, Self) {
        (OfRow, OfRow)
    }
}

impl Statistic for OfRow {
    const IS_BATCHED: bool = true;

    #[inline(always)]
    fn of<S: Simd, H: Source>(&self, _: usize, call: &Call, row: &mut H) -> Statistics {
        Statistics::of::<S, _>(row, call)
    }
}

/// Found before: what comes after the norm has those of every group of columns.
#[derive(Clone, Copy)]
pub(crate) struct Elsewhere;

impl Split for Elsewhere {
    fn split_at(self, _: usize) -> (Self, Self) {
        (Elsewhere, Elsewhere)
    }
}

impl Statistic for Elsewhere {
    const IS_BATCHED: bool = false;

    /// The first visit, which keeps the row.
    #[inline(always)]
    fn of<S: Simd, H: Source>(&self, _: usize, call: &Call, row: &mut H) -> Statistics {
        Statistics { mean: 0.0, rstd: sum_of::<S, H>(row, call.spec.cols, false) }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Statistics {
    /// 0 for all but layer norm: subtracting it costs less than a branch.
    pub(crate) mean: f32,
    pub(crate) rstd: f32,
}

impl Statistics {
    /// What makes x_hat in forward: with rstd rounded to the activations' dtype, if the cast order
    /// says so.
    #[inline(always)]
    pub(crate) fn factors(self, call: &Call) -> Self {
        if !call.spec.cast_order.rounds_rstd() {
            return self;
        }
        let rstd = match call.dtypes.activation {
            DType::F32 => self.rstd,
            DType::F16 => f16::from_f32(self.rstd).to_f32(),
            DType::Bf16 => bf16::from_f32(self.rstd).to_f32(),
        };
        Statistics { rstd, ..self }
    }

    /// Equation (5).
    #[inline(always)]
    pub(crate) fn x_hat<S: Simd>(self, h: S::Lanes) -> S::Lanes {
        S::mul(S::sub(h, S::splat(self.mean)), S::splat(self.rstd))
    }

    /// Equations (2) to (4).
    #[inline(always)]
    pub(super) fn of<S: Simd, H: Source>(row: &mut H, call: &Call) -> Self {
        let (norm, cols, eps) = (call.spec.norm, call.spec.cols, call.spec.eps);
        let sum = match (H::IS_LONG, norm) {
            (true, _) => sum_of::<S, H>(row, cols, norm != Norm::Layer),
            (false, Norm::Rms | Norm::L2 | Norm::L2Clamped) => sum_of::<S, H>(row, cols, true),
            (false, Norm::Layer) => sum_of::<S, H>(row, cols, false),
        };
        match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => {
                Statistics { mean: 0.0, rstd: rstd_of(norm, sum / norm.divisor(cols) as f32, eps) }
            }
            Norm::Layer => {
                let Moments { mean, var, .. } = Moments::of::<S>(row, cols, sum);
                Statistics { mean, rstd: rstd_of(norm, var, eps) }
            }
        }
    }
}

/// Equations (4) and (23). The square root and the division are correctly rounded, so rstd is within 2 units
/// of roundoff.
#[inline(always)]
pub(crate) fn rstd_of(norm: Norm, var: f32, eps: f32) -> f32 {
    let inside = norm.inside_root(eps);
    let inside = match norm {
        Norm::Rms | Norm::Layer | Norm::L2 => var + inside,
        // NaN stays.
        Norm::L2Clamped if var < inside => inside,
        Norm::L2Clamped => var,
    };
    1.0 / inside.sqrt()
}

/// The first visit of a row: the sum of its elements, or of their squares.
#[inline(always)]
pub(crate) fn sum_of<S: Simd, H: Source>(row: &mut H, cols: usize, of_squares: bool) -> f32 {
    let [sum] = lanes::sum_up!(S, cols, piece => {
        let h = row.first::<S, _>(piece);
        [if of_squares { S::mul(h, h) } else { h }]
    });
    sum
}

/// The sums of a row's deviations from a center and of their squares.
#[inline(always)]
pub(super) fn sums_about<S: Simd>(row: &impl Source, cols: usize, center: f32) -> [f32; 2] {
    let centers = S::splat(center);
    lanes::sum_up!(S, cols, piece => {
        // Lanes beyond a short piece may not count: 0 minus the center is not 0.
        let centred = lanes::within::<S, _>(piece, S::sub(row.h::<S, _>(piece), centers));
        [centred, S::mul(centred, centred)]
    })
}

/// The mean and the variance of a row.
#[derive(Clone, Copy)]
pub(crate) struct Moments {
    pub(crate) mean: f32,
    pub(crate) var: f32,
    /// Whether the center was so close to the mean that little was subtracted from the squares.
    pub(crate) is_near: bool,
}

impl Moments {
    /// The moments of a row, from the sums of its deviations from `center` and of their squares.
    #[inline(always)]
    pub(crate) fn about(center: f32, [deviations, squares]: [f32; 2], cols: f32) -> Self {
        let (off, about_center) = (deviations / cols, squares / cols);
        let excess = off * off;
        let var = about_center - excess;
        // `var` is not a sum of squares, so rounding may leave it below 0. NaN is kept. If the
        // squares overflow, they say nothing about the distance.
        let is_near = 64.0 * excess <= about_center && about_center.is_finite();
        Moments { mean: center + off, var: if var < 0.0 { 0.0 } else { var }, is_near }
    }

    /// The moments of a row with the sum `sum`, about its average. If the average is far from the
    /// mean, about the corrected mean. In a row of equal values the mean is that value.
    #[inline(always)]
    fn of<S: Simd>(row: &impl Source, cols: usize, sum: f32) -> Self {
        let count = cols as f32;
        let (mut center, mut is_second) = (center_of::<S>(row, cols, sum / count), false);
        loop {
            let moments = Moments::about(center, sums_about::<S>(row, cols, center), count);
            if moments.is_near || is_second {
                return moments;
            }
            (center, is_second) = (moments.mean, true);
        }
    }
}

/// The first center of a row: its average, or its first element if the sum overflows.
#[inline(always)]
pub(super) fn center_of<S: Simd>(row: &impl Source, cols: usize, average: f32) -> f32 {
    if average.is_finite() {
        return average;
    }
    let first = Part { start: 0, len: cols.min(1) };
    S::fold(lanes::within::<S, _>(first, row.h::<S, _>(first)))
}

/// Equation (15): the sum, and the sums of the deviations from its average and of their squares. If
/// the average is far from the mean, the sum is first corrected by the sum of the deviations.
#[inline(always)]
pub(crate) fn sums_about_mean<S: Simd>(row: &impl Source, cols: usize, sum: f32) -> [f32; 3] {
    let (mut sum, mut is_second, count) = (sum, false, cols as f32);
    loop {
        let [deviations, squares] = sums_about::<S>(row, cols, sum / count);
        if is_second || Moments::about(sum / count, [deviations, squares], count).is_near {
            return [sum, deviations, squares];
        }
        (sum, is_second) = (sum + deviations, true);
    }
}
