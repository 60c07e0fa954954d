//! Layer norm's mean and variance: math.md, equations (2) and (3). The variance is centred: a second visit, because `avg(h^2) - mean^2`
//! cancels. The deviations' sum, which that visit makes as well, corrects the mean by what it was rounded by, and the variance by as much.

use super::{Statistics, rstd_of};
use crate::lanes::{self, Part, Piece, Simd};

/// A row that is visited again.
pub(super) trait Deviations {
    fn cols(&self) -> usize;

    /// What is normalized, at a piece. Behind a short one there may be anything.
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes;

    /// The deviations' sum from a center, and that of their squares.
    #[inline(always)]
    fn about<S: Simd>(&self, center: f32) -> [f32; 2] {
        let centers = S::splat(center);
        lanes::sum_up!(S, self.cols(), piece => {
            // Lanes beyond a short piece hold 0, which is not 0 once centred.
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
    /// Whether the center was so near to the mean that little of the squares was taken away again.
    pub(crate) is_near: bool,
}

impl Moments {
    /// Of a row whose deviations from `center` add up to so much, and their squares.
    #[inline(always)]
    pub(crate) fn about(center: f32, [deviations, squares]: [f32; 2], cols: f32) -> Self {
        let (off, about_center) = (deviations / cols, squares / cols);
        let excess = off * off;
        let var = about_center - excess;
        // It is no sum of squares, and rounding may leave it below 0. NaN stays.
        // Squares that leave f32 tell nothing of the distance.
        let is_near = 64.0 * excess <= about_center && about_center.is_finite();
        Moments { mean: center + off, var: if var < 0.0 { 0.0 } else { var }, is_near }
    }

    /// Of a row whose elements add up to `sum`: about their average and, where that is far, about the mean that it gives. Of a row of one
    /// value that is the value.
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

/// What a row is centred on first: its average or, where the sum has left f32, its first element.
#[inline(always)]
pub(super) fn center_of<S: Simd>(row: &impl Deviations, average: f32) -> f32 {
    if average.is_finite() {
        return average;
    }
    let first = Part { start: 0, len: row.cols().min(1) };
    S::fold(lanes::within::<S, _>(first, row.h::<S, _>(first)))
}

/// Equation (15): the sum, the deviations' from its average, and their squares'. Where that is far from the mean, of the sum with what the
/// deviations add up to.
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
