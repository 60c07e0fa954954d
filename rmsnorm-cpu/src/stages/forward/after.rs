//! The slot after the norm: y is stored, or added to a residual whose sum may be normalized again: math.md, equations
//! (13) and (14).

use rmsnorm_spec::DType;

use super::Saved;
use super::affine::{Affine, OfMix, Vectors};
use super::before::Source;
use super::kept::Kept;
use super::statistics::Statistics;
use crate::lanes::{self, Mix, Numbers, Out, Piece, Simd, Stores};
use crate::stages::{Call, Matrix, MatrixMut, Row, Split, split};

/// What becomes of normalized rows.
pub(crate) trait After: Split {
    /// Whether calls are so common that they have loops of their own without a residual, and in batches.
    const IS_COMMON: bool = false;

    /// Whether there is a next norm, for which rows that fit are kept on the stack.
    fn has_next(&self) -> bool {
        false
    }

    /// Finishes a row with these statistics, as [`Statistics::factors`] rounds them.
    fn put<S: Simd, M: Mix, H: Source, A: Affine>(&mut self, row: H, statistics: Statistics, visit: Visit<'_, A>);

    /// Finishes after the last row.
    fn finish<S: Simd>(&mut self) {}
}

/// The last visit of a row.
pub(crate) struct Visit<'v, A> {
    pub(crate) r: usize,
    pub(crate) call: &'v Call,
    pub(crate) affine: A,
    pub(crate) stores: Stores<'v>,
    /// Padded room for the input of the next norm, if it fits.
    pub(crate) kept: Option<&'v mut [f32]>,
}

/// Nothing: only the statistics are wanted.
impl After for () {
    #[inline(always)]
    fn put<S: Simd, M: Mix, H: Source, A: Affine>(&mut self, _: H, _: Statistics, _: Visit<'_, A>) {}
}

/// y is stored.
pub(crate) struct Store<'a> {
    pub(crate) y: MatrixMut<'a>,
}

split!(['a] Store<'a> { y; });

impl After for Store<'_> {
    const IS_COMMON: bool = true;

    #[inline(always)]
    fn put<S: Simd, M: Mix, H: Source, A: Affine>(&mut self, row: H, statistics: Statistics, visit: Visit<'_, A>) {
        let y = self.y.row_of::<M::T>(visit.r, visit.call.spec.cols);
        match !H::IS_LONG && visit.affine.is_plain() {
            true => store::<S, _, _, _, true>(row, y, statistics, visit),
            false => store::<S, _, _, _, false>(row, y, statistics, visit),
        }
    }
}

#[inline(always)]
fn store<S: Simd, T: Numbers, H: Source, A: Affine, const PLAIN: bool>(
    mut row: H,
    mut y: Out<'_, T>,
    statistics: Statistics,
    Visit { call, affine, stores, .. }: Visit<'_, A>,
) {
    lanes::for_each_piece!(stores.head(&y), call.spec.cols, piece => {
        row.prefetch::<S, _>(piece);
        affine.prefetch::<S, _>(piece);
        let h = row.h::<S, _>(piece);
        y.store_or_stream::<S, _>(piece, affine.value::<S, _, PLAIN>(piece, h, statistics), stores);
        row.put::<S, _>(piece, h, stores);
    });
}

/// y is added to a residual.
pub(crate) struct AddTo<'a> {
    pub(crate) residual: Matrix<'a>,
    /// The output of the sum.
    pub(crate) out: MatrixMut<'a>,
    /// The norm of the sum.
    pub(crate) next: Option<NextNorm<'a>>,
}

split!(['a] AddTo<'a> { residual, out, next; });

/// A norm whose input is the sum.
pub(crate) struct NextNorm<'a> {
    pub(crate) affine: Vectors<'a>,
    pub(crate) store: Store<'a>,
    pub(crate) saved: Saved<'a>,
}

