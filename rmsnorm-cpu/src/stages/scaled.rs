//! What multiplies x before the norm, and dy of a gate after it: math.md, equations (19) to (21), (24) and (25).
//! These forms share one body for all dtypes (`kernel::any`).

use rmsnorm_spec::DType;

use super::backward::{PullAfter, PullBefore, RowAfter, RowBefore};
use super::forward::before::{Before, Source};
use super::forward::kept::whole;
use super::gate::{Gate, RowOfGate};
use super::{Call, Matrix, MatrixMut, Row, split};
use crate::lanes::{self, Any, In, Mix, Out, Piece, Simd, Stores};

/// A matrix times act(z), in f32, or times the weight, rounded.
#[derive(Clone, Copy)]
pub(crate) struct Scaled<'a> {
    pub(crate) of: Matrix<'a>,
    pub(crate) gate: Option<Gate<'a>>,
    /// The weight before the norm. (cols)
    pub(crate) weight: Option<In<'a, Any>>,
}

split!(['a] Scaled<'a> { of, gate; weight });

impl<'a> Scaled<'a> {
    /// With the groups of columns of each row as rows, if the call counts them so.
    pub(crate) fn in_column_groups(self, call: &Call) -> Self {
        let in_column_groups = |gate: Gate<'a>| Gate { z: gate.z.in_column_groups(call), ..gate };
        Scaled { of: self.of.in_column_groups(call), gate: self.gate.map(in_column_groups), ..self }
    }

    fn is_kept(&self) -> bool {
        self.gate.is_some() || self.weight.is_some()
    }

    #[inline(always)]
    fn row(&self, r: usize, ahead: usize, call: &Call) -> RowOfScaled<'a> {
        let Call { spec, dtypes, .. } = call;
        RowOfScaled {
            of: self.of.row(r, spec.cols, ahead),
            gate: self.gate.as_ref().map(|gate| gate.row(r, ahead, call)),
            weight: self.weight.map(|weight| weight.part(call.first_col(r), spec.cols)),
            weight_offset: spec.weight_offset,
            dtype: dtypes.activation,
        }
    }
}

/// A row of h, or of dy times act(z).
pub(crate) struct RowOfScaled<'r> {
    of: Row<'r, Any>,
    gate: Option<RowOfGate<'r>>,
    weight: Option<In<'r, Any>>,
    weight_offset: f32,
    /// The dtype of x, as the call states it.
    dtype: DType,
}

impl RowOfScaled<'_> {
    /// These values times the weight, unrounded, where there is one.
    #[inline(always)]
    fn weighted<S: Simd, P: Piece>(&self, piece: P, values: S::Lanes) -> S::Lanes {
        match self.weight {
            Some(weight) => S::mul(values, S::add(weight.load::<S, _>(piece), S::splat(self.weight_offset))),
            None => values,
        }
    }

    /// The row times these values of act(z), which count where there is a gate.
    #[inline(always)]
    fn times<S: Simd, P: Piece>(&self, piece: P, act: S::Lanes) -> S::Lanes {
        let values = self.of.load::<S, _>(piece);
        let values = if self.gate.is_some() { S::mul(values, act) } else { values };
        if self.weight.is_none() {
            return values;
        }
        lanes::round_through::<S>(self.dtype, self.weighted::<S, _>(piece, values))
    }

    /// act(z) and its slope. Without a gate: 1 and 0.
    #[inline(always)]
    fn activated<S: Simd, P: Piece>(&self, piece: P) -> [S::Lanes; 2] {
        match self.gate {
            Some(gate) => gate.activated::<S, _>(piece),
            None => [S::splat(1.0), S::splat(0.0)],
        }
    }
}

impl Source for RowOfScaled<'_> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.times::<S, _>(piece, self.activated::<S, _>(piece)[0])
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
        if let Some(gate) = self.gate {
            gate.prefetch::<S, _>(piece);
        }
    }
}

impl Before for Scaled<'_> {
    type Row<'r, M: Mix, const RESIDUAL: bool>
        = RowOfScaled<'r>
    where
        Self: 'r;

    fn is_kept(&self) -> bool {
        Scaled::is_kept(self)
    }

    #[inline(always)]
    fn row<M: Mix, const RESIDUAL: bool>(&mut self, r: usize, ahead: usize, call: &Call) -> RowOfScaled<'_> {
        Scaled::row(self, r, ahead, call)
    }
}

/// Either slot of backward: dy of a gate after the norm, or x of what comes before it, and the gradient of the gate.
pub(crate) struct Pull<'a> {
    pub(crate) of: Scaled<'a>,
    pub(crate) dgate: Option<MatrixMut<'a>>,
}

