//! Backward: math.md, equations (7) to (12). A row is read once for mean_wdy and mean_wdy_xhat, and
//! again, from the cache, to write dx and to add the row to the partial sums of its block.
//! Meanwhile the next row is prefetched.

use rmsnorm_spec::{DTypes, Norm, NormSpec};

use super::columns::Found;
use super::{Matrix, MatrixMut, Stage};
use crate::lanes::{self, Any, Elements, Fenced, In, Numbers, Out, Piece, Simd, Stores};

/// The blocks of a backward call, or some of them.
pub(crate) struct BackwardBlocks<'a, T: Elements = Any, W: Elements = Any, R: Elements = Any> {
    pub(crate) spec: NormSpec,
    pub(crate) dtypes: DTypes,
    pub(crate) rows: usize,
    pub(crate) block_rows: usize,
    pub(crate) streaming: bool,
    pub(crate) weight: Option<In<'a, W>>,
    pub(crate) dy: Matrix<'a, T>,
    pub(crate) x: Matrix<'a, R>,
    pub(crate) mean: Option<&'a [f32]>,
    pub(crate) rstd: &'a [f32],
    /// The numbers of all ranks, if columns are divided among ranks.
    pub(crate) found: Option<Found<'a>>,
    pub(crate) dresidual_out: Option<Matrix<'a, R>>,
    pub(crate) dx: MatrixMut<'a, T>,
    pub(crate) dresidual: Option<MatrixMut<'a, R>>,
    /// One row of `cols` partial sums per block.
    pub(crate) dweight_partials: Option<&'a mut [f32]>,
    /// One row of `cols` partial sums per block.
    pub(crate) dbias_partials: Option<&'a mut [f32]>,
}

impl BackwardBlocks<'_> {
    /// The same blocks of elements of these types, which must match their tags.
    #[inline(always)]
    pub(crate) fn known<T: Numbers, W: Numbers, R: Numbers>(&mut self) -> BackwardBlocks<'_, T, W, R> {
        BackwardBlocks {
            spec: self.spec,
            dtypes: self.dtypes,
            rows: self.rows,
            block_rows: self.block_rows,
            streaming: self.streaming,
            weight: self.weight.map(In::known),
            dy: self.dy.known(),
            x: self.x.known(),
            mean: self.mean,
            rstd: self.rstd,
            found: self.found,
            dresidual_out: self.dresidual_out.as_ref().map(Matrix::known),
            dx: self.dx.known(),
            dresidual: self.dresidual.as_mut().map(MatrixMut::known),
            dweight_partials: self.dweight_partials.as_deref_mut(),
            dbias_partials: self.dbias_partials.as_deref_mut(),
        }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> BackwardBlocks<'_, T, W, R> {
    /// The blocks before `block`, and the rest.
    pub(crate) fn split_at(self, block: usize) -> (Self, Self) {
        let row = (block * self.block_rows).min(self.rows);
        let partials = block * self.spec.cols;
        let (dy_low, dy_high) = self.dy.split_at(row);
        let (x_low, x_high) = self.x.split_at(row);
        let (mean_low, mean_high) = self.mean.map(|mean| mean.split_at(row)).unzip();
        let (rstd_low, rstd_high) = self.rstd.split_at(row);
        let (dresidual_low, dresidual_high) = self.dresidual_out.map(|d| d.split_at(row)).unzip();
        let (dx_low, dx_high) = self.dx.split_at(row);
        let (stream_low, stream_high) = self.dresidual.map(|d| d.split_at(row)).unzip();
        let (dweight_low, dweight_high) = self.dweight_partials.map(|p| p.split_at_mut(partials)).unzip();
        let (dbias_low, dbias_high) = self.dbias_partials.map(|p| p.split_at_mut(partials)).unzip();
        let low = BackwardBlocks {
            rows: row,
            dy: dy_low,
            x: x_low,
            mean: mean_low,
            rstd: rstd_low,
            dresidual_out: dresidual_low,
            dx: dx_low,
            dresidual: stream_low,
            dweight_partials: dweight_low,
            dbias_partials: dbias_low,
            ..self
        };
        let high = BackwardBlocks {
            rows: self.rows - row,
            dy: dy_high,
            x: x_high,
            mean: mean_high,
            rstd: rstd_high,
            found: self.found.map(|found| found.from(row)),
            dresidual_out: dresidual_high,
            dx: dx_high,
            dresidual: stream_high,
            dweight_partials: dweight_high,
            dbias_partials: dbias_high,
            ..self
        };
        (low, high)
    }
}

