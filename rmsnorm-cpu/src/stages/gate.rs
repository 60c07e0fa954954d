//! Gates after and before the norm: math.md, equations (19) to (21). Values of 16 bits are rounded
//! only where the norm rounds: act(z) and its slope stay in f32.

use rmsnorm_spec::{Activation, DType};

use super::backward::{PullAfter, PullBefore, RowAfter, RowBefore};
use super::forward::affine::Affine;
use super::forward::after::{After, Visit};
use super::forward::before::{Before, Source};
use super::forward::kept::whole;
use super::forward::statistics::Statistics;
use super::{Call, Matrix, MatrixMut, Row, Split, split};
use crate::lanes::{self, Mix, Numbers, Out, Piece, Simd, Stores};

/// A gate and its activation.
#[derive(Clone, Copy)]
pub(crate) struct Gate<'a> {
    pub(crate) z: Matrix<'a>,
    pub(crate) activation: Activation,
}

split!(['a] Gate<'a> { z; activation });

impl<'a> Gate<'a> {
    /// The columns from `first` on.
    pub(crate) fn columns(self, first: usize) -> Self {
        Gate { z: self.z.columns(first), ..self }
    }

    #[inline(always)]
    fn row<T: Numbers>(&self, r: usize, ahead: usize, call: &Call) -> RowOfGate<'a, T> {
        RowOfGate { z: self.z.row(r, call.spec.cols, ahead), activation: self.activation }
    }
}

/// A row of a gate.
#[derive(Clone, Copy)]
pub(crate) struct RowOfGate<'r, T: Numbers> {
    z: Row<'r, T>,
    activation: Activation,
}

impl<T: Numbers> RowOfGate<'_, T> {
    /// act(z) and its slope.
    #[inline(always)]
    fn activated<S: Simd, P: Piece>(self, piece: P) -> [S::Lanes; 2] {
        lanes::activate::<S>(self.activation, self.z.load::<S, _>(piece))
    }
}

/// A matrix times act(z), in f32: h of a gate before the norm.
#[derive(Clone, Copy)]
pub(crate) struct Gated<'a> {
    pub(crate) of: Matrix<'a>,
    pub(crate) gate: Gate<'a>,
}

split!(['a] Gated<'a> { of, gate; });

impl Gated<'_> {
    /// The columns from `first` on.
    pub(crate) fn columns(self, first: usize) -> Self {
        Gated { of: self.of.columns(first), gate: self.gate.columns(first) }
    }
}

/// A row that is multiplied with its gate.
pub(crate) struct RowOfGated<'r, T: Numbers> {
    of: Row<'r, T>,
    gate: RowOfGate<'r, T>,
}

impl Before for Gated<'_> {
    const IS_KEPT: bool = true;
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = RowOfGated<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> RowOfGated<'_, M::T> {
        RowOfGated { of: self.of.row(r, call.spec.cols, ahead), gate: self.gate.row(r, ahead, call) }
    }
}

impl<T: Numbers> Source for RowOfGated<'_, T> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let [act, _] = self.gate.activated::<S, _>(piece);
        S::mul(self.of.load::<S, _>(piece), act)
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
        self.gate.z.prefetch::<S, _>(piece);
    }
}

/// A gate after the norm, or none.
pub(crate) trait AfterNorm: Split {
    /// The affine slot with the gate.
    type Affine<'r, M: Mix, A: Affine>: Affine
    where
        Self: 'r;

    fn affine<M: Mix, A: Affine>(&self, affine: A, r: usize, call: &Call) -> Self::Affine<'_, M, A>;
}

/// No gate.
impl AfterNorm for () {
    type Affine<'r, M: Mix, A: Affine> = A;

    #[inline(always)]
    fn affine<M: Mix, A: Affine>(&self, affine: A, _: usize, _: &Call) -> A {
        affine
    }
}

impl AfterNorm for Gate<'_> {
    type Affine<'r, M: Mix, A: Affine>
        = Times<'r, A, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn affine<M: Mix, A: Affine>(&self, affine: A, r: usize, call: &Call) -> Times<'_, A, M::T> {
        Times { affine, gate: self.row(r, 1, call), product: M::W::dtype(call.dtypes.weight) }
    }
}

/// A row of the affine slot times act(z).
#[derive(Clone, Copy)]
pub(crate) struct Times<'r, A, T: Numbers> {
    affine: A,
    gate: RowOfGate<'r, T>,
    /// The wider dtype of y and the weight, which the product with the weight is rounded to where
    /// x_hat is rounded.
    product: DType,
}

impl<A: Affine, T: Numbers> Affine for Times<'_, A, T> {
    type T = A::T;

    /// There is one loop.
    #[inline(always)]
    fn is_plain(self) -> bool {
        false
    }

    #[inline(always)]
    fn activation(self) -> DType {
        self.affine.activation()
    }

    #[inline(always)]
    fn rounds(self) -> bool {
        self.affine.rounds()
    }

    #[inline(always)]
    fn times_weight<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        self.affine.times_weight::<S, _>(piece, values)
    }

    #[inline(always)]
    fn plus_bias<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        self.affine.plus_bias::<S, _>(piece, values)
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(self, piece: P) {
        self.gate.z.prefetch::<S, _>(piece);
    }

    #[inline(always)]
    fn value<S: Simd, P: Piece, const PLAIN: bool>(self, piece: P, h: S::Lanes, statistics: Statistics) -> S::Lanes {
        let mut v = self.affine.value::<S, _, PLAIN>(piece, h, statistics);
        if self.rounds() {
            v = lanes::round_through::<S>(self.product, v);
        }
        let [act, _] = self.gate.activated::<S, _>(piece);
        S::mul(v, act)
    }
}

