//! The slot before the statistics: math.md, equations (1) and (1').

use rmsnorm_spec::DType;

use crate::lanes::{self, In, Mix, Numbers, Out, Piece, Simd, Stores};
use crate::stages::{Call, Matrix, MatrixMut, Row, Section, Split, split};

/// The norm's input h: x, or what is made of it.
pub(crate) trait Before: Split {
    /// A row of h. Without `RESIDUAL` the residual is ignored.
    type Row<'r, M: Mix, const RESIDUAL: bool>: Source
    where
        Self: 'r;

    /// While the row is written, the one `ahead` rows later is prefetched.
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> Self::Row<'_, M, RESIDUAL>;

    /// Whether rows that fit are kept on the stack.
    fn is_kept(&self) -> bool {
        false
    }

    fn has_residual(&self) -> bool {
        false
    }
}

/// A row of h, which can be visited again.
pub(crate) trait Source {
    /// Whether h takes so much code that loops over the row are written once for all norms: each takes time to compile
    /// for every mix of dtypes and instruction set.
    const IS_LONG: bool = false;
    /// Whether h is rounded to the dtype of the sum, also without a residual.
    const IS_ROUNDED: bool = false;

    /// h on the first visit. Lanes beyond a short piece are zeros.
    #[inline(always)]
    fn first<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        self.h::<S, _>(piece)
    }

    /// h on a later visit. Lanes beyond a short piece are undefined.
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes;

    /// Prefetches the same piece of a later row.
    fn prefetch<S: Simd, P: Piece>(&self, piece: P);

    /// Stores h, if the call has a tensor for it.
    #[inline(always)]
    fn put<S: Simd, P: Piece>(&mut self, _: P, _: S::Lanes, _: Stores<'_>) {}
}

/// x.
impl Before for Matrix<'_> {
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = Row<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> Row<'_, M::T> {
        Matrix::row(self, r, call.spec.cols, ahead)
    }
}

impl<T: Numbers> Source for Row<'_, T> {
    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.load::<S, _>(piece)
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        Row::prefetch::<S, _>(*self, piece);
    }
}

/// The sum of several matrices, in f32. The parts of a row may be far apart.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// All rows of all parts. It is not split, because the last part of the first row may lie after the first part of the
    /// last row.
    pub(crate) x: Matrix<'a>,
    pub(crate) rows: Section,
    /// Number of parts.
    pub(crate) count: usize,
    /// Elements from one part to the next.
    pub(crate) stride: usize,
}

split!(['a] Parts<'a> { rows; x, count, stride });

impl Before for Parts<'_> {
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = RowOfParts<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> RowOfParts<'_, M::T> {
        let (row, cols) = (self.rows.first + r, call.spec.cols);
        let rest = self.x.data.known().tail(self.x.rows.start(row));
        RowOfParts { first: self.x.row(row, cols, ahead), rest, cols, count: self.count, stride: self.stride }
    }

    fn is_kept(&self) -> bool {
        true
    }
}

/// The parts of a row.
pub(crate) struct RowOfParts<'r, T: Numbers> {
    first: Row<'r, T>,
    /// The elements from the row's first element in the first part on.
    rest: In<'r, T>,
    cols: usize,
    count: usize,
    stride: usize,
}

impl<T: Numbers> Source for RowOfParts<'_, T> {
    const IS_LONG: bool = true;
    const IS_ROUNDED: bool = true;

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let mut sum = self.first.load::<S, _>(piece);
        for part in 1..self.count {
            sum = S::add(sum, self.rest.part(part * self.stride, self.cols).load::<S, _>(piece));
        }
        sum
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.first.prefetch::<S, _>(piece);
    }
}

/// The residual, which is added to x, and the output of the sum.
pub(crate) struct Summed<'a, X> {
    pub(crate) x: X,
    pub(crate) residual: Option<Matrix<'a>>,
    pub(crate) out: Option<MatrixMut<'a>>,
}

split!(['a, X: Split] Summed<'a, X> { x, residual, out; });

impl<X: Before> Before for Summed<'_, X> {
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = RowOfSum<'r, X::Row<'r, M, RESIDUAL>, M::R, RESIDUAL>
    where
        Self: 'r;

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> Self::Row<'_, M, RESIDUAL> {
        let cols = call.spec.cols;
        RowOfSum {
            x: self.x.row::<M, RESIDUAL>(r, ahead, call),
            residual: match &self.residual {
                Some(residual) => residual.row(r, cols, ahead),
                None => Row::none(M::R::tag(call.dtypes.residual)),
            },
            out: self.out.as_mut().map(|out| out.row_of(r, cols)),
            dtype: call.dtypes.residual,
        }
    }

    fn is_kept(&self) -> bool {
        self.x.is_kept()
    }

    fn has_residual(&self) -> bool {
        self.residual.is_some()
    }
}

/// A row of the sum, rounded to the residual's dtype. It is computed on each visit, from the cache. If the first visit
/// stored it, the store could not bypass the cache.
pub(crate) struct RowOfSum<'r, X, R: Numbers, const RESIDUAL: bool> {
    x: X,
    /// Without elements if it is absent.
    residual: Row<'r, R>,
    out: Option<Out<'r, R>>,
    /// The dtype of the sum, as the call states it.
    dtype: DType,
}

impl<X: Source, R: Numbers, const RESIDUAL: bool> Source for RowOfSum<'_, X, R, RESIDUAL> {
    const IS_LONG: bool = X::IS_LONG;

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let x = self.x.h::<S, _>(piece);
        let has_residual = RESIDUAL && self.residual.elements.len() > 0;
        let sum = if has_residual { S::add(x, self.residual.load::<S, _>(piece)) } else { x };
        if has_residual || X::IS_ROUNDED { lanes::round_through::<S>(R::dtype(self.dtype), sum) } else { sum }
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.x.prefetch::<S, _>(piece);
        if RESIDUAL && self.residual.elements.len() > 0 {
            self.residual.prefetch::<S, _>(piece);
        }
    }

    #[inline(always)]
    fn put<S: Simd, P: Piece>(&mut self, piece: P, h: S::Lanes, stores: Stores<'_>) {
        if RESIDUAL && let Some(out) = &mut self.out {
            out.store_or_stream::<S, _>(piece, h, stores);
        }
    }
}
