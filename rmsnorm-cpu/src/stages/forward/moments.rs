//! Layer norm's mean and variance: math.md, equations (2) and (3). The variance is computed from
//! deviations, in a second visit, because `avg(h^2) - mean^2` cancels. That visit also sums the
//! deviations, which correct the rounding error of the mean and its effect on the variance.

use super::{Statistics, rstd_of};
use crate::lanes::{self, Part, Piece, Simd};

/// A row that can be visited again.
pub(super) trait Deviations {
    fn cols(&self) -> usize;

    /// The norm's input h at a piece. Lanes beyond a short piece are undefined.
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes;

    /// The sums of the deviations from a center and of their squares.
    #[inline(always)]
    fn about<S: Simd>(&self, center: f32) -> [f32; 2] {
        let centers = S::splat(center);
        lanes::sum_up!(S, self.cols(), piece => {
            // Lanes beyond a short piece may not count: 0 minus the center is not 0.
            let centred = lanes::within::<S, _>(piece, S::sub(self.h::<S, _>(piece), centers));
            [centred, S::mul(centred, centred)]
        })
    }
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
    pub(super) fn of<S: Simd>(row: &impl Deviations, sum: f32) -> Self {
        let cols = row.cols() as f32;
        let (mut center, mut is_second) = (center_of::<S>(row, sum / cols), false);
        loop {
            let moments = Moments::about(center, row.about::<S>(center), cols);
            if moments.is_near || is_second {
                return moments;
            }
            (center, is_second) = (moments.mean, true);
        }
    }

    #[inline(always)]
    pub(super) fn statistics(self, eps: f32) -> Statistics {
        Statistics { mean: self.mean, rstd: rstd_of(self.var, eps) }
    }
}

/// The first center of a row: its average, or its first element if the sum overflows.
#[inline(always)]
pub(super) fn center_of<S: Simd>(row: &impl Deviations, average: f32) -> f32 {
    if average.is_finite() {
        return average;
    }
    let first = Part { start: 0, len: row.cols().min(1) };
    S::fold(lanes::within::<S, _>(first, row.h::<S, _>(first)))
}

/// Equation (15): the sum, and the sums of the deviations from its average and of their squares. If
/// the average is far from the mean, the sum is first corrected by the sum of the deviations.
#[inline(always)]
pub(super) fn sums_about_mean<S: Simd>(row: &impl Deviations, sum: f32) -> [f32; 3] {
    let (mut sum, mut is_second, cols) = (sum, false, row.cols() as f32);
    loop {
        let [deviations, squares] = row.about::<S>(sum / cols);
        if is_second || Moments::about(sum / cols, [deviations, squares], cols).is_near {
            return [sum, deviations, squares];
        }
        (sum, is_second) = (sum + deviations, true);
    }
}
