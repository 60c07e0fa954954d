//! Backward: math.md, equations (7) to (12). A row is read once for mean_wdy and mean_wdy_xhat, and
//! again, from the cache, to write dx and to add the row to the partial sums of its block.
//! Meanwhile the next row is prefetched.

use rmsnorm_spec::{DTypes, Norm};

use super::forward::affine::{Affine, OfMix, Vectors};
use super::ranks::Found;
use super::{Call, Common, Matrix, MatrixMut, Row, Split, Stage, split};
use crate::lanes::{self, Fenced, Mix, Out, Piece, Simd, Stores};

/// The rows of a backward call, or some of them.
#[derive(Clone, Copy)]
pub(crate) struct BackwardRows<'a> {
    pub(crate) call: Call,
    pub(crate) dy: Matrix<'a>,
    pub(crate) affine: Vectors<'a>,
    pub(crate) x: Matrix<'a>,
    pub(crate) mean: Option<&'a [f32]>,
    pub(crate) rstd: &'a [f32],
    /// The numbers of all ranks, if columns are divided among ranks.
    pub(crate) found: Option<Found<'a>>,
}

split!(['a] BackwardRows<'a> { call, dy, x, mean, rstd, found; affine });

/// The blocks of a backward call, or some of them.
pub(crate) struct BackwardBlocks<'a> {
    pub(crate) rows: BackwardRows<'a>,
    pub(crate) block_rows: usize,
    pub(crate) dresidual_out: Option<Matrix<'a>>,
    pub(crate) dx: MatrixMut<'a>,
    pub(crate) dresidual: Option<MatrixMut<'a>>,
    /// One row of `cols` partial sums per block.
    pub(crate) dweight_partials: Option<&'a mut [f32]>,
    /// One row of `cols` partial sums per block.
    pub(crate) dbias_partials: Option<&'a mut [f32]>,
}

impl Split for BackwardBlocks<'_> {
    fn split_at(self, block: usize) -> (Self, Self) {
        let spec = self.rows.call.spec;
        let (row, partials) = ((block * self.block_rows).min(spec.rows), block * spec.cols);
        let (rows, high_rows) = self.rows.split_at(row);
        let (dresidual_out, high_dresidual_out) = self.dresidual_out.split_at(row);
        let (dx, high_dx) = self.dx.split_at(row);
        let (dresidual, high_dresidual) = self.dresidual.split_at(row);
        let (dweight_partials, high_dweight) = self.dweight_partials.map(|sums| sums.split_at_mut(partials)).unzip();
        let (dbias_partials, high_dbias) = self.dbias_partials.map(|sums| sums.split_at_mut(partials)).unzip();
        let high = BackwardBlocks {
            rows: high_rows,
            dresidual_out: high_dresidual_out,
            dx: high_dx,
            dresidual: high_dresidual,
            dweight_partials: high_dweight,
            dbias_partials: high_dbias,
            ..self
        };
        (BackwardBlocks { rows, dresidual_out, dx, dresidual, dweight_partials, dbias_partials, ..self }, high)
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
impl Stage for BackwardBlocks<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        // In locals: a store to an output may change the memory behind `self`, as far as the compiler knows.
        let (rows, block_rows, dresidual_out) = (self.rows, self.block_rows, self.dresidual_out);
        let mut to = To::<M> { dx: self.dx.known(), dresidual: self.dresidual.as_mut().map(MatrixMut::known) };
        let (mut dweight_partials, mut dbias_partials) = (self.dweight_partials.take(), self.dbias_partials.take());
        let cols = rows.call.spec.cols;
        let fenced = Fenced::<S>::new(rows.call.streaming);
        for r in 0..rows.call.spec.rows {
            let block = r / block_rows;
            let partials = Partials {
                dweight: dweight_partials.as_deref_mut().map(|sums| &mut sums[block * cols..][..cols]),
                dbias: dbias_partials.as_deref_mut().map(|sums| &mut sums[block * cols..][..cols]),
                is_first: r.is_multiple_of(block_rows),
            };
            let row = rows.row::<M>(r);
            let means = rows.means::<S, M>(r, &row);
            let dresidual_out = dresidual_out.as_ref().map(|dresidual_out| dresidual_out.row(r, cols, 1));
            // A separate loop: a branch inside the loop costs f32 a quarter of its speed.
            match to.dresidual {
                Some(_) => row.write::<S, true>(r, means, dresidual_out, &mut to, partials, fenced.stores()),
                None => row.write::<S, false>(r, means, dresidual_out, &mut to, partials, fenced.stores()),
            }
        }
    }
}