/// What becomes of normalized rows, after their gate.
pub(crate) struct Then<G, A> {
    pub(crate) gate: G,
    pub(crate) then: A,
}

split!([G: Split, A: Split] Then<G, A> { gate, then; });

impl<G: AfterNorm, A: After> After for Then<G, A> {
    #[inline(always)]
    fn put<S: Simd, M: Mix, H: Source, F: Affine>(&mut self, row: H, statistics: Statistics, visit: Visit<'_, F>) {
        let Visit { r, call, affine, stores, kept } = visit;
        let affine = self.gate.affine::<M, _>(affine, r, call);
        self.then.put::<S, M, _, _>(row, statistics, Visit { r, call, affine, stores, kept });
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self) {
        self.then.finish::<S>();
    }
}

/// Either slot of backward: dy of a gate after the norm, or x of a gate before it, and the gradient
/// of the gate.
pub(crate) struct Pull<'a> {
    pub(crate) gated: Gated<'a>,
    pub(crate) dgate: Option<MatrixMut<'a>>,
}

split!(['a] Pull<'a> { gated, dgate; });

impl Pull<'_> {
    #[inline(always)]
    fn row<'r, T: Numbers>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r, T> {
        let cols = call.spec.cols;
        RowOfPull {
            of: self.gated.of.row(r, cols, 1),
            gate: self.gated.gate.row(r, 1, call),
            dgate: self.dgate.as_mut().map(|dgate| dgate.row_of(r, cols)),
            kept,
        }
    }
}

/// Room for act(z) and its slope, of a row that fits.
pub(crate) type Kept<'k> = [&'k mut [f32]; 2];

/// A row of a slot of backward.
pub(crate) struct RowOfPull<'r, T: Numbers> {
    of: Row<'r, T>,
    gate: RowOfGate<'r, T>,
    dgate: Option<Out<'r, T>>,
    kept: Option<Kept<'r>>,
}

impl<T: Numbers> RowOfPull<'_, T> {
    /// act(z) and its slope, after the first visit.
    #[inline(always)]
    fn activated<S: Simd, P: Piece>(&self, piece: P) -> [S::Lanes; 2] {
        match &self.kept {
            Some([act, slope]) => {
                let piece = whole(piece);
                [lanes::load::<S, f32, _>(act, piece), lanes::load::<S, f32, _>(slope, piece)]
            }
            None => self.gate.activated::<S, _>(piece),
        }
    }

    /// The gradient of the values that were multiplied with act(z), from the gradient of the
    /// product. Stores that of the gate: equations (20) and (21).
    #[inline(always)]
    fn pulled<S: Simd, P: Piece>(
        &mut self,
        piece: P,
        values: S::Lanes,
        gradient: S::Lanes,
        stores: Stores<'_>,
    ) -> S::Lanes {
        let [act, slope] = self.activated::<S, _>(piece);
        if let Some(dgate) = &mut self.dgate {
            dgate.store_or_stream::<S, _>(piece, S::mul(S::mul(gradient, values), slope), stores);
        }
        S::mul(gradient, act)
    }
}

impl<T: Numbers> Source for RowOfPull<'_, T> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn first<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        let [act, slope] = self.gate.activated::<S, _>(piece);
        if let Some(kept) = &mut self.kept {
            lanes::store::<S, f32, _>(&mut Out::from(&mut *kept[0]), whole(piece), act);
            lanes::store::<S, f32, _>(&mut Out::from(&mut *kept[1]), whole(piece), slope);
        }
        S::mul(self.of.load::<S, _>(piece), act)
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        let [act, _] = self.activated::<S, _>(piece);
        S::mul(self.of.load::<S, _>(piece), act)
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
        self.gate.z.prefetch::<S, _>(piece);
    }
}

impl<T: Numbers> RowAfter for RowOfPull<'_, T> {
    const NEEDS_RESULT: bool = true;

    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, result: S::Lanes, stores: Stores<'_>) -> S::Lanes {
        let dy = self.of.load::<S, _>(piece);
        self.pulled::<S, _>(piece, result, dy, stores)
    }
}

impl<T: Numbers> RowBefore for RowOfPull<'_, T> {
    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, dh: S::Lanes, stores: Stores<'_>) -> S::Lanes {
        let x = self.of.load::<S, _>(piece);
        self.pulled::<S, _>(piece, x, dh, stores)
    }
}

impl PullAfter for Pull<'_> {
    const IS_KEPT: bool = true;
    type Row<'r, M: Mix>
        = RowOfPull<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r, M::T> {
        Pull::row(self, r, call, kept)
    }
}

impl PullBefore for Pull<'_> {
    const IS_KEPT: bool = true;
    type Row<'r, M: Mix>
        = RowOfPull<'r, M::T>
    where
        Self: 'r;

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r, M::T> {
        Pull::row(self, r, call, kept)
    }
}

#[cfg(test)]
mod tests;
