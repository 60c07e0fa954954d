//! The weight before the norm: math.md, equations (24) and (25).

use rmsnorm_spec::DType;

use super::backward::{PullBefore, RowBefore};
use super::forward::before::{Before, Source};
use super::gate::Kept;
use super::{Call, Matrix, Row, split};
use crate::lanes::{self, Any, In, Mix, Numbers, Piece, Simd, Stores};

/// x, which the weight multiplies before the statistics.
#[derive(Clone, Copy)]
pub(crate) struct Weighted<'a> {
    pub(crate) of: Matrix<'a>,
    /// (cols)
    pub(crate) weight: In<'a, Any>,
}

split!(['a] Weighted<'a> { of; weight });

impl Weighted<'_> {
    /// The columns from `first` on.
    pub(crate) fn columns(self, first: usize) -> Self {
        Weighted { of: self.of.columns(first), weight: self.weight.tail(first) }
    }

    #[inline(always)]
    fn row<M: Mix>(&self, r: usize, ahead: usize, call: &Call) -> RowOfWeighted<'_, M> {
        let Call { spec, dtypes, .. } = call;
        let (of, weight) = (self.of.row(r, spec.cols, ahead), self.weight.known());
        RowOfWeighted { of, weight, weight_offset: spec.weight_offset, dtype: dtypes.activation }
    }
}

/// A row of h.
pub(crate) struct RowOfWeighted<'r, M: Mix> {
    of: Row<'r, M::T>,
    weight: In<'r, M::W>,
    weight_offset: f32,
    /// The dtype of x, as the call states it.
    dtype: DType,
}

impl<M: Mix> RowOfWeighted<'_, M> {
    #[inline(always)]
    fn weight<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        S::add(self.weight.load::<S, _>(piece), S::splat(self.weight_offset))
    }
}

impl<M: Mix> Source for RowOfWeighted<'_, M> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let product = S::mul(self.of.load::<S, _>(piece), self.weight::<S, _>(piece));
        lanes::round_through::<S>(M::T::dtype(self.dtype), product)
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
    }
}

impl<M: Mix> RowBefore for RowOfWeighted<'_, M> {
    const WEIGHS: bool = true;

    #[inline(always)]
    fn dweight<S: Simd, P: Piece>(&self, piece: P, dh: S::Lanes) -> S::Lanes {
        S::mul(dh, self.of.load::<S, _>(piece))
    }

    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, dh: S::Lanes, _: Stores<'_>) -> S::Lanes {
        S::mul(dh, self.weight::<S, _>(piece))
    }
}

impl Before for Weighted<'_> {
    const IS_KEPT: bool = true;
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = RowOfWeighted<'r, M>
    where
        Self: 'r;

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> RowOfWeighted<'_, M> {
        Weighted::row(self, r, ahead, call)
    }
}

impl PullBefore for Weighted<'_> {
    type Row<'r, M: Mix>
        = RowOfWeighted<'r, M>
    where
        Self: 'r;

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, _: Option<Kept<'r>>) -> RowOfWeighted<'r, M> {
        Weighted::row(self, r, 1, call)
    }
}
