//! Weight and bias: math.md, equations (5) and (6).

use rmsnorm_spec::{CastOrder, DType, NormSpec};

use super::Statistics;
use crate::lanes::{self, Any, In, Mix, Numbers, Piece, Simd};
use crate::stages::Call;

/// The vectors of a norm. (cols)
#[derive(Clone, Copy)]
pub(crate) struct Vectors<'a> {
    pub(crate) weight: Option<In<'a, Any>>,
    pub(crate) bias: Option<In<'a, Any>>,
}

impl<'a> Vectors<'a> {
    /// Takes the weight out, if it comes before the norm.
    pub(crate) fn take_first(&mut self, spec: &NormSpec) -> Option<In<'a, Any>> {
        self.weight.take_if(|_| spec.cast_order.is_weight_first())
    }
}

/// The affine slot: what becomes of a normalized row.
pub(crate) trait Affine: Copy {
    /// The type of activations.
    type T: Numbers;

    /// Whether loops need no bias and no rounding before the weight.
    fn is_plain(self) -> bool;
    /// The dtype of activations, as the call states it.
    fn activation(self) -> DType;
    /// Whether values are rounded to it before the weight.
    fn rounds(self) -> bool;
    /// With the weight plus its offset, if there is a weight.
    fn times_weight<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes;
    /// With the bias, if there is one.
    fn plus_bias<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes;

    /// Prefetches the same piece of a later row.
    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(self, _: P) {}

    /// Equation (5).
    #[inline(always)]
    fn x_hat<S: Simd, P: Piece>(self, _: P, h: S::Lanes, statistics: Statistics) -> S::Lanes {
        statistics.x_hat::<S>(h)
    }

    /// Equations (5) and (6).
    #[inline(always)]
    fn value<S: Simd, P: Piece, const PLAIN: bool>(self, piece: P, h: S::Lanes, statistics: Statistics) -> S::Lanes {
        let mut y = self.x_hat::<S, _>(piece, h, statistics);
        if !PLAIN && self.rounds() {
            y = lanes::round_through::<S>(Self::T::dtype(self.activation()), y);
        }
        y = self.times_weight::<S, _>(piece, y);
        if PLAIN { y } else { self.plus_bias::<S, _>(piece, y) }
    }
}

/// Vectors of a mix of dtypes, read from memory. An absent one has no elements: the dtype of an `Option` would make its
/// test a part of the choice of the dtype, which then takes a jump through a table for each piece.
#[derive(Clone, Copy)]
pub(crate) struct OfMix<'a, M: Mix> {
    weight: In<'a, M::W>,
    bias: In<'a, M::W>,
    weight_offset: f32,
    cast_order: CastOrder,
    activation: DType,
}

impl<'a, M: Mix> OfMix<'a, M> {
    #[inline(always)]
    pub(crate) fn new(vectors: Vectors<'a>, call: &Call) -> Self {
        let none = In::none(M::W::tag(call.dtypes.weight));
        OfMix {
            weight: vectors.weight.map_or(none, In::known),
            bias: vectors.bias.map_or(none, In::known),
            weight_offset: call.spec.weight_offset,
            cast_order: call.spec.cast_order,
            activation: call.dtypes.activation,
        }
    }
}

impl<'a, M: Mix> OfMix<'a, M> {
    /// The columns of row `r`.
    #[inline(always)]
    pub(crate) fn of_row(self, r: usize, call: &Call) -> Self {
        if call.column_groups == 1 {
            return self;
        }
        let part =
            |vector: In<'a, M::W>| vector.part(call.first_col(r).min(vector.len()), call.spec.cols.min(vector.len()));
        OfMix { weight: part(self.weight), bias: part(self.bias), ..self }
    }

    #[inline(always)]
    pub(crate) fn weight_offset(self) -> f32 {
        self.weight_offset
    }

    #[inline(always)]
    pub(crate) fn with_weight_offset(self, weight_offset: f32) -> Self {
        OfMix { weight_offset, ..self }
    }
}

impl<M: Mix> Affine for OfMix<'_, M> {
    type T = M::T;

    /// Not for all dtypes, so that there is one loop.
    #[inline(always)]
    fn is_plain(self) -> bool {
        M::T::IS_KNOWN && self.bias.len() == 0 && self.cast_order == CastOrder::AtStore
    }

    #[inline(always)]
    fn activation(self) -> DType {
        self.activation
    }

    #[inline(always)]
    fn rounds(self) -> bool {
        self.cast_order.rounds_x_hat()
    }

    #[inline(always)]
    fn times_weight<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        if self.weight.len() == 0 {
            return values;
        }
        S::mul(values, S::add(self.weight.load::<S, _>(piece), S::splat(self.weight_offset)))
    }

    #[inline(always)]
    fn plus_bias<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        if self.bias.len() == 0 { values } else { S::add(values, self.bias.load::<S, _>(piece)) }
    }
}
