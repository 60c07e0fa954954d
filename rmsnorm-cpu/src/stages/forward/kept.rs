//! Rows that are kept on the stack in f32, so that later visits load them.

use std::mem::MaybeUninit;

use super::before::Source;
use crate::lanes::{self, Full, LANES, Out, Piece, Simd, Stores};

/// The longest kept row, in elements. It fits on the stack, also with the weight and bias of a batch.
pub(in crate::stages) const MOST_COLS: usize = 4096;

/// Elements from a kept row to the next: whole groups of lanes, for every start of the first group.
pub(in crate::stages) const fn padded(cols: usize) -> usize {
    cols.next_multiple_of(LANES) + LANES
}

/// Uninitialized room for f32: one row, or a batch of shorter rows.
#[repr(align(64))]
pub(in crate::stages) struct Room([MaybeUninit<f32>; padded(MOST_COLS)]);

impl Room {
    pub(in crate::stages) const fn new() -> Self {
        Room([const { MaybeUninit::uninit() }; padded(MOST_COLS)])
    }

    /// `len` zeros.
    #[inline(always)]
    pub(in crate::stages) fn zeros(&mut self, len: usize) -> &mut [f32] {
        Out::from(&mut self.0[..len]).filled(0.0)
    }
}

/// The whole group of lanes at a piece, which exists in a padded row.
#[inline(always)]
pub(in crate::stages) fn whole(piece: impl Piece) -> Full {
    Full { start: piece.start() }
}

/// A row that the first visit keeps, in padded room.
pub(in crate::stages) struct Kept<'k, H> {
    pub(in crate::stages) of: H,
    pub(in crate::stages) kept: &'k mut [f32],
}

impl<H: Source> Source for Kept<'_, H> {
    const IS_LONG: bool = H::IS_LONG;

    #[inline(always)]
    fn first<S: Simd, P: Piece>(&mut self, piece: P) -> S::Lanes {
        let h = self.of.first::<S, _>(piece);
        lanes::store::<S, f32, _>(&mut Out::from(&mut *self.kept), whole(piece), h);
        h
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        lanes::load::<S, f32, _>(self.kept, whole(piece))
    }

    #[inline(always)]
    fn prefetch<S: Simd, P: Piece>(&self, piece: P) {
        self.of.prefetch::<S, _>(piece);
    }

    #[inline(always)]
    fn put<S: Simd, P: Piece>(&mut self, piece: P, h: S::Lanes, stores: Stores<'_>) {
        self.of.put::<S, _>(piece, h, stores);
    }
}
