//! Forward in batches: rows of 16-bit elements, and short rows of f32. The statistics of a row are a
//! sum of lanes, divisions and a root, each waiting for the previous one; the rows of a batch wait
//! together. Rows of 16-bit elements are limited by conversions, so each element is converted once and
//! kept as f32 on the stack, like weight and bias. The additions and their order are the same as for
//! one row.

use std::marker::PhantomData;

use rmsnorm_spec::{DType, DTypes, Norm};

use super::Rows;
use super::affine::{Affine, Vectors};
use super::after::{After, Visit};
use super::before::Before;
use super::kept::{Kept, MOST_COLS, Room, padded, whole};
use super::statistics::{Moments, Statistic, Statistics, center_of, rstd_of, sum_of, sums_about};
use crate::lanes::{self, Any, In, Mix, Numbers, Out, Piece, Simd, Stores};
use crate::stages::Call;

/// The longest row without a residual.
const MOST_COLS_ALONE: usize = 1024;

/// The longest row of f32 without a residual.
const MOST_COLS_F32: usize = 128;

/// The fewest rows for which converting weight and bias in advance pays.
const FEWEST_ROWS: usize = 8;

/// Elements of a batch of several rows. The L1 also has room for the rows being prefetched.
const ELEMENTS: usize = 2048;

/// The most rows of a batch.
const MOST_ROWS: usize = 16;

const _: () = assert!(ELEMENTS + MOST_ROWS * (padded(1) - 1) <= padded(MOST_COLS));

/// Weight plus offset, and bias, of every column from the row's first on, padded and in f32.
#[derive(Clone, Copy)]
struct KeptVectors<'c, T> {
    weight: Option<&'c [f32]>,
    bias: Option<&'c [f32]>,
    activation: DType,
    rounds: bool,
    values: PhantomData<T>,
}

impl<'c, T: Copy> KeptVectors<'c, T> {
    /// The columns of row `r`.
    #[inline(always)]
    fn of_row(self, r: usize, call: &Call) -> Self {
        let from = |vector: &'c [f32]| &vector[call.first_col(r)..];
        KeptVectors { weight: self.weight.map(from), bias: self.bias.map(from), ..self }
    }
}

impl<T: Numbers> Affine for KeptVectors<'_, T> {
    type T = T;

    #[inline(always)]
    fn is_plain(self) -> bool {
        false
    }

    #[inline(always)]
    fn activation(self) -> DType {
        self.activation
    }

    #[inline(always)]
    fn rounds(self) -> bool {
        self.rounds
    }

    #[inline(always)]
    fn times_weight<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        match self.weight {
            Some(weight) => S::mul(values, lanes::load::<S, f32, _>(weight, whole(piece))),
            None => values,
        }
    }

    #[inline(always)]
    fn plus_bias<S: Simd, P: Piece>(self, piece: P, values: S::Lanes) -> S::Lanes {
        match self.bias {
            Some(bias) => S::add(values, lanes::load::<S, f32, _>(bias, whole(piece))),
            None => values,
        }
    }
}

