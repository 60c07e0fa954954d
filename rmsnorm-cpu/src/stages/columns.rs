//! Rows with columns divided among ranks: math.md, equations (15) to (18). Sums over one rank's
//! columns, and the statistics of whole rows from the numbers of all ranks.

use rmsnorm_spec::{Direction, Norm};

use super::Stage;
use super::backward::BackwardBlocks;
use super::forward::ForwardRows;
use super::forward::moments::Moments;
use crate::lanes::{Fenced, Out, Simd};

/// The numbers of all ranks: (ranks, rows, numbers).
#[derive(Clone, Copy)]
pub(crate) struct Found<'a> {
    pub(crate) numbers: &'a [f32],
    /// Columns of each rank.
    pub(crate) columns: &'a [usize],
    /// Columns of all ranks: the length of whole rows.
    pub(crate) cols: f32,
    /// Rows of the call.
    pub(crate) rows: usize,
    /// The first row of this part.
    pub(crate) first: usize,
}

impl Found<'_> {
    /// The numbers from row `row` on.
    pub(crate) fn from(self, row: usize) -> Self {
        Found { first: self.first + row, ..self }
    }

    /// For each rank, its number of columns and its numbers of a row.
    fn of_row<const N: usize>(&self, row: usize) -> impl Iterator<Item = (f32, [f32; N])> {
        let row = self.first + row;
        let numbers = move |rank: usize| {
            let numbers = &self.numbers[(rank * self.rows + row) * N..];
            std::array::from_fn(|i| numbers[i])
        };
        self.columns.iter().enumerate().map(move |(rank, &columns)| (columns as f32, numbers(rank)))
    }

    /// Equation (16): the mean (0 for RMS norm) and the variance.
    pub(crate) fn mean_and_var(&self, norm: Norm, row: usize) -> (f32, f32) {
        let cols = self.cols;
        match norm {
            Norm::Rms => (0.0, sum(self.of_row(row).map(|(_, [squares])| squares)) / cols),
            Norm::Layer => {
                let average = sum(self.of_row(row).map(|(_, [sum, _, _])| sum)) / cols;
                let first = Moments::about(average, self.about(row, average), cols);
                let Moments { mean, var, .. } =
                    if first.is_near { first } else { Moments::about(first.mean, self.about(row, first.mean), cols) };
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

    /// Equation (18): `mean_wdy` (0 for RMS norm) and `mean_wdy_xhat`.
    pub(crate) fn mean_wdy_and_wdy_xhat(&self, norm: Norm, row: usize) -> (f32, f32) {
        let cols = self.cols;
        match norm {
            Norm::Rms => (0.0, sum(self.of_row(row).map(|(_, [products])| products)) / cols),
            Norm::Layer => {
                let wdy = sum(self.of_row(row).map(|(_, [wdy, _])| wdy));
                let products = sum(self.of_row(row).map(|(_, [_, products])| products));
                (wdy / cols, products / cols)
            }
        }
    }
}

/// Adds in rank order.
fn sum(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.reduce(|sum, number| sum + number).unwrap_or(0.0)
}

/// The rows of either phase of a forward call, or some of them.
pub(crate) struct ColumnsRows<'a> {
    /// All tensors except the statistics. The first phase has no outputs.
    pub(crate) rows: ForwardRows<'a>,
    pub(crate) half: Half<'a>,
}

/// The phase.
pub(crate) enum Half<'a> {
    /// The first phase, and its output: the numbers of the rows.
    First(Out<'a, f32>),
    /// The second phase, and the numbers of all ranks.
    Second(Found<'a>),
}

impl<'a> Half<'a> {
    fn split_at(self, row: usize, numbers: usize) -> (Self, Self) {
        match self {
            Half::First(out) => {
                let (low, high) = out.split_at(row * numbers);
                (Half::First(low), Half::First(high))
            }
            Half::Second(found) => (Half::Second(found), Half::Second(found.from(row))),
        }
    }
}

impl ColumnsRows<'_> {
    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (half_low, half_high) = self.half.split_at(row, self.rows.spec.norm.statistics_len(Direction::Forward));
        let (low, high) = self.rows.split_at(row);
        (ColumnsRows { rows: low, half: half_low }, ColumnsRows { rows: high, half: half_high })
    }
}

/// Computes the numbers of every row, or normalizes it.
impl Stage for ColumnsRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        let (norm, eps) = (self.rows.spec.norm, self.rows.spec.eps);
        match &mut self.half {
            Half::First(out) => {
                for r in 0..self.rows.rows {
                    match norm {
                        Norm::Rms => out.set(r, self.rows.sum_of_squares::<S>(r)),
                        Norm::Layer => {
                            for (i, number) in self.rows.sums_about_mean::<S>(r).into_iter().enumerate() {
                                out.set(3 * r + i, number);
                            }
                        }
                    }
                }
            }
            Half::Second(found) => {
                let fenced = Fenced::<S>::new(self.rows.streaming);
                for r in 0..self.rows.rows {
                    let (mean, var) = found.mean_and_var(norm, r);
                    self.rows.normalize_by::<S>(r, mean, 1.0 / (var + eps).sqrt(), fenced.stores());
                }
            }
        }
    }
}

/// The blocks of the first phase of a backward call, or some of them.
pub(crate) struct SumsBlocks<'a> {
    /// The inputs; there are no outputs.
    pub(crate) blocks: BackwardBlocks<'a>,
    /// (rows, numbers)
    pub(crate) sums: Out<'a, f32>,
}

impl SumsBlocks<'_> {
    /// The blocks before `block`, and the rest.
    pub(crate) fn split_at(self, block: usize) -> (Self, Self) {
        let numbers = self.blocks.spec.norm.statistics_len(Direction::Backward);
        let (low, high) = self.blocks.split_at(block);
        let (sums_low, sums_high) = self.sums.split_at(low.rows * numbers);
        (SumsBlocks { blocks: low, sums: sums_low }, SumsBlocks { blocks: high, sums: sums_high })
    }
}

/// Computes the sums of every row.
impl Stage for SumsBlocks<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        for r in 0..self.blocks.rows {
            let (wdy, products) = self.blocks.sums::<S>(r);
            match self.blocks.spec.norm {
                Norm::Rms => self.sums.set(r, products),
                Norm::Layer => {
                    self.sums.set(2 * r, wdy);
                    self.sums.set(2 * r + 1, products);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variance of two ranks with one column each and means 1 below and above the row's mean.
    fn var(deviations: f32) -> f32 {
        let numbers = [1.0, 0.0, 0.0, 3.0, deviations, 0.0];
        let found = Found { numbers: &numbers, columns: &[1, 1], cols: 2.0, rows: 1, first: 0 };
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
