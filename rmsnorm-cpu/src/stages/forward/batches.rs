//! Forward of rows of 16-bit elements in batches. Such rows are limited by conversions. So each
//! element is converted once and kept as f32 on the stack, like weight and bias. The statistics of
//! a row are a sum of lanes, divisions and a root, each waiting for the previous one; the rows of a
//! batch wait together. The additions and their order are the same as for one row.

use std::mem::MaybeUninit;

use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, NormSpec};

use super::moments::{Deviations, Moments, center_of};
use super::{ForwardRows, Row, Statistics, rstd_of};
use crate::lanes::{self, Full, In, LANES, Numbers, Out, Piece, Simd, Stores};

/// The longest row of a batch, in elements. Its h, weight and bias fit on the stack.
pub(super) const MOST_COLS: usize = 4096;

/// The longest row without a residual.
const MOST_COLS_ALONE: usize = 1024;

/// The fewest rows for which converting weight and bias in advance pays.
const FEWEST_ROWS: usize = 8;

/// Elements of a batch of several rows. The L1 also has room for the rows being prefetched.
const ELEMENTS: usize = 2048;

/// The most rows of a batch.
const MOST_ROWS: usize = 16;

/// Elements from a kept row to the next: whole groups of lanes, for every start of the first group.
pub(super) const fn padded(cols: usize) -> usize {
    cols.next_multiple_of(LANES) + LANES
}

/// Uninitialized room for f32: one row, or a batch of shorter rows.
#[repr(align(64))]
pub(super) struct Room([MaybeUninit<f32>; padded(MOST_COLS)]);

const _: () = assert!(ELEMENTS + MOST_ROWS * (padded(1) - 1) <= padded(MOST_COLS));

impl Room {
    pub(super) const fn new() -> Self {
        Room([const { MaybeUninit::uninit() }; padded(MOST_COLS)])
    }

    /// `len` zeros.
    #[inline(always)]
    pub(super) fn zeros(&mut self, len: usize) -> &mut [f32] {
        Out::from(&mut self.0[..len]).filled(0.0)
    }
}

/// Weight plus offset, and bias, of every column, padded.
#[derive(Clone, Copy)]
struct Columns<'c> {
    weight: Option<&'c [f32]>,
    bias: Option<&'c [f32]>,
}

impl<T: Numbers, W: Numbers, R: Numbers> ForwardRows<'_, T, W, R> {
    /// Whether batches are faster than single rows, as measured (docs/internals/tried.md). With a 16-bit
    /// residual the sum is rounded once instead of two or three times. An f32 residual leaves
    /// little to convert.
    #[inline(always)]
    pub(super) fn is_for_batches<S: Simd>(&self, has_residual: bool) -> bool {
        let cols = self.spec.cols;
        let DTypes { activation, residual, .. } = self.dtypes;
        let is_short =
            if has_residual { R::dtype(residual) != DType::F32 && cols <= MOST_COLS } else { cols <= MOST_COLS_ALONE };
        S::IS_BATCHED && T::dtype(activation) != DType::F32 && self.rows >= FEWEST_ROWS && is_short
    }

    /// Normalizes every row.
    #[inline(always)]
    pub(super) fn run_in_batches<S: Simd, const RESIDUAL: bool>(&mut self, stores: Stores<'_>) {
        let NormSpec { norm, cols, eps, .. } = self.spec;
        let (most, stride) = ((ELEMENTS / cols.max(1)).clamp(1, MOST_ROWS), padded(cols));
        let (mut of_h, mut of_weight, mut of_bias) = (Room::new(), Room::new(), Room::new());
        let h = of_h.zeros(most * stride);
        let columns = Columns {
            weight: self.weight.map(|weight| kept::<S, W>(weight, self.spec.weight_offset, of_weight.zeros(stride))),
            bias: self.bias.map(|bias| kept::<S, W>(bias, -0.0, of_bias.zeros(stride))),
        };
        let (mut means, mut vars, mut sums) = ([0f32; MOST_ROWS], [0f32; MOST_ROWS], [[0f32; 2]; MOST_ROWS]);
        let count = cols as f32;
        let mut first = 0;
        while first < self.rows {
            let rows = most.min(self.rows - first);
            // Quotients and roots of all MOST_ROWS rows, so that they are computed in parallel.
            // Entries after the last row are never read.
            match norm {
                Norm::Rms => {
                    for i in 0..rows {
                        vars[i] = self.row(first + i).keep::<S, RESIDUAL, true>(&mut h[i * stride..][..stride]);
                    }
                    for var in &mut vars {
                        *var /= count;
                    }
                }
                Norm::Layer => {
                    for i in 0..rows {
                        means[i] = self.row(first + i).keep::<S, RESIDUAL, false>(&mut h[i * stride..][..stride]);
                    }
                    for mean in &mut means {
                        *mean /= count;
                    }
                    for i in 0..rows {
                        let row = OfKept { h: &h[i * stride..][..stride], cols };
                        means[i] = center_of::<S>(&row, means[i]);
                        sums[i] = row.about::<S>(means[i]);
                    }
                    let mut is_near = [true; MOST_ROWS];
                    for i in 0..MOST_ROWS {
                        let moments = Moments::about(means[i], sums[i], count);
                        (means[i], vars[i], is_near[i]) = (moments.mean, moments.var, moments.is_near);
                    }
                    for i in (0..rows).filter(|&i| !is_near[i]) {
                        let row = OfKept { h: &h[i * stride..][..stride], cols };
                        let moments = Moments::about(means[i], row.about::<S>(means[i]), count);
                        (means[i], vars[i]) = (moments.mean, moments.var);
                    }
                }
            }
            let mut rstds = vars;
            for rstd in &mut rstds {
                *rstd = rstd_of(*rstd, eps);
            }
            for i in 0..rows {
                let statistics = Statistics { mean: means[i], rstd: rstds[i] };
                self.row(first + i).write::<S, RESIDUAL>(&h[i * stride..][..stride], statistics, columns, rows, stores);
            }
            if let Some(mean) = &mut self.mean {
                mean.part(first, rows).copy_from_slice(&means[..rows]);
            }
            if let Some(rstd) = &mut self.rstd {
                rstd.part(first, rows).copy_from_slice(&rstds[..rows]);
            }
            first += rows;
        }
    }
}

