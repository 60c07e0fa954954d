//! Backward: math.md, equations (7) to (12). A row is read once for mean_wdy and mean_wdy_xhat, and
//! again, from the cache, to write dx and to add the row to the partial sums of its block.
//! Meanwhile the next row is prefetched.

use rmsnorm_spec::{DTypes, Norm};

use super::forward::affine::{Affine, OfMix, Vectors};
use super::forward::before::Source;
use super::forward::kept::{MOST_COLS, Room, padded};
use super::forward::statistics::Statistics;
use super::ranks::Found;
use super::scaled::Kept;
use super::{Call, Common, Matrix, MatrixMut, Row, Split, Stage, split};
use crate::lanes::{self, Fenced, Mix, Numbers, Out, Piece, Simd, Stores};

/// The slot after the norm. It turns the gradient of y into that of the affine's result. A piece
/// other than dy itself is compiled for all dtypes at once (`kernel::any`).
pub(crate) trait PullAfter: Split {
    /// The gradient of the affine's result, of a row.
    type Row<'r, M: Mix>: RowAfter
    where
        Self: 'r;

    /// Whether rows that fit keep values on the stack.
    fn is_kept(&self) -> bool {
        false
    }

    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> Self::Row<'r, M>;
}

/// A row after the norm. The visit for the sums and the last visit both compute it.
pub(crate) trait RowAfter: Source {
    /// Whether [`pull`](Self::pull) needs the affine's result.
    #[inline(always)]
    fn needs_result(&self) -> bool {
        false
    }

    /// The last visit: also stores the gradients of the piece's own tensors.
    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, _result: S::Lanes, _: Stores<'_>) -> S::Lanes {
        self.h::<S, _>(piece)
    }
}

/// The slot before the norm: h, and what its gradient becomes. Compiled as [`PullAfter`] is.
pub(crate) trait PullBefore: Split {
    /// A row of h.
    type Row<'r, M: Mix>: RowBefore
    where
        Self: 'r;

    /// Whether rows that fit keep values on the stack.
    fn is_kept(&self) -> bool {
        false
    }

    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> Self::Row<'r, M>;
}

/// A row before the norm.
pub(crate) trait RowBefore: Source {
    /// Whether it has the weight, so that dweight is made of [`dweight`](Self::dweight).
    #[inline(always)]
    fn weighs(&self) -> bool {
        false
    }

    /// The row's terms of dweight, from the gradient of h.
    #[inline(always)]
    fn dweight<S: Simd, P: Piece>(&self, _: P, dh: S::Lanes) -> S::Lanes {
        dh
    }

    /// The last visit: turns the gradient of h into that of x, and stores the gradients of the
    /// piece's own tensors.
    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, _: P, dh: S::Lanes, _: Stores<'_>) -> S::Lanes {
        dh
    }
}

/// dy.
impl PullAfter for Matrix<'_> {
    type Row<'r, M: Mix>
        = Row<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, _: Option<Kept<'r>>) -> Row<'r, M::T> {
        Matrix::row(self, r, call.spec.cols, 1)
    }
}

/// What forward normalized, of the residual stream's dtype.
impl PullBefore for Matrix<'_> {
    type Row<'r, M: Mix>
        = Row<'r, M::R>
    where
        Self: 'r;

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, _: Option<Kept<'r>>) -> Row<'r, M::R> {
        Matrix::row(self, r, call.spec.cols, 1)
    }
}

impl<T: Numbers> RowAfter for Row<'_, T> {}

impl<T: Numbers> RowBefore for Row<'_, T> {}

/// The rows of a backward call, or some of them.
#[derive(Clone, Copy)]
pub(crate) struct BackwardRows<'a, A = Matrix<'a>, B = Matrix<'a>> {
    pub(crate) call: Call,
    pub(crate) dy: A,
    pub(crate) affine: Vectors<'a>,
    pub(crate) x: B,
    pub(crate) given: Given<'a>,
    /// The numbers of all ranks, if columns are divided among ranks.
    pub(crate) found: Option<Found<'a>>,
}

