//! Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A row is read from memory
//! once, or twice if the tensor's scale must be computed first. Other visits find it in the cache
//! and compute v again, which is cheaper than keeping it. For blocks of few pieces v is kept, and
//! many scales are computed at a time.

use std::sync::atomic::{AtomicU32, Ordering};

use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, e8m0_value};

use super::forward::affine::Affine;
use super::forward::after::{After, Visit};
use super::forward::before::Source;
use super::forward::statistics::Statistics;
use super::{MatrixMut, Split, split};
use crate::lanes::{self, Full, LANES, Mix, Numbers, Out, Piece, Simd, Stores};

/// Pieces with values that wait for their scales together.
const BATCH: usize = 16;

/// Pieces of the widest set that is processed this way.
const SET_PIECES: usize = 4;

/// The slot after the norm: y becomes codes. Unlike in forward, absent tensors are tested in the loops: bodies are compiled
/// for every mix of dtypes and instruction set, and each contains all formats.
pub(crate) struct Codes<'a> {
    pub(crate) quant: QuantSpec,
    pub(crate) codes: MatrixMut<'a, u8>,
    pub(crate) scaling: Scaling<'a>,
    pub(crate) y: Option<MatrixMut<'a>>,
    /// The bits of the largest magnitude so far, over all rows; `None` if it is not needed.
    pub(crate) amax: Option<&'a AtomicU32>,
    /// The largest magnitudes of this part, per lane.
    pub(crate) largest: [f32; LANES],
}

split!(['a] Codes<'a> { codes, scaling, y; quant, amax, largest });

/// The source and destination of scales.
pub(crate) enum Scaling<'a> {
    /// The tensor's scale is not known yet: only the largest magnitude is computed, and nothing is
    /// written.
    Unknown,
    /// The scale of all codes.
    Tensor(f32),
    /// Scales of rows or blocks. (rows, scales of a row)
    F32(MatrixMut<'a, f32>),
    /// The same as bytes.
    E8m0(MatrixMut<'a, u8>),
}

impl Split for Scaling<'_> {
    fn split_at(self, row: usize) -> (Self, Self) {
        match self {
            Scaling::Unknown => (Scaling::Unknown, Scaling::Unknown),
            Scaling::Tensor(scale) => (Scaling::Tensor(scale), Scaling::Tensor(scale)),
            Scaling::F32(scales) => {
                let (low, high) = scales.split_at(row);
                (Scaling::F32(low), Scaling::F32(high))
            }
            Scaling::E8m0(scales) => {
                let (low, high) = scales.split_at(row);
                (Scaling::E8m0(low), Scaling::E8m0(high))
            }
        }
    }
}

impl Scaling<'_> {
    /// Equations (Q3) and (Q4) for a set of a row, and the store of its scale. `None` if the scale
    /// is not known yet.
    pub(super) fn scale_of_set(
        &mut self,
        quant: &QuantSpec,
        (row, group): (usize, usize),
        groups: usize,
        amax: f32,
    ) -> Option<f32> {
        let mut scale = [amax];
        match self {
            Scaling::Unknown => return None,
            Scaling::Tensor(scale) => return Some(*scale),
            Scaling::F32(_) | Scaling::E8m0(_) => self.scales_of_sets(quant, (row, group), groups, &mut scale),
        }
        Some(scale[0])
    }

    /// The same for adjacent sets from `first` on: replaces their largest magnitudes with their
    /// scales. Does nothing for a tensor's scale.
    #[inline]
    fn scales_of_sets(&mut self, quant: &QuantSpec, (row, first): (usize, usize), groups: usize, of_sets: &mut [f32]) {
        match self {
            Scaling::Unknown | Scaling::Tensor(_) => {}
            Scaling::F32(scales) => {
                let mut scales = scales.row(row, groups);
                for (group, scale) in of_sets.iter_mut().enumerate() {
                    *scale = quant.scale(*scale);
                    scales.set(first + group, *scale);
                }
            }
            Scaling::E8m0(scales) => {
                let mut scales = scales.row(row, groups);
                for (group, scale) in of_sets.iter_mut().enumerate() {
                    // Always `Some`, because scales are bytes here.
                    let byte = quant.scale_byte(*scale).unwrap_or(u8::MAX);
                    scales.set(first + group, byte);
                    *scale = e8m0_value(byte);
                }
            }
        }
    }
}

