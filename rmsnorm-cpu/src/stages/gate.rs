//! A gate, and its slot after the norm: math.md, equations (19) to (21). Values of 16 bits are rounded only where the
//! norm rounds: act(z) and its slope stay in f32.

use rmsnorm_spec::{Activation, DType, Slot};

use super::forward::affine::Affine;
use super::forward::after::{After, Visit};
use super::forward::before::Source;
use super::forward::statistics::Statistics;
use super::{Call, Matrix, Row, Split, split};
use crate::lanes::{self, Any, Mix, Piece, Simd, Work};

/// A gate and its activation.
#[derive(Clone, Copy)]
pub(crate) struct Gate<'a> {
    pub(crate) z: Matrix<'a>,
    pub(crate) activation: Activation,
}

split!(['a] Gate<'a> { z; activation });

/// The gate before the norm, and that after it.
pub(crate) fn slots(gate: Option<(Slot, Gate<'_>)>) -> [Option<Gate<'_>>; 2] {
    match gate {
        None => [None, None],
        Some((Slot::Before, gate)) => [Some(gate), None],
        Some((Slot::After, gate)) => [None, Some(gate)],
    }
}

impl<'a> Gate<'a> {
    #[inline(always)]
    pub(super) fn row(&self, r: usize, ahead: usize, call: &Call) -> RowOfGate<'a> {
        RowOfGate { z: self.z.row(r, call.spec.cols, ahead), activation: self.activation }
    }
}

/// A row of a gate.
#[derive(Clone, Copy)]
pub(crate) struct RowOfGate<'r> {
    z: Row<'r, Any>,
    activation: Activation,
}

impl RowOfGate<'_> {
    /// act(z) and its slope.
    #[inline(always)]
    pub(super) fn activated<S: Simd, P: Piece>(self, piece: P) -> [S::Lanes; 2] {
        lanes::of_piece::<S, P, _>(Activated { gate: self, piece })
    }

    /// Prefetches the same piece of a later row.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd, P: Piece>(self, piece: P) {
        self.z.prefetch::<S, _>(piece);
    }
}

/// A piece of act(z) and of its slope.
struct Activated<'r, P> {
    gate: RowOfGate<'r>,
    piece: P,
}

impl<P: Piece> Work for Activated<'_, P> {
    type Output<S: Simd> = [S::Lanes; 2];

    #[inline(always)]
    fn run<S: Simd>(self) -> [S::Lanes; 2] {
        let RowOfGate { z, activation } = self.gate;
        lanes::activate::<S>(activation, z.load::<S, _>(self.piece))
    }
}

/// What multiplies rows after the norm.
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

/// A gate, where there is one.
impl AfterNorm for Option<Gate<'_>> {
    type Affine<'r, M: Mix, A: Affine>
        = Times<'r, A>
    where
        Self: 'r;

    #[inline(always)]
    fn affine<M: Mix, A: Affine>(&self, affine: A, r: usize, call: &Call) -> Times<'_, A> {
        Times { affine, gate: self.as_ref().map(|gate| gate.row(r, 1, call)), product: call.dtypes.weight }
    }
}

/// A row of the affine slot times act(z), where there is a gate.
#[derive(Clone, Copy)]
pub(crate) struct Times<'r, A> {
    affine: A,
    gate: Option<RowOfGate<'r>>,
    /// The wider dtype of y and the weight, which the product with the weight is rounded to where
    /// x_hat is rounded.
    product: DType,
}

impl<A: Affine> Affine for Times<'_, A> {
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
        if let Some(gate) = self.gate {
            gate.prefetch::<S, _>(piece);
        }
    }

    #[inline(always)]
    fn value<S: Simd, P: Piece, const PLAIN: bool>(self, piece: P, h: S::Lanes, statistics: Statistics) -> S::Lanes {
        let v = self.affine.value::<S, _, PLAIN>(piece, h, statistics);
        let Some(gate) = self.gate else { return v };
        let v = if self.rounds() { lanes::round_through::<S>(self.product, v) } else { v };
        let [act, _] = gate.activated::<S, _>(piece);
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