split!(['a, A: Split, B: Split] BackwardRows<'a, A, B> { call, dy, x, given, found; affine });

/// The statistics that forward stored.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) mean: Option<&'a [f32]>,
    pub(crate) rstd: &'a [f32],
}

split!(['a] Given<'a> { mean, rstd; });

impl Given<'_> {
    #[inline(always)]
    pub(super) fn of(&self, r: usize) -> Statistics {
        Statistics { mean: self.mean.map_or(0.0, |mean| mean[r]), rstd: self.rstd[r] }
    }
}

/// The blocks of a backward call, or some of them.
pub(crate) struct BackwardBlocks<'a, A = Matrix<'a>, B = Matrix<'a>> {
    pub(crate) rows: BackwardRows<'a, A, B>,
    pub(crate) block_rows: usize,
    pub(crate) stream: Gradients<'a>,
    pub(crate) partials: Partials<'a>,
}

/// The gradients that have a row per row of x.
pub(crate) struct Gradients<'a> {
    pub(crate) dresidual_out: Option<Matrix<'a>>,
    pub(crate) dx: MatrixMut<'a>,
    pub(crate) dresidual: Option<MatrixMut<'a>>,
}

split!(['a] Gradients<'a> { dresidual_out, dx, dresidual; });

/// The partial sums of blocks.
#[derive(Default)]
pub(crate) struct Partials<'a> {
    pub(crate) dweight: Option<Sums<'a>>,
    pub(crate) dbias: Option<Sums<'a>>,
}

split!(['a] Partials<'a> { dweight, dbias; });

/// One row of `cols` sums per block.
pub(crate) struct Sums<'a> {
    pub(crate) sums: &'a mut [f32],
    pub(crate) cols: usize,
}

impl Sums<'_> {
    /// Some columns of a block's sums.
    #[inline(always)]
    fn row(&mut self, block: usize, first: usize, cols: usize) -> &mut [f32] {
        &mut self.sums[block * self.cols + first..][..cols]
    }
}

impl Split for Sums<'_> {
    fn split_at(self, block: usize) -> (Self, Self) {
        let (low, high) = self.sums.split_at_mut(block * self.cols);
        (Sums { sums: low, ..self }, Sums { sums: high, ..self })
    }
}

impl<A: PullAfter, B: PullBefore> Split for BackwardBlocks<'_, A, B> {
    fn split_at(self, block: usize) -> (Self, Self) {
        let row = (block * self.block_rows).min(self.rows.call.spec.rows);
        let (rows, high_rows) = self.rows.split_at(row);
        let (stream, high_stream) = self.stream.split_at(row);
        let (partials, high_partials) = self.partials.split_at(block);
        let high = BackwardBlocks { rows: high_rows, stream: high_stream, partials: high_partials, ..self };
        (BackwardBlocks { rows, stream, partials, ..self }, high)
    }
}

/// The outputs of all rows. A row's pointers would take registers from the loop.
struct To<'a, M: Mix> {
    dx: MatrixMut<'a, M::T>,
    dresidual: Option<MatrixMut<'a, M::R>>,
}

impl Common for BackwardBlocks<'_> {
    fn dtypes(&self) -> DTypes {
        self.rows.call.dtypes
    }
}