impl After for Codes<'_> {
    #[inline(always)]
    fn put<S: Simd, M: Mix, H: Source, A: Affine>(&mut self, row: H, statistics: Statistics, visit: Visit<'_, A>) {
        let Visit { r, call, affine, stores, .. } = visit;
        let cols = call.spec.cols;
        let y = self.y.as_mut().map(|y| y.row_of::<M::T>(r, cols));
        let (mut row, mut codes) = (
            RowOfCodes { values: Values::new(affine, statistics, &self.quant), row, y, cols },
            self.codes.row(r, cols),
        );
        let mut largest = S::splat(0.0);
        let is_known = matches!(self.scaling, Scaling::Tensor(_));
        let is_found = matches!(self.scaling, Scaling::F32(_) | Scaling::E8m0(_));
        // If the scale of a set is computed, its magnitudes are already known.
        let looks_for_amax = is_known && self.amax.is_some();
        let (width, groups) = sets(&self.quant, cols);
        // Sets of whole pieces. A short set after them takes the other path, as does a row that
        // is one set.
        let has_whole = is_found && width < cols && width <= SET_PIECES * LANES && width.is_multiple_of(LANES);
        let whole = if has_whole { cols / width } else { 0 };
        let mut first = 0;
        while first < whole {
            let pieces = width / LANES;
            let count = (whole - first).min(BATCH / pieces);
            let mut find = |scales: &mut [f32]| self.scaling.scales_of_sets(&self.quant, (r, first), groups, scales);
            row.write_sets::<S>(&mut codes, (first, pieces, count), &mut find, stores);
            first += count;
        }
        for group in whole..groups {
            let columns = (group * width, cols.min((group + 1) * width));
            let mut amax = 0.0;
            if !is_known {
                let magnitudes = row.magnitudes::<S>(columns);
                largest = S::max_magnitude(largest, magnitudes);
                amax = S::fold_max(magnitudes);
            }
            let scale = self.scaling.scale_of_set(&self.quant, (r, group), groups, amax);
            let Some(scale) = scale else { continue };
            let written = row.write::<S>(&mut codes, columns, (scale, looks_for_amax), stores);
            largest = S::max_magnitude(largest, written);
        }
        if self.amax.is_some() {
            largest = S::max_magnitude(S::load(&self.largest), largest);
            lanes::store::<S, f32, _>(&mut Out::from(&mut self.largest[..]), Full { start: 0 }, largest);
        }
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self) {
        if let Some(amax) = self.amax {
            amax.fetch_max(S::fold_max(S::load(&self.largest)).to_bits(), Ordering::Relaxed);
        }
    }
}

/// Columns that share a scale, and the number of such sets in a row. With one scale for the tensor,
/// all columns.
fn sets(quant: &QuantSpec, cols: usize) -> (usize, usize) {
    (quant.scale.set_cols(cols).unwrap_or(cols), quant.scale.groups(cols).unwrap_or(1))
}

/// The quantized values of a row.
#[derive(Clone, Copy)]
pub(super) struct Values<A> {
    affine: A,
    statistics: Statistics,
    /// Whether y is first rounded to the activations' dtype.
    is_rounded: bool,
    codes: CodeType,
}

impl<A: Affine> Values<A> {
    #[inline(always)]
    pub(super) fn new(affine: A, statistics: Statistics, quant: &QuantSpec) -> Self {
        Values { affine, statistics, is_rounded: quant.source == QuantSource::Rounded, codes: quant.codes }
    }

    /// Equation (Q1): h, y and v.
    #[inline(always)]
    pub(super) fn of<S: Simd, P: Piece>(self, row: &impl Source, piece: P) -> [S::Lanes; 3] {
        let h = row.h::<S, _>(piece);
        let y = self.affine.value::<S, _, false>(piece, h, self.statistics);
        let dtype = A::T::dtype(self.affine.activation());
        [h, y, if self.is_rounded { lanes::round_through::<S>(dtype, y) } else { y }]
    }
}

/// A row that becomes codes.
struct RowOfCodes<'r, A, H, T: Numbers> {
    values: Values<A>,
    row: H,
    y: Option<Out<'r, T>>,
    cols: usize,
}

