//! Backward: docs/math.md, equations (7) to (12). The rows of a block are taken in groups; a group is read once to find
//! c1 and c2 of each row, and again, from the cache, to write dx and to add its rows to the block's partial rows.

use rmsnorm_spec::{Element, Norm, NormSpec};

use super::forward::unaligned_head;
use super::{Matrix, MatrixMut};
use crate::lanes::{self, Piece, Simd};

/// The most rows of a group: they share one read and write of the partial rows.
pub(crate) const GROUP_ROWS: usize = 4;

/// The blocks of a backward call, or some of them.
pub(crate) struct BackwardBlocks<'a, T, W, R> {
    pub(crate) spec: NormSpec,
    pub(crate) rows: usize,
    pub(crate) block_rows: usize,
    pub(crate) group_rows: usize,
    pub(crate) streaming: bool,
    pub(crate) weight: Option<&'a [W]>,
    pub(crate) dy: Matrix<'a, T>,
    pub(crate) x: Matrix<'a, R>,
    pub(crate) mean: Option<&'a [f32]>,
    pub(crate) rstd: &'a [f32],
    pub(crate) dresidual_out: Option<Matrix<'a, R>>,
    pub(crate) dx: MatrixMut<'a, T>,
    /// One row of `cols` partial sums per block.
    pub(crate) dweight_partials: Option<&'a mut [f32]>,
    /// One row of `cols` partial sums per block.
    pub(crate) dbias_partials: Option<&'a mut [f32]>,
}

impl<'a, T: Element, W: Element, R: Element> BackwardBlocks<'a, T, W, R> {
    /// The same blocks under other names of the element types.
    pub(crate) fn cast<U: Element, V: Element, Q: Element>(self) -> BackwardBlocks<'a, U, V, Q> {
        BackwardBlocks {
            spec: self.spec,
            rows: self.rows,
            block_rows: self.block_rows,
            group_rows: self.group_rows,
            streaming: self.streaming,
            weight: self.weight.map(bytemuck::cast_slice),
            dy: self.dy.cast(),
            x: self.x.cast(),
            mean: self.mean,
            rstd: self.rstd,
            dresidual_out: self.dresidual_out.map(Matrix::cast),
            dx: self.dx.cast(),
            dweight_partials: self.dweight_partials,
            dbias_partials: self.dbias_partials,
        }
    }

    /// The blocks before `block`, and the others.
    pub(crate) fn split_at(self, block: usize) -> (Self, Self) {
        let row = (block * self.block_rows).min(self.rows);
        let partials = block * self.spec.cols;
        let (dy_low, dy_high) = self.dy.split_at(row);
        let (x_low, x_high) = self.x.split_at(row);
        let (mean_low, mean_high) = self.mean.map(|mean| mean.split_at(row)).unzip();
        let (rstd_low, rstd_high) = self.rstd.split_at(row);
        let (dresidual_low, dresidual_high) = self.dresidual_out.map(|d| d.split_at(row)).unzip();
        let (dx_low, dx_high) = self.dx.split_at(row);
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
            dresidual_out: dresidual_high,
            dx: dx_high,
            dweight_partials: dweight_high,
            dbias_partials: dbias_high,
            ..self
        };
        (low, high)
    }

    /// Writes dx of every row and the partial rows of every block.
    #[inline(always)]
    pub(crate) fn run<S: Simd>(mut self) {
        let cols = self.spec.cols;
        let (mut dweight_partials, mut dbias_partials) = (self.dweight_partials.take(), self.dbias_partials.take());
        for block in 0..self.rows.div_ceil(self.block_rows) {
            let first = block * self.block_rows;
            let end = (first + self.block_rows).min(self.rows);
            let mut partials = Partials {
                dweight: dweight_partials.as_deref_mut().map(|p| &mut p[block * cols..][..cols]),
                dbias: dbias_partials.as_deref_mut().map(|p| &mut p[block * cols..][..cols]),
            };
            for start in (first..end).step_by(self.group_rows) {
                let mut group = Group {
                    start,
                    len: (end - start).min(self.group_rows),
                    is_first: start == first,
                    scalars: [RowScalars::default(); GROUP_ROWS],
                };
                for i in 0..group.len {
                    group.scalars[i] = self.row_scalars::<S>(start + i);
                }
                self.write_group::<S>(&group, &mut partials);
            }
        }
        if self.streaming {
            S::fence();
        }
    }

    /// Equations (8) and (9).
    #[inline(always)]
    fn row_scalars<S: Simd>(&self, r: usize) -> RowScalars {
        let cols = self.spec.cols;
        let (dy, x) = (self.dy.row(r, cols), self.x.row(r, cols));
        let mut scalars =
            RowScalars { mean: self.mean.map_or(0.0, |mean| mean[r]), rstd: self.rstd[r], c1: 0.0, c2: 0.0 };
        let wdy = Wdy { weight: self.weight, weight_offset: S::splat(self.spec.weight_offset) };
        let (mut wdy_sums, mut product_sums) = (S::splat(0.0), S::splat(0.0));
        lanes::for_each_piece!(0, cols, piece => {
            let x_hat = scalars.x_hat::<S>(lanes::load::<S, R, _>(x, piece));
            let wdy = wdy.of::<S, _>(lanes::load::<S, T, _>(dy, piece), piece);
            // Lanes beyond a short piece have wdy = 0, but -mean * rstd for x_hat, which may be infinite.
            product_sums = S::add(product_sums, lanes::within::<S, _>(piece, S::mul(wdy, x_hat)));
            if self.spec.norm == Norm::Layer {
                wdy_sums = S::add(wdy_sums, wdy);
            }
        });
        scalars.c1 = lanes::fold::<S>(wdy_sums) / cols as f32;
        scalars.c2 = lanes::fold::<S>(product_sums) / cols as f32;
        scalars
    }

    /// Equations (10) to (12) for the rows of a group, piece by piece.
    #[inline(always)]
    fn write_group<S: Simd>(&mut self, group: &Group, partials: &mut Partials<'_>) {
        let (cols, streaming) = (self.spec.cols, self.streaming);
        let dy_rows: [&[T]; GROUP_ROWS] = self.dy.group(group.start, group.len, cols);
        let x_rows: [&[R]; GROUP_ROWS] = self.x.group(group.start, group.len, cols);
        let dresidual_rows: Option<[&[R]; GROUP_ROWS]> =
            self.dresidual_out.as_ref().map(|d| d.group(group.start, group.len, cols));
        let wdy = Wdy { weight: self.weight, weight_offset: S::splat(self.spec.weight_offset) };
        let dx_rows: [&mut [T]; GROUP_ROWS] = self.dx.group(group.start, group.len, cols);

        // One alignment serves all rows where the stride keeps it; the store looks at each piece.
        let head = if streaming { unaligned_head(dx_rows[0]) } else { 0 };
        lanes::for_each_piece!(head, cols, piece => {
            let mut dweight = partial::<S, _>(&partials.dweight, group.is_first, piece);
            let mut dbias = partial::<S, _>(&partials.dbias, group.is_first, piece);
            for (i, scalars) in group.scalars[..group.len].iter().enumerate() {
                let dy = lanes::load::<S, T, _>(dy_rows[i], piece);
                let x_hat = scalars.x_hat::<S>(lanes::load::<S, R, _>(x_rows[i], piece));
                dweight = S::add(dweight, S::mul(dy, x_hat));
                dbias = S::add(dbias, dy);

                let wdy = wdy.of::<S, _>(dy, piece);
                let projected = S::sub(S::sub(wdy, S::splat(scalars.c1)), S::mul(x_hat, S::splat(scalars.c2)));
                let mut dx = S::mul(projected, S::splat(scalars.rstd));
                if let Some(dresidual_rows) = &dresidual_rows {
                    dx = S::add(dx, lanes::load::<S, R, _>(dresidual_rows[i], piece));
                }
                if streaming {
                    lanes::stream::<S, T, _>(dx_rows[i], piece, dx);
                } else {
                    lanes::store::<S, T, _>(dx_rows[i], piece, dx);
                }
            }
            if let Some(partials) = &mut partials.dweight {
                lanes::store::<S, f32, _>(partials, piece, dweight);
            }
            if let Some(partials) = &mut partials.dbias {
                lanes::store::<S, f32, _>(partials, piece, dbias);
            }
        });
    }
}