split!(['a] NextNorm<'a> { store, saved; affine });

impl After for AddTo<'_> {
    fn has_next(&self) -> bool {
        self.next.is_some()
    }

    #[inline(always)]
    fn put<S: Simd, M: Mix, H: Source, A: Affine>(&mut self, row: H, statistics: Statistics, visit: Visit<'_, A>) {
        let Visit { r, call, affine, stores, kept } = visit;
        let cols = call.spec.cols;
        let (residual, out) = (self.residual.row::<M::R>(r, cols, 1), self.out.row_of::<M::R>(r, cols));
        let sum = Added { row, affine, statistics, residual, out, dtype: call.dtypes.residual };
        match (&mut self.next, kept) {
            (None, _) => match affine.is_plain() {
                true => sum.plain().put_all::<S>(cols, stores),
                false => sum.put_all::<S>(cols, stores),
            },
            (Some(next), Some(kept)) => match affine.is_plain() {
                true => next.put::<S, M>(Kept { of: sum.plain(), kept }, r, call, stores),
                false => next.put::<S, M>(Kept { of: sum, kept }, r, call, stores),
            },
            (Some(next), None) => next.put::<S, M>(sum, r, call, stores),
        }
    }
}

impl NextNorm<'_> {
    #[inline(always)]
    fn put<S: Simd, M: Mix>(&mut self, mut sum: impl Source, r: usize, call: &Call, stores: Stores<'_>) {
        let affine = OfMix::<M>::new(self.affine, call);
        let statistics = Statistics::of::<S, _>(&mut sum, call);
        let visit = Visit { r, call, affine, stores, kept: None };
        self.store.put::<S, M, _, _>(sum, statistics.factors(call), visit);
        self.saved.set(r, statistics);
    }
}

/// Equation (13): a row of the sum of the residual and the norm, rounded to the residual's dtype.
struct Added<'r, H, A, R: Numbers, const PLAIN: bool = false> {
    row: H,
    affine: A,
    statistics: Statistics,
    residual: Row<'r, R>,
    out: Out<'r, R>,
    /// The dtype of the sum, as the call states it.
    dtype: DType,
}

impl<'r, H: Source, A: Affine, R: Numbers> Added<'r, H, A, R> {
    /// The same row, if the norm is plain.
    #[inline(always)]
    fn plain(self) -> Added<'r, H, A, R, true> {
        let Added { row, affine, statistics, residual, out, dtype } = self;
        Added { row, affine, statistics, residual, out, dtype }
    }
}

impl<H: Source, A: Affine, R: Numbers, const PLAIN: bool> Added<'_, H, A, R, PLAIN> {
    /// Stores the sum.
    #[inline(always)]
    fn put_all<S: Simd>(mut self, cols: usize, stores: Stores<'_>) {
        lanes::for_each_piece!(self.stores(stores).head(&self.out), cols, piece => {
            self.prefetch::<S, _>(piece);
            let sum = self.h::<S, _>(piece);
            self.put::<S, _>(piece, sum, stores);
        });
    }

    /// A sum that overwrites the residual is already in the cache.
    #[inline(always)]
    fn stores<'f>(&self, stores: Stores<'f>) -> Stores<'f> {
        if self.out.overwrites(self.residual.elements) { stores.through_cache() } else { stores }
    }
}

impl<H: Source, A: Affine, R: Numbers, const PLAIN: bool> Source for Added<'_, H, A, R, PLAIN> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn first<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        lanes::within::<S, _>(piece, self.h::<S, _>(piece))
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let x = self.row.h::<S, _>(piece);
        let norm = self.affine.value::<S, _, PLAIN>(piece, x, self.statistics);
        lanes::round_through::<S>(R::dtype(self.dtype), S::add(self.residual.load::<S, _>(piece), norm))
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.row.prefetch::<S, _>(piece);
        self.residual.prefetch::<S, _>(piece);
    }

    #[inline(always)]
    fn put<S: Simd, P: Piece>(&mut self, piece: P, sum: S::Lanes, stores: Stores<'_>) {
        let stores = self.stores(stores);
        self.out.store_or_stream::<S, _>(piece, sum, stores);
    }
}