/// Writes dx of every row and the partial sums of every block.
impl<T: Numbers, W: Numbers, R: Numbers> Stage for BackwardBlocks<'_, T, W, R> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        let cols = self.spec.cols;
        let fenced = Fenced::<S>::new(self.streaming);
        let (mut dweight_partials, mut dbias_partials) = (self.dweight_partials.take(), self.dbias_partials.take());
        for r in 0..self.rows {
            let block = r / self.block_rows;
            let mut partials = Partials {
                dweight: dweight_partials.as_deref_mut().map(|sums| &mut sums[block * cols..][..cols]),
                dbias: dbias_partials.as_deref_mut().map(|sums| &mut sums[block * cols..][..cols]),
                is_first: r.is_multiple_of(self.block_rows),
            };
            let scalars = self.scalars::<S>(r);
            // A separate loop: a branch inside the loop costs f32 a quarter of its speed.
            match self.dresidual {
                Some(_) => self.write_row::<S, true>(r, scalars, &mut partials, fenced.stores()),
                None => self.write_row::<S, false>(r, scalars, &mut partials, fenced.stores()),
            }
        }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> BackwardBlocks<'_, T, W, R> {
    /// Equations (8) and (9), or (18) with columns divided among ranks.
    #[inline(always)]
    fn scalars<S: Simd>(&self, r: usize) -> Scalars {
        let (mean_wdy, mean_wdy_xhat) = match self.found {
            Some(found) => found.mean_wdy_and_wdy_xhat(self.spec.norm, r),
            None => {
                let (wdy, products) = self.sums::<S>(r);
                let cols = self.spec.cols as f32;
                (wdy / cols, products / cols)
            }
        };
        Scalars { mean_wdy, mean_wdy_xhat, ..self.unaveraged(r) }
    }

    #[inline(always)]
    fn unaveraged(&self, r: usize) -> Scalars {
        let mean = self.mean.map_or(0.0, |mean| mean[r]);
        Scalars { mean, rstd: self.rstd[r], mean_wdy: 0.0, mean_wdy_xhat: 0.0 }
    }

    /// The sums of `wdy` (0 for RMS norm) and of `wdy * x_hat`: equation (17).
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&self, r: usize) -> (f32, f32) {
        let cols = self.spec.cols;
        let (dy, x) = (self.dy.row(r, cols), self.x.row(r, cols));
        let scalars = self.unaveraged(r);
        let weight_offset = S::splat(self.spec.weight_offset);
        let [wdy, products] = lanes::sum_up!(S, cols, piece => {
            let x_hat = scalars.x_hat::<S>(x.load::<S, _>(piece));
            let wdy = self.wdy::<S, _>(dy.load::<S, _>(piece), weight_offset, piece);
            // Lanes beyond a short piece have wdy = 0, but x_hat = -mean * rstd, which may be
            // infinite.
            let product = lanes::within::<S, _>(piece, S::mul(wdy, x_hat));
            [if self.spec.norm == Norm::Layer { wdy } else { S::splat(0.0) }, product]
        });
        (wdy, products)
    }

    /// Equations (10) to (12). `STREAM`: with `dresidual`.
    #[inline(always)]
    fn write_row<S: Simd, const STREAM: bool>(
        &mut self,
        r: usize,
        scalars: Scalars,
        partials: &mut Partials<'_>,
        stores: Stores<'_>,
    ) {
        let cols = self.spec.cols;
        let (dy, dy_stride) = (self.dy.row(r, cols), self.dy.rows.row_stride);
        let (x, x_stride) = (self.x.row(r, cols), self.x.rows.row_stride);
        let dresidual_out = self.dresidual_out.as_ref().map(|dresidual_out| dresidual_out.row(r, cols));
        // Computed once per row: it takes a division if rows lie in groups.
        let dx_start = self.dx.rows.start(r);
        let dresidual_start = self.dresidual.as_ref().map_or(0, |dresidual| dresidual.rows.start(r));
        let weight_offset = S::splat(self.spec.weight_offset);
        let (mean_wdy, mean_wdy_xhat, rstd) =
            (S::splat(scalars.mean_wdy), S::splat(scalars.mean_wdy_xhat), S::splat(scalars.rstd));
        lanes::for_each_piece!(stores.head(&self.dx.row(r, cols)), cols, piece => {
            dy.prefetch::<S, _>(dy_stride, piece);
            x.prefetch::<S, _>(x_stride, piece);
            let dy = dy.load::<S, _>(piece);
            let x_hat = scalars.x_hat::<S>(x.load::<S, _>(piece));
            if let Some(dweight) = &mut partials.dweight {
                accumulate::<S, _>(dweight, piece, partials.is_first, S::mul(dy, x_hat));
            }
            if let Some(dbias) = &mut partials.dbias {
                accumulate::<S, _>(dbias, piece, partials.is_first, dy);
            }
            let wdy = self.wdy::<S, _>(dy, weight_offset, piece);
            let mut dx = S::mul(S::sub(S::sub(wdy, mean_wdy), S::mul(x_hat, mean_wdy_xhat)), rstd);
            if let Some(dresidual_out) = dresidual_out {
                dx = S::add(dx, dresidual_out.load::<S, _>(piece));
            }
            self.dx.data.part(dx_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            if STREAM && let Some(dresidual) = &mut self.dresidual {
                dresidual.data.part(dresidual_start, cols).store_or_stream::<S, _>(piece, dx, stores);
            }
        });
    }

    /// Equation (7).
    #[inline(always)]
    fn wdy<S: Simd, P: Piece>(&self, dy: S::Lanes, weight_offset: S::Lanes, piece: P) -> S::Lanes {
        match self.weight {
            Some(weight) => S::mul(dy, S::add(weight.load::<S, _>(piece), weight_offset)),
            None => dy,
        }
    }
}

#[derive(Clone, Copy)]
struct Scalars {
    /// 0 for RMS norm: subtracting it costs less than a branch.
    mean: f32,
    rstd: f32,
    mean_wdy: f32,
    mean_wdy_xhat: f32,
}

impl Scalars {
    #[inline(always)]
    fn x_hat<S: Simd>(&self, x: S::Lanes) -> S::Lanes {
        S::mul(S::sub(x, S::splat(self.mean)), S::splat(self.rstd))
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