impl<B: Before, A: After, F: Statistic> Rows<'_, B, A, F> {
    /// Whether batches are faster than single rows, as measured (docs/internals/tried.md). With a 16-bit
    /// residual the sum is rounded once instead of two or three times. An f32 residual leaves
    /// little to convert.
    #[inline(always)]
    pub(super) fn is_for_batches<S: Simd, M: Mix, const RESIDUAL: bool>(&self) -> bool {
        let cols = self.call.spec.cols;
        let DTypes { activation, residual, .. } = self.call.dtypes;
        let is_short =
            if RESIDUAL { M::R::dtype(residual) != DType::F32 && cols <= MOST_COLS } else { cols <= MOST_COLS_ALONE };
        let is_known = M::T::IS_KNOWN && (M::T::dtype(activation) != DType::F32 || cols <= MOST_COLS_F32);
        let is_kept = self.call.column_groups * cols <= MOST_COLS;
        S::IS_BATCHED && is_known && is_kept && self.call.spec.rows >= FEWEST_ROWS && is_short
    }

    /// Computes every row.
    #[inline(always)]
    pub(super) fn run_in_batches<S: Simd, M: Mix, const RESIDUAL: bool>(&mut self, stores: Stores<'_>) {
        let (call, cols) = (&self.call, self.call.spec.cols);
        let (most, stride) = ((ELEMENTS / cols.max(1)).clamp(1, MOST_ROWS), padded(cols));
        let (mut of_h, mut of_weight, mut of_bias) = (Room::new(), Room::new(), Room::new());
        let h = of_h.zeros(most * stride);
        let (Vectors { weight, bias }, len) = (self.affine, padded(call.column_groups * cols));
        let vectors = KeptVectors {
            weight: weight.map(|w| kept::<S, M::W>(w, call.spec.weight_offset, of_weight.zeros(len))),
            bias: bias.map(|bias| kept::<S, M::W>(bias, -0.0, of_bias.zeros(len))),
            activation: call.dtypes.activation,
            rounds: call.spec.cast_order.rounds_x_hat(),
            values: PhantomData::<M::T>,
        };
        let (mut means, mut vars, mut sums) = ([0f32; MOST_ROWS], [0f32; MOST_ROWS], [[0f32; 2]; MOST_ROWS]);
        let count = call.spec.norm.divisor(cols) as f32;
        let mut first = 0;
        while first < call.spec.rows {
            let rows = most.min(call.spec.rows - first);
            macro_rules! row {
                ($i:expr) => {
                    Kept {
                        of: self.before.row::<M, RESIDUAL>(first + $i, rows, call),
                        kept: &mut h[$i * stride..][..stride],
                    }
                };
            }
            // Quotients and roots of all MOST_ROWS rows, so that they are computed in parallel.
            // Entries after the last row are never read.
            match call.spec.norm {
                Norm::Rms | Norm::L2 | Norm::L2Clamped => {
                    for i in 0..rows {
                        vars[i] = sum_of::<S, _>(&mut row!(i), cols, true);
                    }
                    for var in &mut vars {
                        *var /= count;
                    }
                }
                Norm::Layer => {
                    for i in 0..rows {
                        means[i] = sum_of::<S, _>(&mut row!(i), cols, false);
                    }
                    for mean in &mut means {
                        *mean /= count;
                    }
                    for i in 0..rows {
                        let row = row!(i);
                        means[i] = center_of::<S>(&row, cols, means[i]);
                        sums[i] = sums_about::<S>(&row, cols, means[i]);
                    }
                    let mut is_near = [true; MOST_ROWS];
                    for i in 0..MOST_ROWS {
                        let moments = Moments::about(means[i], sums[i], count);
                        (means[i], vars[i], is_near[i]) = (moments.mean, moments.var, moments.is_near);
                    }
                    for i in (0..rows).filter(|&i| !is_near[i]) {
                        let moments = Moments::about(means[i], sums_about::<S>(&row!(i), cols, means[i]), count);
                        (means[i], vars[i]) = (moments.mean, moments.var);
                    }
                }
            }
            let mut rstds = vars;
            for rstd in &mut rstds {
                *rstd = rstd_of(call.spec.norm, *rstd, call.spec.eps);
            }
            for i in 0..rows {
                let (r, statistics) = (first + i, Statistics { mean: means[i], rstd: rstds[i] });
                let visit = Visit { r, call, affine: vectors.of_row(r, call), stores, kept: None };
                self.after.put::<S, M, _, _>(row!(i), statistics.factors(call), visit);
                self.saved.set(r, statistics);
            }
            first += rows;
        }
    }
}

/// The values of all columns in f32, plus `offset`.
#[inline(always)]
fn kept<'k, S: Simd, W: Numbers>(values: In<'_, Any>, offset: f32, kept: &'k mut [f32]) -> &'k [f32] {
    let (values, offset) = (values.known::<W>(), S::splat(offset));
    lanes::for_each_piece!(0, values.len(), piece => {
        let value = S::add(values.load::<S, _>(piece), offset);
        lanes::store::<S, f32, _>(&mut Out::from(&mut *kept), whole(piece), value);
    });
    kept
}
