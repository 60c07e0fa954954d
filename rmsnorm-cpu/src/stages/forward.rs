//! Forward: docs/math.md, equations (1) to (6). A row is read from memory once; later visits find it in the cache.

use rmsnorm_spec::{CastOrder, Element, Norm, NormSpec};

use super::{Matrix, MatrixMut};
use crate::lanes::{self, Piece, Simd};

/// The rows of a forward call, or some of them.
pub(crate) struct ForwardRows<'a, T, W, R> {
    pub(crate) spec: NormSpec,
    pub(crate) rows: usize,
    pub(crate) streaming: bool,
    pub(crate) weight: Option<&'a [W]>,
    pub(crate) bias: Option<&'a [W]>,
    /// `None` in the in-place form: x is what y holds.
    pub(crate) x: Option<Matrix<'a, T>>,
    pub(crate) y: MatrixMut<'a, T>,
    pub(crate) residual: Residual<'a, R>,
    pub(crate) mean: Option<&'a mut [f32]>,
    pub(crate) rstd: Option<&'a mut [f32]>,
}

/// What is added to x before the norm, and where the sum goes.
pub(crate) enum Residual<'a, R> {
    /// Nothing is added.
    Absent,
    /// The sum is not kept.
    Read(Matrix<'a, R>),
    /// The sum is kept beside the residual.
    ReadWrite(Matrix<'a, R>, MatrixMut<'a, R>),
    /// The sum overwrites the residual.
    InPlace(MatrixMut<'a, R>),
}

impl<'a, R: Element> Residual<'a, R> {
    fn cast<F: Element>(self) -> Residual<'a, F> {
        match self {
            Residual::Absent => Residual::Absent,
            Residual::Read(residual) => Residual::Read(residual.cast()),
            Residual::ReadWrite(residual, out) => Residual::ReadWrite(residual.cast(), out.cast()),
            Residual::InPlace(residual) => Residual::InPlace(residual.cast()),
        }
    }

    fn split_at(self, row: usize) -> (Self, Self) {
        match self {
            Residual::Absent => (Residual::Absent, Residual::Absent),
            Residual::Read(residual) => {
                let (low, high) = residual.split_at(row);
                (Residual::Read(low), Residual::Read(high))
            }
            Residual::ReadWrite(residual, out) => {
                let (low, high) = residual.split_at(row);
                let (low_out, high_out) = out.split_at(row);
                (Residual::ReadWrite(low, low_out), Residual::ReadWrite(high, high_out))
            }
            Residual::InPlace(residual) => {
                let (low, high) = residual.split_at(row);
                (Residual::InPlace(low), Residual::InPlace(high))
            }
        }
    }

    #[inline(always)]
    fn row(&mut self, row: usize, cols: usize) -> ResidualRow<'_, R> {
        match self {
            Residual::Absent => ResidualRow { residual: None, residual_out: None },
            Residual::Read(residual) => ResidualRow { residual: Some(residual.row(row, cols)), residual_out: None },
            Residual::ReadWrite(residual, out) => {
                ResidualRow { residual: Some(residual.row(row, cols)), residual_out: Some(out.row(row, cols)) }
            }
            Residual::InPlace(out) => ResidualRow { residual: None, residual_out: Some(out.row(row, cols)) },
        }
    }
}

/// `residual: None, residual_out: Some` is the in-place form.
struct ResidualRow<'r, R> {
    residual: Option<&'r [R]>,
    residual_out: Option<&'r mut [R]>,
}

impl<'a, T: Element, W: Element, R: Element> ForwardRows<'a, T, W, R> {
    /// The same rows under other names of the element types.
    pub(crate) fn cast<U: Element, V: Element, Q: Element>(self) -> ForwardRows<'a, U, V, Q> {
        ForwardRows {
            spec: self.spec,
            rows: self.rows,
            streaming: self.streaming,
            weight: self.weight.map(bytemuck::cast_slice),
            bias: self.bias.map(bytemuck::cast_slice),
            x: self.x.map(Matrix::cast),
            y: self.y.cast(),
            residual: self.residual.cast(),
            mean: self.mean,
            rstd: self.rstd,
        }
    }

    /// The rows before `row`, and the others.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (x_low, x_high) = self.x.map(|x| x.split_at(row)).unzip();
        let (y_low, y_high) = self.y.split_at(row);
        let (residual_low, residual_high) = self.residual.split_at(row);
        let (mean_low, mean_high) = self.mean.map(|mean| mean.split_at_mut(row)).unzip();
        let (rstd_low, rstd_high) = self.rstd.map(|rstd| rstd.split_at_mut(row)).unzip();
        let low = ForwardRows {
            rows: row,
            x: x_low,
            y: y_low,
            residual: residual_low,
            mean: mean_low,
            rstd: rstd_low,
            ..self
        };
        let high = ForwardRows {
            rows: self.rows - row,
            x: x_high,
            y: y_high,
            residual: residual_high,
            mean: mean_high,
            rstd: rstd_high,
            ..self
        };
        (low, high)
    }

    /// Normalizes every row.
    #[inline(always)]
    pub(crate) fn run<S: Simd>(mut self) {
        let cols = self.spec.cols;
        for r in 0..self.rows {
            let residual = self.residual.row(r, cols);
            let mut row = Row::<T, W, R> {
                x: self.x.as_ref().map(|x| x.row(r, cols)),
                y: self.y.row(r, cols),
                residual: residual.residual,
                residual_out: residual.residual_out,
                weight: self.weight,
                bias: self.bias,
            };
            let statistics = match self.spec.norm {
                Norm::Rms => row.rms_statistics::<S>(self.spec.eps),
                Norm::Layer => row.layer_statistics::<S>(self.spec.eps),
            };
            if let Some(mean) = &mut self.mean {
                mean[r] = statistics.mean;
            }
            if let Some(rstd) = &mut self.rstd {
                rstd[r] = statistics.rstd;
            }
            row.normalize::<S>(&self.spec, statistics, self.streaming);
        }
        if self.streaming {
            S::fence();
        }
    }
}

