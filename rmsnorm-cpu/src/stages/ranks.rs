//! The numbers of all ranks, where columns are divided among ranks: math.md, equations (16) and (18).

use rmsnorm_spec::Norm;

use super::forward::before::Source;
use super::forward::statistics::{Moments, Statistic, Statistics, rstd_of};
use super::{Call, Section, split};
use crate::lanes::Simd;

/// The numbers of all ranks: (ranks, rows, numbers).
#[derive(Clone, Copy)]
pub(crate) struct Found<'a> {
    pub(crate) numbers: &'a [f32],
    /// Columns of each rank.
    pub(crate) columns: &'a [usize],
    /// What sums over whole rows are divided by: for most norms the columns of all ranks.
    pub(crate) divisor: f32,
    /// Rows of the call.
    pub(crate) of_rows: usize,
    pub(crate) rows: Section,
}

split!(['a] Found<'a> { rows; numbers, columns, divisor, of_rows });

/// The statistics of whole rows.
impl Statistic for Found<'_> {
    const IS_BATCHED: bool = false;

    #[inline(always)]
    fn of<S: Simd, H: Source>(&self, r: usize, call: &Call, _: &mut H) -> Statistics {
        let (mean, var) = self.mean_and_var(call.spec.norm, r);
        Statistics { mean, rstd: rstd_of(call.spec.norm, var, call.spec.eps) }
    }
}

impl Found<'_> {
    /// For each rank, its number of columns and its numbers of a row.
    fn of_row<const N: usize>(&self, row: usize) -> impl Iterator<Item = (f32, [f32; N])> {
        let row = self.rows.first + row;
        let numbers = move |rank: usize| {
            let numbers = &self.numbers[(rank * self.of_rows + row) * N..];
            std::array::from_fn(|i| numbers[i])
        };
        self.columns.iter().enumerate().map(move |(rank, &columns)| (columns as f32, numbers(rank)))
    }

    /// Equation (16): the mean (0 for all but layer norm) and the variance.
    fn mean_and_var(&self, norm: Norm, row: usize) -> (f32, f32) {
        let divisor = self.divisor;
        match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => {
                (0.0, sum(self.of_row(row).map(|(_, [squares])| squares)) / divisor)
            }
            Norm::Layer => {
                let average = sum(self.of_row(row).map(|(_, [sum, _, _])| sum)) / divisor;
                let first = Moments::about(average, self.about(row, average), divisor);
                let Moments { mean, var, .. } = if first.is_near {
                    first
                } else {
                    Moments::about(first.mean, self.about(row, first.mean), divisor)
                };
                (mean, var)
            }
        }
    }

    /// The sums of the deviations from a center and of their squares.
    fn about(&self, row: usize, center: f32) -> [f32; 2] {
        let of_ranks = self.of_row(row).map(|(columns, [sum, deviations, squares])| {
            // The same division as on the rank itself.
            let apart = sum / columns - center;
            [deviations + columns * apart, squares + (2.0 * apart) * deviations + columns * (apart * apart)]
        });
        of_ranks.reduce(|[a, b], [c, d]| [a + c, b + d]).unwrap_or([0.0; 2])
    }

    /// Equation (18): `mean_wdy` (0 for all but layer norm) and `mean_wdy_xhat`.
    pub(crate) fn mean_wdy_and_wdy_xhat(&self, norm: Norm, row: usize) -> [f32; 2] {
        let divisor = self.divisor;
        match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => {
                [0.0, sum(self.of_row(row).map(|(_, [products])| products)) / divisor]
            }
            Norm::Layer => {
                let wdy = sum(self.of_row(row).map(|(_, [wdy, _])| wdy));
                let products = sum(self.of_row(row).map(|(_, [_, products])| products));
                [wdy / divisor, products / divisor]
            }
        }
    }
}

/// Adds in rank order.
fn sum(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.reduce(|sum, number| sum + number).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variance of two ranks with one column each and means 1 below and above the row's mean.
    fn var(deviations: f32) -> f32 {
        let numbers = [1.0, 0.0, 0.0, 3.0, deviations, 0.0];
        let found =
            Found { numbers: &numbers, columns: &[1, 1], divisor: 2.0, of_rows: 1, rows: Section { first: 0, len: 1 } };
        found.mean_and_var(Norm::Layer, 0).1
    }

    #[test]
    fn a_variance_that_rounding_leaves_below_zero_is_zero() {
        assert_eq!(var(0.0), 1.0);
        assert_eq!(var(-1.0).to_bits(), 0);
        assert_eq!(var(-1.5).to_bits(), 0);
        assert!(var(f32::NAN).is_nan());
    }
}
