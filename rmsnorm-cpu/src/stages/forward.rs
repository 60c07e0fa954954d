//! Forward: math.md, equations (1) to (6) and (13) to (16). The schedule contains no norm: the slots do. A row is read
//! from memory once; later visits find it in the cache, or on the stack. While it is written, the next row is
//! prefetched. Rows of 16-bit elements, and short ones of f32, go through `batches`.

use rmsnorm_spec::DTypes;

use self::affine::{OfMix, Vectors};
use self::after::{After, Visit};
use self::before::{Before, Source, Summed};
use self::kept::{Kept, MOST_COLS, Room, padded};
use self::statistics::{OfRow, Statistic, Statistics};
use super::{Call, Common, Split, Stage, split};
use crate::lanes::{Fenced, Mix, Numbers, Out, Simd, Stores};

pub(crate) mod affine;
pub(crate) mod after;
mod batches;
pub(crate) mod before;
pub(super) mod kept;
pub(crate) mod statistics;

/// The rows of a forward call, or some of them: `after(affine(statistic(before)))`.
pub(crate) struct Rows<'a, B, A, F = OfRow> {
    pub(crate) call: Call,
    pub(crate) before: B,
    pub(crate) statistic: F,
    pub(crate) affine: Vectors<'a>,
    pub(crate) after: A,
    pub(crate) saved: Saved<'a>,
}

impl<B: Split, A: Split, F: Split> Split for Rows<'_, B, A, F> {
    /// At a row of the call.
    fn split_at(self, row: usize) -> (Self, Self) {
        let (row, affine) = (row * self.call.column_groups, self.affine);
        let (call, high_call) = self.call.split_at(row);
        let (before, high_before) = self.before.split_at(row);
        let (statistic, high_statistic) = self.statistic.split_at(row);
        let (after, high_after) = self.after.split_at(row);
        let (saved, high_saved) = self.saved.split_at(row);
        let high = Rows {
            call: high_call,
            before: high_before,
            statistic: high_statistic,
            affine,
            after: high_after,
            saved: high_saved,
        };
        (Rows { call, before, statistic, affine, after, saved }, high)
    }
}

impl<'a, X, A, F> Rows<'a, Summed<'a, X>, A, F> {
    /// With another x, before the residual is added.
    pub(crate) fn with_x<Y>(self, of_x: impl FnOnce(X) -> Y) -> Rows<'a, Summed<'a, Y>, A, F> {
        let Rows { call, before: Summed { x, residual, out }, statistic, affine, after, saved } = self;
        Rows { call, before: Summed { x: of_x(x), residual, out }, statistic, affine, after, saved }
    }
}

/// The outputs for the statistics of rows.
#[derive(Default)]
pub(crate) struct Saved<'a> {
    pub(crate) mean: Option<Out<'a, f32>>,
    pub(crate) rstd: Option<Out<'a, f32>>,
}

split!(['a] Saved<'a> { mean, rstd; });

impl Saved<'_> {
    #[inline(always)]
    fn set(&mut self, row: usize, statistics: Statistics) {
        if let Some(mean) = &mut self.mean {
            mean.set(row, statistics.mean);
        }
        if let Some(rstd) = &mut self.rstd {
            rstd.set(row, statistics.rstd);
        }
    }
}

impl<B: Before, A: After> Common for Rows<'_, B, A> {
    fn dtypes(&self) -> DTypes {
        self.call.dtypes
    }
}

/// Computes every row.
impl<B: Before, A: After, F: Statistic> Stage for Rows<'_, B, A, F> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        let fenced = Fenced::<S>::new(self.call.streaming);
        // An absent residual is tested here and not in the loops, for the most common calls.
        match A::IS_COMMON && M::T::IS_KNOWN && !self.before.has_residual() {
            true => self.run_rows::<S, M, false>(fenced.stores()),
            false => self.run_rows::<S, M, true>(fenced.stores()),
        }
        self.after.finish::<S>();
    }
}

impl<B: Before, A: After, F: Statistic> Rows<'_, B, A, F> {
    #[inline(always)]
    fn run_rows<S: Simd, M: Mix, const RESIDUAL: bool>(&mut self, stores: Stores<'_>) {
        if A::IS_COMMON && F::IS_BATCHED && self.is_for_batches::<S, M, RESIDUAL>() {
            return self.run_in_batches::<S, M, RESIDUAL>(stores);
        }
        let (call, vectors) = (&self.call, OfMix::<M>::new(self.affine, &self.call));
        let (fits, len) = (call.spec.cols <= MOST_COLS, padded(call.spec.cols));
        let (mut room, mut room_after) = (Room::new(), Room::new());
        let mut kept = (self.before.is_kept() && fits).then(|| room.zeros(len));
        let mut kept_after = (self.after.has_next() && fits).then(|| room_after.zeros(len));
        for r in 0..call.spec.rows {
            let row = self.before.row::<M, RESIDUAL>(r, 1, call);
            let affine = vectors.of_row(r, call);
            let visit = Visit { r, call, affine, stores, kept: kept_after.as_deref_mut() };
            let statistics = match &mut kept {
                Some(kept) => run_row::<S, M, _, _, _>(Kept { of: row, kept }, &self.statistic, &mut self.after, visit),
                None => run_row::<S, M, _, _, _>(row, &self.statistic, &mut self.after, visit),
            };
            self.saved.set(r, statistics);
        }
    }
}

#[inline(always)]
fn run_row<S: Simd, M: Mix, H: Source, A: After, F: Statistic>(
    mut row: H,
    statistic: &F,
    after: &mut A,
    visit: Visit<'_, OfMix<'_, M>>,
) -> Statistics {
    let statistics = statistic.of::<S, _>(visit.r, visit.call, &mut row);
    after.put::<S, M, _, _>(row, statistics.factors(visit.call), visit);
    statistics
}
