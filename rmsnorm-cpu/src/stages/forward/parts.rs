//! Forward of the sum of several matrices: math.md, equation (1'). The parts of a row, which may be
//! far apart, are read from memory once. The sum stays on the stack, or is computed again on each
//! visit, from the cache, if a row is too long.

use super::after::{Kept, MadeAgain, Sum, save};
use super::batches::{MOST_COLS, Room, padded};
use super::{ForwardRows, Row};
use crate::lanes::{self, Any, Fenced, In, Piece, Simd};
use crate::stages::{Matrix, Stage};

/// The rows of such a call, or some of them.
pub(crate) struct PartsRows<'a> {
    /// All tensors except x.
    pub(crate) rows: ForwardRows<'a>,
    /// All rows of all parts. It is not split, because the last part of the first row may lie after
    /// the first part of the last row.
    pub(crate) x: Matrix<'a, Any>,
    /// The first row of this part of the work.
    pub(crate) first: usize,
    /// Number of parts.
    pub(crate) count: usize,
    /// Elements from one part to the next.
    pub(crate) stride: usize,
}

impl PartsRows<'_> {
    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (low, high) = self.rows.split_at(row);
        (PartsRows { rows: low, ..self }, PartsRows { rows: high, first: self.first + row, ..self })
    }
}

/// Normalizes the sum of every row.
impl Stage for PartsRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        let spec = self.rows.spec;
        let fenced = Fenced::<S>::new(self.rows.streaming);
        let stores = fenced.stores();
        let of_sum = Row::of_sum(&self.rows, self.rows.weight, self.rows.bias);
        let mut room = Room::new();
        let mut kept = (spec.cols <= MOST_COLS).then(|| room.zeros(padded(spec.cols)));
        for r in 0..self.rows.rows {
            let from = self.x.data.tail(self.x.rows.start(self.first + r));
            let parts = Parts { from, count: self.count, stride: self.stride };
            let mut row = self.rows.row(r);
            (row.x, row.x_stride) = (Some(from.part(0, spec.cols)), self.x.rows.row_stride);
            let statistics = match &mut kept {
                Some(kept) => {
                    let mut sums = Kept(kept);
                    let statistics = row.sum_statistics::<S>(&parts, &mut sums, spec.norm, spec.eps);
                    row.normalize_sum::<S>(&sums, &of_sum, statistics, stores, stores);
                    statistics
                }
                None => {
                    let statistics = row.sum_statistics::<S>(&parts, &mut MadeAgain(&parts), spec.norm, spec.eps);
                    row.normalize_sum::<S>(&MadeAgain(&parts), &of_sum, statistics, stores, stores);
                    statistics
                }
            };
            save(&mut self.rows.mean, &mut self.rows.rstd, r, statistics);
        }
    }
}

/// The parts of a row.
struct Parts<'r> {
    /// The elements from the row's first element in the first part on.
    from: In<'r, Any>,
    count: usize,
    stride: usize,
}

impl Sum<Any, Any, Any> for Parts<'_> {
    #[inline(always)]
    fn make<S: Simd, P: Piece>(&self, row: &Row<'_>, piece: P) -> S::Lanes {
        let part = |part: usize| self.from.part(part * self.stride, row.cols).load::<S, _>(piece);
        let mut sum = part(0);
        for further in 1..self.count {
            sum = S::add(sum, part(further));
        }
        if let Some(residual) = row.residual {
            sum = S::add(sum, residual.load::<S, _>(piece));
        }
        lanes::round_through::<S>(row.dtypes.residual, sum)
    }
}