/// Equation (7).
struct Wdy<'a, W, L> {
    weight: Option<&'a [W]>,
    weight_offset: L,
}

impl<W: Element, L: Copy> Wdy<'_, W, L> {
    #[inline(always)]
    fn of<S: Simd<Lanes = L>, P: Piece>(&self, dy: L, piece: P) -> L {
        match self.weight {
            Some(weight) => S::mul(dy, S::add(lanes::load::<S, W, _>(weight, piece), self.weight_offset)),
            None => dy,
        }
    }
}

/// Rows that share one pass over the partial rows.
struct Group {
    start: usize,
    len: usize,
    /// The first group of a block overwrites what the partial rows held.
    is_first: bool,
    scalars: [RowScalars; GROUP_ROWS],
}

#[derive(Clone, Copy, Default)]
struct RowScalars {
    mean: f32,
    rstd: f32,
    c1: f32,
    c2: f32,
}

impl RowScalars {
    #[inline(always)]
    fn x_hat<S: Simd>(&self, x: S::Lanes) -> S::Lanes {
        S::mul(S::sub(x, S::splat(self.mean)), S::splat(self.rstd))
    }
}

struct Partials<'p> {
    dweight: Option<&'p mut [f32]>,
    dbias: Option<&'p mut [f32]>,
}

#[inline(always)]
fn partial<S: Simd, P: Piece>(partials: &Option<&mut [f32]>, is_first: bool, piece: P) -> S::Lanes {
    match partials {
        Some(partials) if !is_first => lanes::load::<S, f32, _>(partials, piece),
        Some(_) | None => S::splat(0.0),
    }
}
