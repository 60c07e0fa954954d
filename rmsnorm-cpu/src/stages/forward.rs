//! Forward: math.md, equations (1) to (6). A row is read from memory once; later visits find it in
//! the cache. While it is written, the next row is prefetched. Rows of 16-bit elements go through
//! `batches`.

use rmsnorm_spec::{CastOrder, DTypes, Norm, NormSpec};

use self::moments::{Deviations, Moments};
use super::{Matrix, MatrixMut, Stage};
use crate::lanes::{self, Any, Elements, Fenced, In, Numbers, Out, Piece, Simd, Stores};

pub(crate) mod after;
mod batches;
pub(super) mod moments;
pub(crate) mod parts;

/// The rows of a forward call, or some of them.
pub(crate) struct ForwardRows<'a, T: Elements = Any, W: Elements = Any, R: Elements = Any> {
    pub(crate) spec: NormSpec,
    pub(crate) dtypes: DTypes,
    pub(crate) rows: usize,
    pub(crate) streaming: bool,
    pub(crate) weight: Option<In<'a, W>>,
    pub(crate) bias: Option<In<'a, W>>,
    /// `None` in place: x is then the content of y, which was made from a slice of values.
    pub(crate) x: Option<Matrix<'a, T>>,
    /// `None` only if the result becomes codes and y is not stored.
    pub(crate) y: Option<MatrixMut<'a, T>>,
    pub(crate) residual: Residual<'a, R>,
    pub(crate) mean: Option<Out<'a, f32>>,
    pub(crate) rstd: Option<Out<'a, f32>>,
}

/// The residual, which is added to x before the norm or to the norm, and the destination of the
/// sum.
pub(crate) enum Residual<'a, R: Elements = Any> {
    /// Nothing is added.
    Absent,
    /// The sum is not stored.
    Read(Matrix<'a, R>),
    /// The sum is stored separately.
    ReadWrite(Matrix<'a, R>, MatrixMut<'a, R>),
    /// The sum overwrites the residual, a slice of values.
    InPlace(MatrixMut<'a, R>),
}

impl Residual<'_> {
    #[inline(always)]
    fn known<R: Numbers>(&mut self) -> Residual<'_, R> {
        match self {
            Residual::Absent => Residual::Absent,
            Residual::Read(residual) => Residual::Read(residual.known()),
            Residual::ReadWrite(residual, out) => Residual::ReadWrite(residual.known(), out.known()),
            Residual::InPlace(residual) => Residual::InPlace(residual.known()),
        }
    }
}

impl<R: Elements> Residual<'_, R> {
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

    /// A row of the input and of the output. In place the input is `None`.
    #[inline(always)]
    fn row(&mut self, row: usize, cols: usize) -> (Option<In<'_, R>>, Option<Out<'_, R>>) {
        match self {
            Residual::Absent => (None, None),
            Residual::Read(residual) => (Some(residual.row(row, cols)), None),
            Residual::ReadWrite(residual, out) => (Some(residual.row(row, cols)), Some(out.row(row, cols))),
            Residual::InPlace(out) => (None, Some(out.row(row, cols))),
        }
    }

    #[inline(always)]
    fn row_stride(&self) -> usize {
        match self {
            Residual::Absent => 0,
            Residual::Read(residual) | Residual::ReadWrite(residual, _) => residual.rows.row_stride,
            Residual::InPlace(out) => out.rows.row_stride,
        }
    }
}

impl ForwardRows<'_> {
    /// The same rows of elements of these types, which must match their tags.
    #[inline(always)]
    pub(crate) fn known<T: Numbers, W: Numbers, R: Numbers>(&mut self) -> ForwardRows<'_, T, W, R> {
        ForwardRows {
            spec: self.spec,
            dtypes: self.dtypes,
            rows: self.rows,
            streaming: self.streaming,
            weight: self.weight.map(In::known),
            bias: self.bias.map(In::known),
            x: self.x.as_ref().map(Matrix::known),
            y: self.y.as_mut().map(MatrixMut::known),
            residual: self.residual.known(),
            mean: self.mean.as_mut().map(Out::reborrow),
            rstd: self.rstd.as_mut().map(Out::reborrow),
        }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> ForwardRows<'_, T, W, R> {
    /// The same inputs, for a stage that writes no outputs.
    pub(crate) fn of_inputs(&self) -> Self {
        let residual = match &self.residual {
            Residual::Read(residual) => Residual::Read(*residual),
            Residual::Absent | Residual::ReadWrite(..) | Residual::InPlace(_) => Residual::Absent,
        };
        ForwardRows { y: None, residual, mean: None, rstd: None, ..*self }
    }

    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (x_low, x_high) = self.x.map(|x| x.split_at(row)).unzip();
        let (y_low, y_high) = self.y.map(|y| y.split_at(row)).unzip();
        let (residual_low, residual_high) = self.residual.split_at(row);
        let (mean_low, mean_high) = self.mean.map(|mean| mean.split_at(row)).unzip();
        let (rstd_low, rstd_high) = self.rstd.map(|rstd| rstd.split_at(row)).unzip();
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
}