impl BackwardRows<'_> {
    #[inline(always)]
    pub(super) fn row<M: Mix>(&self, r: usize) -> RowOf<'_, M> {
        let (norm, cols) = (self.call.spec.norm, self.call.spec.cols);
        RowOf {
            norm,
            cols,
            dy: self.dy.row(r, cols, 1),
            x: self.x.row(r, cols, 1),
            affine: OfMix::new(self.affine, &self.call),
            mean: self.mean.map_or(0.0, |mean| mean[r]),
            rstd: self.rstd[r],
        }
    }

    /// Equations (8) and (9), or (18) with columns divided among ranks: mean_wdy and mean_wdy_xhat.
    #[inline(always)]
    fn means<S: Simd, M: Mix>(&self, r: usize, row: &RowOf<'_, M>) -> [f32; 2] {
        match self.found {
            Some(found) => found.mean_wdy_and_wdy_xhat(row.norm, r),
            None => {
                let ([wdy, products], cols) = (row.sums::<S>(), row.cols as f32);
                [wdy / cols, products / cols]
            }
        }
    }
}

/// A row of the inputs.
pub(super) struct RowOf<'r, M: Mix> {
    norm: Norm,
    cols: usize,
    dy: Row<'r, M::T>,
    x: Row<'r, M::R>,
    affine: OfMix<'r, M>,
    /// 0 for RMS norm: subtracting it costs less than a branch.
    mean: f32,
    rstd: f32,
}

impl<M: Mix> RowOf<'_, M> {
    /// The gradient of the affine's result. A slot after the norm turns y's gradient into it here.
    #[inline(always)]
    fn dy<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.dy.load::<S, _>(piece)
    }

    #[inline(always)]
    fn x_hat<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        S::mul(S::sub(self.x.load::<S, _>(piece), S::splat(self.mean)), S::splat(self.rstd))
    }

    /// The sums of `wdy` (0 for RMS norm), equation (7), and of `wdy * x_hat`: equation (17).
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&self) -> [f32; 2] {
        lanes::sum_up!(S, self.cols, piece => {
            let x_hat = self.x_hat::<S, _>(piece);
            let wdy = self.affine.times_weight::<S, _>(piece, self.dy::<S, _>(piece));
            // Lanes beyond a short piece have wdy = 0, but x_hat = -mean * rstd, which may be
            // infinite.
            let product = lanes::within::<S, _>(piece, S::mul(wdy, x_hat));
            [if self.norm == Norm::Layer { wdy } else { S::splat(0.0) }, product]
        })
    }

    /// Equations (10) to (12). `STREAM`: with `dresidual`.
    #[inline(always)]
    fn write<S: Simd, const STREAM: bool>(
        &self,
        r: usize,
        means: [f32; 2],
        dresidual_out: Option<Row<'_, M::R>>,
        to: &mut To<'_, M>,
        mut partials: Partials<'_>,
        stores: Stores<'_>,
    ) {
        let (mean_wdy, mean_wdy_xhat, rstd) = (S::splat(means[0]), S::splat(means[1]), S::splat(self.rstd));
        // Computed once per row: it takes a division if rows lie in groups.
        let dx_start = to.dx.rows.start(r);
        let dresidual_start = to.dresidual.as_ref().map_or(0, |dresidual| dresidual.rows.start(r));
        let cols = self.cols;
        lanes::for_each_counted_piece!(stores.head(&to.dx.row(r, cols)), cols, piece => {
            self.dy.prefetch::<S, _>(piece);
            self.x.prefetch::<S, _>(piece);
            let (dy, x_hat) = (self.dy::<S, _>(piece), self.x_hat::<S, _>(piece));
            if let Some(dweight) = &mut partials.dweight {
                accumulate::<S, _>(dweight, piece, partials.is_first, S::mul(dy, x_hat));
            }
            if let Some(dbias) = &mut partials.dbias {
                accumulate::<S, _>(dbias, piece, partials.is_first, dy);
            }
            let wdy = self.affine.times_weight::<S, _>(piece, dy);
            let dh = S::mul(S::sub(S::sub(wdy, mean_wdy), S::mul(x_hat, mean_wdy_xhat)), rstd);
            let dx = match dresidual_out {
                Some(dresidual_out) => S::add(dh, dresidual_out.load::<S, _>(piece)),
                None => dh,
            };
            to.dx.data.part(dx_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            if STREAM && let Some(dresidual) = &mut to.dresidual {
                dresidual.data.part(dresidual_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            }
        });
    }
}

/// The partial sums of a block.
struct Partials<'p> {
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