split!(['a] Pull<'a> { of, dgate; });

impl Pull<'_> {
    #[inline(always)]
    fn row<'r>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r> {
        RowOfPull {
            of: self.of.row(r, 1, call),
            dgate: self.dgate.as_mut().map(|dgate| dgate.row_of(r, call.spec.cols)),
            kept,
        }
    }
}

/// Room for act(z) and its slope, of a row that fits.
pub(crate) type Kept<'k> = [&'k mut [f32]; 2];

/// A row of a slot of backward.
pub(crate) struct RowOfPull<'r> {
    of: RowOfScaled<'r>,
    dgate: Option<Out<'r, Any>>,
    kept: Option<Kept<'r>>,
}

impl RowOfPull<'_> {
    /// act(z) and its slope, after the first visit.
    #[inline(always)]
    fn activated<S: Simd, P: Piece>(&self, piece: P) -> [S::Lanes; 2] {
        match &self.kept {
            Some([act, slope]) => {
                let piece = whole(piece);
                [lanes::load::<S, f32, _>(act, piece), lanes::load::<S, f32, _>(slope, piece)]
            }
            None => self.of.activated::<S, _>(piece),
        }
    }

    /// The gradient of `values`, which were multiplied with act(z), from the gradient of the
    /// product. Stores that of the gate: equations (20) and (21).
    #[inline(always)]
    fn pulled<S: Simd, P: Piece>(
        &mut self,
        piece: P,
        values: S::Lanes,
        gradient: S::Lanes,
        stores: Stores<'_>,
    ) -> S::Lanes {
        if self.of.gate.is_none() {
            return gradient;
        }
        let [act, slope] = self.activated::<S, _>(piece);
        if let Some(dgate) = &mut self.dgate {
            dgate.store_or_stream::<S, _>(piece, S::mul(S::mul(gradient, values), slope), stores);
        }
        S::mul(gradient, act)
    }
}

impl Source for RowOfPull<'_> {
    const IS_LONG: bool = true;

    #[inline(always)]
    fn first<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        if let Some([kept_act, kept_slope]) = &mut self.kept {
            let [act, slope] = self.of.activated::<S, _>(piece);
            lanes::store::<S, f32, _>(&mut Out::from(&mut **kept_act), whole(piece), act);
            lanes::store::<S, f32, _>(&mut Out::from(&mut **kept_slope), whole(piece), slope);
        }
        self.h::<S, _>(piece)
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        self.of.times::<S, _>(piece, self.activated::<S, _>(piece)[0])
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
    }
}

impl RowAfter for RowOfPull<'_> {
    #[inline(always)]
    fn needs_result(&self) -> bool {
        self.of.gate.is_some()
    }

    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, result: S::Lanes, stores: Stores<'_>) -> S::Lanes {
        let dy = self.of.of.load::<S, _>(piece);
        self.pulled::<S, _>(piece, result, dy, stores)
    }
}

impl RowBefore for RowOfPull<'_> {
    #[inline(always)]
    fn weighs(&self) -> bool {
        self.of.weight.is_some()
    }

    #[inline(always)]
    fn dweight<S: Simd, P: Piece>(&self, piece: P, dh: S::Lanes) -> S::Lanes {
        S::mul(dh, self.of.of.load::<S, _>(piece))
    }

    #[inline(always)]
    fn pull<S: Simd, P: Piece>(&mut self, piece: P, dh: S::Lanes, stores: Stores<'_>) -> S::Lanes {
        let x = self.of.of.load::<S, _>(piece);
        let gradient = self.of.weighted::<S, _>(piece, dh);
        self.pulled::<S, _>(piece, x, gradient, stores)
    }
}

impl PullAfter for Pull<'_> {
    type Row<'r, M: Mix>
        = RowOfPull<'r>
    where
        Self: 'r;

    fn is_kept(&self) -> bool {
        self.of.gate.is_some()
    }

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r> {
        Pull::row(self, r, call, kept)
    }
}

impl PullBefore for Pull<'_> {
    type Row<'r, M: Mix>
        = RowOfPull<'r>
    where
        Self: 'r;

    fn is_kept(&self) -> bool {
        self.of.gate.is_some()
    }

    #[inline(always)]
    fn row<'r, M: Mix>(&'r mut self, r: usize, call: &Call, kept: Option<Kept<'r>>) -> RowOfPull<'r> {
        Pull::row(self, r, call, kept)
    }
}

#[cfg(test)]
mod tests;