/// Normalizes every row.
impl<T: Numbers, W: Numbers, R: Numbers> Stage for ForwardRows<'_, T, W, R> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        // Absent tensors are tested here and not in the loops, for the most common calls.
        let has_residual = !matches!(self.residual, Residual::Absent);
        let is_plain = self.bias.is_none() && self.spec.cast_order == CastOrder::AtStore;
        let fenced = Fenced::<S>::new(self.streaming);
        let stores = fenced.stores();
        if self.is_for_batches::<S>(has_residual) {
            return match has_residual {
                false => self.run_in_batches::<S, false>(stores),
                true => self.run_in_batches::<S, true>(stores),
            };
        }
        for r in 0..self.rows {
            let statistics = match (has_residual, is_plain) {
                (false, true) => self.run_row::<S, false, true>(r, stores),
                (false, false) => self.run_row::<S, false, false>(r, stores),
                (true, true) => self.run_row::<S, true, true>(r, stores),
                (true, false) => self.run_row::<S, true, false>(r, stores),
            };
            if let Some(mean) = &mut self.mean {
                mean.set(r, statistics.mean);
            }
            if let Some(rstd) = &mut self.rstd {
                rstd.set(r, statistics.rstd);
            }
        }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> ForwardRows<'_, T, W, R> {
    /// Equation (15) for RMS norm.
    #[inline(always)]
    pub(super) fn sum_of_squares<S: Simd>(&mut self, r: usize) -> f32 {
        self.row(r).sum_of_squares::<S, true>()
    }

    /// Equation (15) for layer norm: the sum, and the sums of the deviations from its average and
    /// of their squares.
    #[inline(always)]
    pub(super) fn sums_about_mean<S: Simd>(&mut self, r: usize) -> [f32; 3] {
        let row = self.row(r);
        moments::sums_about_mean::<S>(&OfRow::<_, true>(&row), row.sum_of_row::<S, true>())
    }

    /// Writes a row with given statistics.
    #[inline(always)]
    pub(super) fn normalize_by<S: Simd>(&mut self, r: usize, mean: f32, rstd: f32, stores: Stores<'_>) {
        let statistics = Statistics { mean, rstd };
        self.row(r).normalize::<S, true, false>(statistics, stores);
        after::save(&mut self.mean, &mut self.rstd, r, statistics);
    }

    #[inline(always)]
    fn run_row<S: Simd, const RESIDUAL: bool, const PLAIN: bool>(
        &mut self,
        r: usize,
        stores: Stores<'_>,
    ) -> Statistics {
        let (norm, eps) = (self.spec.norm, self.spec.eps);
        let mut row = self.row(r);
        let statistics = row.statistics::<S, RESIDUAL>(norm, eps);
        row.normalize::<S, RESIDUAL, PLAIN>(statistics, stores);
        statistics
    }

    #[inline(always)]
    pub(super) fn row(&mut self, r: usize) -> Row<'_, T, W, R> {
        let cols = self.spec.cols;
        let residual_stride = self.residual.row_stride();
        let (residual, residual_out) = self.residual.row(r, cols);
        let y_stride = self.y.as_ref().map_or(0, |y| y.rows.row_stride);
        Row {
            cols,
            dtypes: self.dtypes,
            x: self.x.as_ref().map(|x| x.row(r, cols)),
            x_stride: self.x.as_ref().map_or(y_stride, |x| x.rows.row_stride),
            y: self.y.as_mut().map_or(Out::none(T::tag(self.dtypes.activation)), |y| y.row(r, cols)),
            residual,
            residual_stride,
            residual_out,
            weight: self.weight,
            weight_offset: self.spec.weight_offset,
            bias: self.bias,
            cast_order: self.spec.cast_order,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Statistics {
    /// 0 for RMS norm: subtracting it costs less than a branch.
    pub(super) mean: f32,
    pub(super) rstd: f32,
}

pub(super) struct Row<'r, T: Elements = Any, W: Elements = Any, R: Elements = Any> {
    pub(super) cols: usize,
    pub(super) dtypes: DTypes,
    x: Option<In<'r, T>>,
    x_stride: usize,
    /// Empty if y is not stored.
    pub(super) y: Out<'r, T>,
    residual: Option<In<'r, R>>,
    residual_stride: usize,
    pub(super) residual_out: Option<Out<'r, R>>,
    weight: Option<In<'r, W>>,
    weight_offset: f32,
    bias: Option<In<'r, W>>,
    cast_order: CastOrder,
}

