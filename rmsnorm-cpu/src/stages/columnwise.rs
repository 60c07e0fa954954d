//! The columnwise copy: math.md (Q1) to (Q5) of the transposed matrix, from x and the statistics
//! that forward stored. A tile is the rows that share a scale and the columns of a piece, so each
//! lane is one set.

use rmsnorm_spec::quant::QuantSpec;

use super::forward::affine::{OfMix, Vectors};
use super::forward::before::{Before, Summed};
use super::forward::statistics::Statistics;
use super::quantized_forward::{Scaling, Values};
use super::{Call, Matrix, MatrixMut, Split, Stage};
use crate::lanes::{self, LANES, Mix, Out, Piece, Simd, Written};

/// Some columns of a quantized call, as rows of the copy.
pub(crate) struct ColumnwiseCols<'a> {
    pub(crate) call: Call,
    /// The inputs, with all columns.
    pub(crate) before: Summed<'a, Matrix<'a>>,
    pub(crate) affine: Vectors<'a>,
    /// Means of layer norm. (rows)
    pub(crate) mean: Option<Written<'a, f32>>,
    /// (rows)
    pub(crate) rstd: Written<'a, f32>,
    /// The first column of this part.
    pub(crate) first: usize,
    pub(crate) cols: usize,
    /// The spec of the copy.
    pub(crate) quant: QuantSpec,
    /// (cols, rows)
    pub(crate) codes: MatrixMut<'a, u8>,
    /// Scales of blocks of rows. (cols, blocks)
    pub(crate) scaling: Scaling<'a>,
}

/// The most rows that share a scale.
const MOST_ROWS: usize = 128;

impl Split for ColumnwiseCols<'_> {
    fn split_at(self, col: usize) -> (Self, Self) {
        let (codes, high_codes) = self.codes.split_at(col);
        let (scaling, high_scaling) = self.scaling.split_at(col);
        let before = self.before.inputs();
        let (first, cols) = (self.first + col, self.cols - col);
        let high =
            ColumnwiseCols { first, cols, before: self.before, codes: high_codes, scaling: high_scaling, ..self };
        (ColumnwiseCols { cols: col, before, codes, scaling, ..self }, high)
    }
}

/// Quantizes every column.
impl Stage for ColumnwiseCols<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        // A columnwise call has scales of blocks, so a set lies within a column.
        let height = self.quant.scale.set_cols(self.call.spec.rows).unwrap_or(MOST_ROWS);
        let (first, end) = (self.first, self.first + self.cols);
        lanes::for_each_piece_between!(first, 0, end, piece => {
            let mut row = 0;
            while row < self.call.spec.rows {
                let rows = height.min(self.call.spec.rows - row);
                self.tile::<S, M, _>(piece, (row, rows), height);
                row += height;
            }
        });
    }
}

impl ColumnwiseCols<'_> {
    /// The columns of a piece in a block of rows.
    #[inline(always)]
    fn tile<S: Simd, M: Mix, P: Piece>(&mut self, piece: P, (row, rows): (usize, usize), height: usize) {
        let (group, groups) = (row / height, self.call.spec.rows.div_ceil(height));
        let affine = OfMix::<M>::new(self.affine, &self.call);
        let mut kept = [[0f32; LANES]; MOST_ROWS];
        let mut magnitudes = S::splat(0.0);
        for (r, kept) in (row..row + rows).zip(&mut kept[..rows]) {
            let mean = self.mean.map_or(0.0, |mean| mean.part(r, 1)[0]);
            let statistics = Statistics { mean, rstd: self.rstd.part(r, 1)[0] };
            let values = Values::new(affine, statistics, &self.quant);
            let [_, _, v] = values.of::<S, _>(&self.before.row::<M, true>(r, 0, &self.call), piece);
            magnitudes = S::max_magnitude(magnitudes, v);
            S::store(Out::from(&mut kept[..]).group(0), v);
        }
        let mut largest = [0f32; LANES];
        S::store(Out::from(&mut largest[..]).group(0), magnitudes);
        let mut scales = [1f32; LANES];
        let column = piece.start() - self.first;
        for (lane, (scale, amax)) in scales[..piece.len()].iter_mut().zip(largest).enumerate() {
            // Always `Some`: scales of blocks are computed.
            *scale = self.scaling.scale_of_set(&self.quant, (column + lane, group), groups, amax).unwrap_or(f32::NAN);
        }
        let divisors = S::load(&scales);
        let mut codes = [[0u8; LANES]; MOST_ROWS];
        for (kept, codes) in kept[..rows].iter().zip(&mut codes) {
            let quotients = S::div(S::load(kept), divisors);
            lanes::encode_into::<S>(codes, quotients, self.quant.codes);
        }
        for lane in 0..piece.len() {
            let mut of_column = [0u8; MOST_ROWS];
            for (to, codes) in of_column[..rows].iter_mut().zip(&codes) {
                *to = codes[lane];
            }
            self.codes.row(column + lane, self.call.spec.rows).part(row, rows).copy_from_slice(&of_column[..rows]);
        }
    }
}