/// Writes dx of every row and the partial sums of every block.
impl<A: PullAfter, B: PullBefore> Stage for BackwardBlocks<'_, A, B> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        // In locals: a store to an output may change the memory behind `self`, as far as the compiler knows.
        let (call, found, block_rows) = (self.rows.call, self.rows.found, self.block_rows);
        let Gradients { dresidual_out, dx, dresidual } = &mut self.stream;
        let mut to = To::<M> { dx: dx.known(), dresidual: dresidual.as_mut().map(MatrixMut::known) };
        let (dresidual_out, mut partials) = (*dresidual_out, std::mem::take(&mut self.partials));
        let cols = call.spec.cols;
        let fenced = Fenced::<S>::new(call.streaming);
        let (fits, len) = (cols <= MOST_COLS, padded(cols));
        let (mut room_after, mut room_before) = ([Room::new(), Room::new()], [Room::new(), Room::new()]);
        let mut kept_after =
            (self.rows.dy.is_kept() && fits).then(|| room_after.each_mut().map(|room| room.zeros(len)));
        let mut kept_before =
            (self.rows.x.is_kept() && fits).then(|| room_before.each_mut().map(|room| room.zeros(len)));
        for r in 0..call.spec.rows {
            let (block, first_col) = (r / block_rows, call.first_col(r));
            let partials = PartialRow {
                dweight: partials.dweight.as_mut().map(|of| of.row(block, first_col, cols)),
                dbias: partials.dbias.as_mut().map(|of| of.row(block, first_col, cols)),
                is_first: r - block * block_rows < call.column_groups,
            };
            let kept =
                [&mut kept_after, &mut kept_before].map(|kept| Some(kept.as_mut()?.each_mut().map(|kept| &mut **kept)));
            let mut row = self.rows.row::<M>(r, kept);
            let means = row.means::<S>(r, found);
            let dresidual_out = dresidual_out.as_ref().map(|dresidual_out| dresidual_out.row(r, cols, 1));
            // A separate loop: a branch inside the loop costs f32 a quarter of its speed.
            match to.dresidual {
                Some(_) => row.write::<S, true>(r, means, dresidual_out, &mut to, partials, fenced.stores()),
                None => row.write::<S, false>(r, means, dresidual_out, &mut to, partials, fenced.stores()),
            }
        }
    }
}

impl<'a, A: PullAfter, B: PullBefore> BackwardRows<'a, A, B> {
    #[inline(always)]
    pub(super) fn row<'r, M: Mix>(
        &'r mut self,
        r: usize,
        [after, before]: [Option<Kept<'r>>; 2],
    ) -> RowOf<'a, M, A::Row<'r, M>, B::Row<'r, M>> {
        RowOf {
            norm: self.call.spec.norm,
            eps: self.call.spec.eps,
            cols: self.call.spec.cols,
            dy: self.dy.row(r, &self.call, after),
            x: self.x.row(r, &self.call, before),
            affine: OfMix::new(self.affine, &self.call).of_row(r, &self.call),
            statistics: self.given.of(r),
        }
    }
}

/// A row of the inputs.
pub(super) struct RowOf<'a, M: Mix, A, B> {
    norm: Norm,
    eps: f32,
    cols: usize,
    dy: A,
    x: B,
    affine: OfMix<'a, M>,
    statistics: Statistics,
}