impl<T: Numbers, W: Numbers, R: Numbers> Row<'_, T, W, R> {
    /// Equation (1) for every element, and the sum of the elements or of their squares.
    #[inline(always)]
    fn keep<S: Simd, const RESIDUAL: bool, const SQUARES: bool>(&self, kept: &mut [f32]) -> f32 {
        let mut kept = Out::from(kept);
        let [sum] = lanes::sum_up!(S, self.cols, piece => {
            let h = self.h::<S, _, RESIDUAL>(piece);
            lanes::store::<S, f32, _>(&mut kept, whole(piece), h);
            [if SQUARES { S::mul(h, h) } else { h }]
        });
        sum
    }

    /// Equations (5) and (6), and the stores of y and residual_out. Prefetches the row `ahead` rows
    /// later.
    #[inline(always)]
    fn write<S: Simd, const RESIDUAL: bool>(
        &mut self,
        h: &[f32],
        statistics: Statistics,
        columns: Columns<'_>,
        ahead: usize,
        stores: Stores<'_>,
    ) {
        let before_weight = self.cast_order == CastOrder::BeforeWeight;
        let (mean, rstd) = (S::splat(statistics.mean), S::splat(statistics.rstd));
        lanes::for_each_piece!(stores.head(&self.y), self.cols, piece => {
            self.prefetch::<S, _, RESIDUAL>(ahead, piece);
            let h = lanes::load::<S, f32, _>(h, whole(piece));
            let mut y = S::mul(S::sub(h, mean), rstd);
            if before_weight {
                y = lanes::round_through::<S>(T::dtype(self.dtypes.activation), y);
            }
            if let Some(weight) = columns.weight {
                y = S::mul(y, lanes::load::<S, f32, _>(weight, whole(piece)));
            }
            if let Some(bias) = columns.bias {
                y = S::add(y, lanes::load::<S, f32, _>(bias, whole(piece)));
            }
            self.y.store_or_stream::<S, _>(piece, y, stores);
            if RESIDUAL && let Some(residual_out) = &mut self.residual_out {
                residual_out.store_or_stream::<S, _>(piece, h, stores);
            }
        });
    }
}

/// The whole group of lanes at a piece, which exists in a padded row.
#[inline(always)]
pub(super) fn whole(piece: impl Piece) -> Full {
    Full { start: piece.start() }
}

/// The values of all columns in f32, plus `offset`.
#[inline(always)]
fn kept<'k, S: Simd, W: Numbers>(values: In<'_, W>, offset: f32, kept: &'k mut [f32]) -> &'k [f32] {
    let offset = S::splat(offset);
    lanes::for_each_piece!(0, values.len(), piece => {
        let value = S::add(values.load::<S, _>(piece), offset);
        lanes::store::<S, f32, _>(&mut Out::from(&mut *kept), whole(piece), value);
    });
    kept
}

/// The deviations of a kept, padded row.
struct OfKept<'k> {
    h: &'k [f32],
    cols: usize,
}

impl Deviations for OfKept<'_> {
    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn h<S: Simd, P: Piece>(&self, piece: P) -> S::Lanes {
        lanes::load::<S, f32, _>(self.h, whole(piece))
    }
}
