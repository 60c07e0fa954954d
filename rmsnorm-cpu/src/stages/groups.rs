//! Whole rows whose columns are in groups, each with its own statistics.

use rmsnorm_spec::DType;

use super::backward::Given;
use super::forward::affine::Affine;
use super::forward::statistics::Statistics;
use super::gate::{AfterNorm, Gate, Times};
use super::{Call, Split};
use crate::lanes::{LANES, Mix, Piece, Simd};

/// The statistics of all groups (rows, groups), and the gate after the norm.
#[derive(Clone, Copy)]
pub(crate) struct Groups<'a> {
    pub(crate) all: Given<'a>,
    pub(crate) groups: usize,
    pub(crate) gate: Option<Gate<'a>>,
}

impl Split for Groups<'_> {
    fn split_at(self, row: usize) -> (Self, Self) {
        let (all, high_all) = self.all.split_at(row * self.groups);
        let (gate, high_gate) = self.gate.split_at(row);
        (Groups { all, gate, ..self }, Groups { all: high_all, gate: high_gate, groups: self.groups })
    }
}

impl AfterNorm for Groups<'_> {
    type Affine<'r, M: Mix, A: Affine>
        = Times<'r, InGroups<'r, A>>
    where
        Self: 'r;

    #[inline(always)]
    fn affine<M: Mix, A: Affine>(&self, affine: A, r: usize, call: &Call) -> Self::Affine<'_, M, A> {
        let cols = call.spec.cols / self.groups;
        let affine = InGroups { affine, all: self.all, first: r * self.groups, cols, call: *call };
        self.gate.affine::<M, _>(affine, r, call)
    }
}

/// The affine slot of a row, with the statistics of its groups.
#[derive(Clone, Copy)]
pub(crate) struct InGroups<'r, A> {
    affine: A,
    all: Given<'r>,
    /// The row's first group.
    first: usize,
    /// The columns of a group.
    cols: usize,
    call: Call,
}

impl<A> InGroups<'_, A> {
    #[inline(always)]
    fn factors(&self, group: usize) -> Statistics {
        self.all.of(self.first + group).factors(&self.call)
    }
}

impl<A: Affine> Affine for InGroups<'_, A> {
    type T = A::T;

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
    fn x_hat<S: Simd, P: Piece>(self, piece: P, h: S::Lanes, _: Statistics) -> S::Lanes {
        let (start, end) = (piece.start(), piece.start() + piece.len());
        let group = start / self.cols;
        if end <= (group + 1) * self.cols {
            return self.factors(group).x_hat::<S>(h);
        }
        let (mut mean, mut rstd) = ([0.0; LANES], [0.0; LANES]);
        for (col, (mean, rstd)) in (start..end).zip(mean.iter_mut().zip(&mut rstd)) {
            let of_col = self.factors(col / self.cols);
            (*mean, *rstd) = (of_col.mean, of_col.rstd);
        }
        S::mul(S::sub(h, S::load(&mean)), S::load(&rstd))
    }
}