impl<M: Mix, A: RowAfter, B: RowBefore> RowOf<'_, M, A, B> {
    /// Equations (8) and (9), or (18) with columns divided among ranks: mean_wdy and mean_wdy_xhat.
    #[inline(always)]
    fn means<S: Simd>(&mut self, r: usize, found: Option<Found<'_>>) -> [f32; 2] {
        let [wdy, products] = match found {
            Some(found) => found.mean_wdy_and_wdy_xhat(self.norm, r),
            None => {
                let ([wdy, products], divisor) = (self.sums::<S>(), self.norm.divisor(self.cols) as f32);
                [wdy / divisor, products / divisor]
            }
        };
        [wdy, if self.norm.is_clamped(self.statistics.rstd, self.eps) { 0.0 } else { products }]
    }

    /// The sums of `wdy` (0 for all but layer norm), equation (7), and of `wdy * x_hat`: equation (17).
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&mut self) -> [f32; 2] {
        lanes::sum_up!(S, self.cols, piece => {
            let x_hat = self.statistics.x_hat::<S>(self.x.first::<S, _>(piece));
            let wdy = self.affine.times_weight::<S, _>(piece, self.dy.first::<S, _>(piece));
            // Lanes beyond a short piece have wdy = 0, but x_hat = -mean * rstd, which may be
            // infinite.
            let product = lanes::within::<S, _>(piece, S::mul(wdy, x_hat));
            [if self.norm == Norm::Layer { wdy } else { S::splat(0.0) }, product]
        })
    }

    /// Equations (10) to (12). `STREAM`: with `dresidual`.
    #[inline(always)]
    fn write<S: Simd, const STREAM: bool>(
        mut self,
        r: usize,
        means: [f32; 2],
        dresidual_out: Option<Row<'_, M::R>>,
        to: &mut To<'_, M>,
        mut partials: PartialRow<'_>,
        stores: Stores<'_>,
    ) {
        let scalars = (means, self.statistics, self.affine.weight_offset());
        // Computed once per row: it takes a division if rows lie in groups.
        let dx_start = to.dx.rows.start(r);
        let dresidual_start = to.dresidual.as_ref().map_or(0, |dresidual| dresidual.rows.start(r));
        let cols = self.cols;
        lanes::for_each_counted_piece!(stores.head(&to.dx.row(r, cols)), cols, scalars, piece => {
            let ([mean_wdy, mean_wdy_xhat], statistics, weight_offset) = scalars;
            let (mean_wdy, mean_wdy_xhat, rstd) = (S::splat(mean_wdy), S::splat(mean_wdy_xhat), S::splat(statistics.rstd));
            let affine = self.affine.with_weight_offset(weight_offset);
            self.dy.prefetch::<S, _>(piece);
            self.x.prefetch::<S, _>(piece);
            let h = self.x.h::<S, _>(piece);
            let x_hat = statistics.x_hat::<S>(h);
            // Not rounded on the way, unlike in forward.
            let result = match self.dy.needs_result() {
                true => affine.plus_bias::<S, _>(piece, affine.times_weight::<S, _>(piece, x_hat)),
                false => h,
            };
            let dy = self.dy.pull::<S, _>(piece, result, stores);
            if !self.x.weighs() && let Some(dweight) = &mut partials.dweight {
                accumulate::<S, _>(dweight, piece, partials.is_first, S::mul(dy, x_hat));
            }
            if let Some(dbias) = &mut partials.dbias {
                accumulate::<S, _>(dbias, piece, partials.is_first, dy);
            }
            let wdy = affine.times_weight::<S, _>(piece, dy);
            let dh = S::mul(S::sub(S::sub(wdy, mean_wdy), S::mul(x_hat, mean_wdy_xhat)), rstd);
            if self.x.weighs() && let Some(dweight) = &mut partials.dweight {
                accumulate::<S, _>(dweight, piece, partials.is_first, self.x.dweight::<S, _>(piece, dh));
            }
            let dx = self.x.pull::<S, _>(piece, dh, stores);
            let dx = match dresidual_out {
                Some(dresidual_out) => S::add(dx, dresidual_out.load::<S, _>(piece)),
                None => dx,
            };
            to.dx.data.part(dx_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            if STREAM && let Some(dresidual) = &mut to.dresidual {
                dresidual.data.part(dresidual_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            }
        });
    }
}

/// The partial sums of a block, while one of its rows is added.
struct PartialRow<'p> {
    dweight: Option<&'p mut [f32]>,
    dbias: Option<&'p mut [f32]>,
    /// Whether this is the first row of a block, which overwrites the sums.
    is_first: bool,
}

/// Adds to the sums, or starts them.
#[inline(always)]
fn accumulate<S: Simd, P: Piece>(sums: &mut [f32], piece: P, is_first: bool, terms: S::Lanes) {
    let sum = if is_first { terms } else { S::add(lanes::load::<S, f32, _>(sums, piece), terms) };
    lanes::store::<S, f32, _>(&mut Out::from(sums), piece, sum);
}