impl<T: Numbers, W: Numbers, R: Numbers> Row<'_, T, W, R> {
    /// x, or in place the content of y.
    #[inline(always)]
    fn x(&self) -> In<'_, T> {
        lanes::input_or_overwritten(self.x, &self.y)
    }

    /// The residual, or in place the content of residual_out.
    #[inline(always)]
    fn residual(&self) -> Option<In<'_, R>> {
        self.residual_out.as_ref().map(|out| lanes::input_or_overwritten(self.residual, out)).or(self.residual)
    }

    #[inline(always)]
    fn sum_of_squares<S: Simd, const RESIDUAL: bool>(&self) -> f32 {
        let [squares] = lanes::sum_up!(S, self.cols, piece => {
            let h = self.h::<S, _, RESIDUAL>(piece);
            [S::mul(h, h)]
        });
        squares
    }

    #[inline(always)]
    fn sum_of_row<S: Simd, const RESIDUAL: bool>(&self) -> f32 {
        let [sum] = lanes::sum_up!(S, self.cols, piece => { [self.h::<S, _, RESIDUAL>(piece)] });
        sum
    }

    /// Equations (2) to (4).
    #[inline(always)]
    pub(super) fn statistics<S: Simd, const RESIDUAL: bool>(&self, norm: Norm, eps: f32) -> Statistics {
        match norm {
            Norm::Rms => {
                Statistics { mean: 0.0, rstd: rstd_of(self.sum_of_squares::<S, RESIDUAL>() / self.cols as f32, eps) }
            }
            Norm::Layer => {
                Moments::of::<S>(&OfRow::<_, RESIDUAL>(self), self.sum_of_row::<S, RESIDUAL>()).statistics(eps)
            }
        }
    }

    /// Equations (5) and (6).
    #[inline(always)]
    pub(super) fn value<S: Simd, P: Piece, const PLAIN: bool>(
        &self,
        piece: P,
        h: S::Lanes,
        statistics: Statistics,
    ) -> S::Lanes {
        let (mean, rstd) = (S::splat(statistics.mean), S::splat(statistics.rstd));
        let mut y = S::mul(S::sub(h, mean), rstd);
        if !PLAIN && self.cast_order == CastOrder::BeforeWeight {
            y = lanes::round_through::<S>(T::dtype(self.dtypes.activation), y);
        }
        if let Some(weight) = self.weight {
            y = S::mul(y, S::add(weight.load::<S, _>(piece), S::splat(self.weight_offset)));
        }
        if !PLAIN && let Some(bias) = self.bias {
            y = S::add(y, bias.load::<S, _>(piece));
        }
        y
    }

    /// Stores y and residual_out.
    #[inline(always)]
    fn normalize<S: Simd, const RESIDUAL: bool, const PLAIN: bool>(
        &mut self,
        statistics: Statistics,
        stores: Stores<'_>,
    ) {
        lanes::for_each_piece!(stores.head(&self.y), self.cols, piece => {
            self.prefetch_next::<S, _, RESIDUAL>(piece);
            let h = self.h::<S, _, RESIDUAL>(piece);
            let y = self.value::<S, _, PLAIN>(piece, h, statistics);
            self.y.store_or_stream::<S, _>(piece, y, stores);
            if RESIDUAL && let Some(residual_out) = &mut self.residual_out {
                residual_out.store_or_stream::<S, _>(piece, h, stores);
            }
        });
    }

    /// Equation (1): h, the input of the norm. It is computed on each visit, from the cache. If the
    /// first visit stored it, the store could not bypass the cache.
    #[inline(always)]
    pub(super) fn h<S: Simd, P: Piece, const RESIDUAL: bool>(&self, piece: P) -> S::Lanes {
        let x = self.x().load::<S, _>(piece);
        match self.residual() {
            Some(residual) if RESIDUAL => {
                lanes::round_through::<S>(R::dtype(self.dtypes.residual), S::add(x, residual.load::<S, _>(piece)))
            }
            Some(_) | None => x,
        }
    }

    #[inline(always)]
    pub(super) fn prefetch_next<S: Simd, P: Piece, const RESIDUAL: bool>(&self, piece: P) {
        self.prefetch::<S, P, RESIDUAL>(1, piece);
    }

    /// Prefetches the same piece of the row `ahead` rows later.
    #[inline(always)]
    fn prefetch<S: Simd, P: Piece, const RESIDUAL: bool>(&self, ahead: usize, piece: P) {
        self.x().prefetch::<S, _>(ahead.wrapping_mul(self.x_stride), piece);
        if RESIDUAL && let Some(residual) = self.residual() {
            residual.prefetch::<S, _>(ahead.wrapping_mul(self.residual_stride), piece);
        }
    }
}

/// The deviations of a row's h.
struct OfRow<R, const RESIDUAL: bool>(R);

impl<T: Numbers, W: Numbers, R: Numbers, const RESIDUAL: bool> Deviations for OfRow<&Row<'_, T, W, R>, RESIDUAL> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.0.cols
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.0.h::<S, _, RESIDUAL>(piece)
    }
}

/// Equation (4). The square root and the division are correctly rounded, so rstd is within 2 units
/// of roundoff.
#[inline(always)]
fn rstd_of(var: f32, eps: f32) -> f32 {
    1.0 / (var + eps).sqrt()
}