impl<A: Affine, H: Source, T: Numbers> RowOfCodes<'_, A, H, T> {
    /// The largest magnitudes from column `start` to `end`, per lane.
    #[inline(always)]
    fn magnitudes<S: Simd>(&self, (start, end): (usize, usize)) -> S::Lanes {
        let mut magnitudes = S::splat(0.0);
        lanes::for_each_piece_between!(start, 0, end, piece => {
            let [_, _, v] = self.values.of::<S, _>(&self.row, piece);
            // Lanes beyond a short piece may hold a bias or NaN.
            magnitudes = S::max_magnitude(magnitudes, lanes::within::<S, _>(piece, v));
        });
        magnitudes
    }

    /// Writes the codes of `sets` sets of whole pieces from `first` on, and y and residual_out if
    /// they are stored. v is computed once and waits for its scale together with other sets, so
    /// that no set waits for the previous one. amax is never needed here, because scales are
    /// computed.
    #[inline(always)]
    fn write_sets<S: Simd>(
        &mut self,
        codes: &mut Out<'_, u8>,
        (first, pieces, sets): (usize, usize, usize),
        find: &mut impl FnMut(&mut [f32]),
        stores: Stores<'_>,
    ) {
        let (mut kept, mut scales) = ([S::splat(0.0); BATCH], [0.0; BATCH]);
        let start = first * pieces * LANES;
        for (set, (kept, amax)) in kept.chunks_exact_mut(pieces).zip(&mut scales).enumerate().take(sets) {
            let mut magnitudes = S::splat(0.0);
            for (i, kept) in kept.iter_mut().enumerate() {
                let piece = Full { start: start + (set * pieces + i) * LANES };
                self.row.prefetch::<S, _>(piece);
                self.values.affine.prefetch::<S, _>(piece);
                let [h, y, v] = self.values.of::<S, _>(&self.row, piece);
                magnitudes = S::max_magnitude(magnitudes, v);
                *kept = v;
                self.store_kept::<S, _>(piece, (h, y), stores);
            }
            *amax = S::fold_max(magnitudes);
        }
        find(&mut scales[..sets]);
        for (set, (kept, &scale)) in kept.chunks_exact(pieces).zip(&scales).enumerate().take(sets) {
            let divisor = Divisor::<S>::new(scale);
            for (i, &v) in kept.iter().enumerate() {
                let piece = Full { start: start + (set * pieces + i) * LANES };
                lanes::store_codes::<S, _>(codes, piece, divisor.quotient(v), self.values.codes, stores);
            }
        }
    }

    /// Writes the codes of columns that share a scale, and y and residual_out if they are stored.
    /// Returns the largest magnitudes if `looks_for_amax`.
    #[inline(always)]
    fn write<S: Simd>(
        &mut self,
        codes: &mut Out<'_, u8>,
        (start, end): (usize, usize),
        (scale, looks_for_amax): (f32, bool),
        stores: Stores<'_>,
    ) -> S::Lanes {
        let (divisor, mut magnitudes) = (Divisor::<S>::new(scale), S::splat(0.0));
        // Blocks begin at the row's start or whole pieces after it.
        let head = if end - start == self.cols { stores.head_of_codes(codes) } else { 0 };
        lanes::for_each_piece_between!(start, head, end, piece => {
            self.row.prefetch::<S, _>(piece);
            self.values.affine.prefetch::<S, _>(piece);
            let [h, y, v] = self.values.of::<S, _>(&self.row, piece);
            if looks_for_amax {
                magnitudes = S::max_magnitude(magnitudes, lanes::within::<S, _>(piece, v));
            }
            lanes::store_codes::<S, _>(codes, piece, divisor.quotient(v), self.values.codes, stores);
            self.store_kept::<S, _>(piece, (h, y), stores);
        });
        magnitudes
    }

    /// Stores y and residual_out, if the call has them.
    #[inline(always)]
    fn store_kept<S: Simd, P: Piece>(&mut self, piece: P, (h, y): (S::Lanes, S::Lanes), stores: Stores<'_>) {
        if let Some(to) = &mut self.y {
            to.store_or_stream::<S, _>(piece, y, stores);
        }
        self.row.put::<S, _>(piece, h, stores);
    }
}

/// A scale to divide by.
struct Divisor<S: Simd> {
    /// The scale, or its reciprocal if that is exact.
    by: S::Lanes,
    is_reciprocal: bool,
}

impl<S: Simd> Clone for Divisor<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd> Copy for Divisor<S> {}

impl<S: Simd> Divisor<S> {
    #[inline(always)]
    fn new(scale: f32) -> Self {
        // The reciprocal of a power of two is exact, also for 2^127 and 2^-127, and multiplying by
        // it gives the same quotient.
        let bits = scale.to_bits();
        let is_reciprocal = bits & 0x007f_ffff == 0 && scale.is_normal() || bits == 0x0040_0000;
        Divisor { by: S::splat(if is_reciprocal { 1.0 / scale } else { scale }), is_reciprocal }
    }

    #[inline(always)]
    fn quotient(self, v: S::Lanes) -> S::Lanes {
        if self.is_reciprocal { S::mul(v, self.by) } else { S::div(v, self.by) }
    }
}