#[derive(Clone, Copy)]
struct Statistics {
    mean: f32,
    rstd: f32,
}

struct Row<'r, T, W, R> {
    x: Option<&'r [T]>,
    y: &'r mut [T],
    residual: Option<&'r [R]>,
    residual_out: Option<&'r mut [R]>,
    weight: Option<&'r [W]>,
    bias: Option<&'r [W]>,
}

impl<T: Element, W: Element, R: Element> Row<'_, T, W, R> {
    /// Equations (3) and (4) without a mean.
    #[inline(always)]
    fn rms_statistics<S: Simd>(&mut self, eps: f32) -> Statistics {
        let mut squares = S::splat(0.0);
        lanes::for_each_piece!(0, self.y.len(), piece => {
            let h = self.first_visit::<S, _>(piece);
            squares = S::add(squares, S::mul(h, h));
        });
        Statistics { mean: 0.0, rstd: self.rstd::<S>(squares, eps) }
    }

    /// Equations (2) to (4). The variance is centred: a second visit, because `avg(h^2) - mean^2` cancels.
    #[inline(always)]
    fn layer_statistics<S: Simd>(&mut self, eps: f32) -> Statistics {
        let mut sums = S::splat(0.0);
        lanes::for_each_piece!(0, self.y.len(), piece => {
            sums = S::add(sums, self.first_visit::<S, _>(piece));
        });
        let mean = lanes::fold::<S>(sums) / self.y.len() as f32;

        let (mut squares, means) = (S::splat(0.0), S::splat(mean));
        lanes::for_each_piece!(0, self.y.len(), piece => {
            // Lanes beyond a short piece hold 0, which is not 0 once centred.
            let centred = lanes::within::<S, _>(piece, S::sub(self.h::<S, _>(piece), means));
            squares = S::add(squares, S::mul(centred, centred));
        });
        Statistics { mean, rstd: self.rstd::<S>(squares, eps) }
    }

    /// The square root and the division are correctly rounded: rstd is within 2 units of roundoff.
    #[inline(always)]
    fn rstd<S: Simd>(&self, squares: S::Lanes, eps: f32) -> f32 {
        let var = lanes::fold::<S>(squares) / self.y.len() as f32;
        1.0 / (var + eps).sqrt()
    }

    /// Equations (5) and (6).
    #[inline(always)]
    fn normalize<S: Simd>(&mut self, spec: &NormSpec, statistics: Statistics, streaming: bool) {
        let (mean, rstd) = (S::splat(statistics.mean), S::splat(statistics.rstd));
        let weight_offset = S::splat(spec.weight_offset);
        let head = if streaming { unaligned_head(self.y) } else { 0 };
        lanes::for_each_piece!(head, self.y.len(), piece => {
            let mut y = S::mul(S::sub(self.h::<S, _>(piece), mean), rstd);
            if spec.cast_order == CastOrder::BeforeWeight {
                y = lanes::round_through::<S, T>(y);
            }
            if let Some(weight) = self.weight {
                y = S::mul(y, S::add(lanes::load::<S, W, _>(weight, piece), weight_offset));
            }
            if let Some(bias) = self.bias {
                y = S::add(y, lanes::load::<S, W, _>(bias, piece));
            }
            if streaming {
                lanes::stream::<S, T, _>(self.y, piece, y);
            } else {
                lanes::store::<S, T, _>(self.y, piece, y);
            }
        });
    }

    /// Equation (1): adds the residual, rounds the sum to its dtype and keeps it if it has a place.
    #[inline(always)]
    fn first_visit<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        let x = self.x::<S, _>(piece);
        let residual = match (self.residual, &self.residual_out) {
            (Some(residual), _) => lanes::load::<S, R, _>(residual, piece),
            (None, Some(residual)) => lanes::load::<S, R, _>(residual, piece),
            (None, None) => return x,
        };
        let h = lanes::round_through::<S, R>(S::add(x, residual));
        if let Some(residual_out) = &mut self.residual_out {
            lanes::store::<S, R, _>(residual_out, piece, h);
        }
        h
    }

    /// What is normalized, after the first visit.
    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        if let Some(residual_out) = &self.residual_out {
            return lanes::load::<S, R, _>(residual_out, piece);
        }
        let x = self.x::<S, _>(piece);
        match self.residual {
            Some(residual) => lanes::round_through::<S, R>(S::add(x, lanes::load::<S, R, _>(residual, piece))),
            None => x,
        }
    }

    #[inline(always)]
    fn x<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        lanes::load::<S, T, _>(self.x.unwrap_or(self.y), piece)
    }
}

/// Elements before the first aligned one: full pieces can only stream from there.
#[inline(always)]
pub(super) fn unaligned_head<E>(row: &[E]) -> usize {
    row.as_ptr().align_offset(lanes::ALIGNMENT).min(row.len())
}
