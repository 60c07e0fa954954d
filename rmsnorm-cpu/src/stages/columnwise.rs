//! The columnwise copy: math.md (Q1) to (Q5) of the transposed matrix, from x and the statistics
//! that forward stored. A tile is the rows that share a scale and the columns of a piece, so each
//! lane is one set.

use rmsnorm_spec::quant::QuantSpec;

use super::forward::affine::{OfMix, Vectors};
use super::forward::before::{Before, Summed};
use super::forward::statistics::Statistics;
use super::gate::AfterNorm;
use super::quantized_forward::{Scaling, Values};
use super::{Call, Matrix, MatrixMut, Section, Stage, split};
use crate::lanes::{self, Full, In, LANES, Mix, Out, Piece, Simd};

/// Some columns of a quantized call, as rows of the copy.
pub(crate) struct ColumnwiseCols<'a, X = Matrix<'a>, G = ()> {
    pub(crate) call: Call,
    /// With all columns.
    pub(crate) x: X,
    pub(crate) residual: Option<Matrix<'a>>,
    pub(crate) affine: Vectors<'a>,
    pub(crate) gate: G,
    /// Means of layer norm. (rows)
    pub(crate) mean: Option<In<'a, f32>>,
    /// (rows)
    pub(crate) rstd: In<'a, f32>,
    pub(crate) cols: Section,
    /// The spec of the copy.
    pub(crate) quant: QuantSpec,
    /// (cols, rows)
    pub(crate) codes: MatrixMut<'a, u8>,
    /// Scales of blocks of rows. (cols, blocks)
    pub(crate) scaling: Scaling<'a>,
}

/// The most rows that share a scale.
const MOST_ROWS: usize = 128;

split!(['a, X: Copy, G: Copy] ColumnwiseCols<'a, X, G> {
    codes, scaling, cols; call, x, residual, affine, gate, mean, rstd, quant
});

/// Quantizes every column.
impl<X: Before + Copy, G: AfterNorm> Stage for ColumnwiseCols<'_, X, G> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        // A columnwise call has scales of blocks, so a set lies within a column.
        let height = self.quant.scale.set_cols(self.call.spec.rows).unwrap_or(MOST_ROWS);
        let Section { first, len } = self.cols;
        lanes::for_each_piece_between!(first, 0, first + len, piece => {
            let mut row = 0;
            while row < self.call.spec.rows {
                let rows = height.min(self.call.spec.rows - row);
                self.tile::<S, M, _>(piece, (row, rows), height);
                row += height;
            }
        });
    }
}

impl<X: Before + Copy, G: AfterNorm> ColumnwiseCols<'_, X, G> {
    /// The columns of a piece in a block of rows.
    #[inline(always)]
    fn tile<S: Simd, M: Mix, P: Piece>(&mut self, piece: P, (row, rows): (usize, usize), height: usize) {
        let (group, groups) = (row / height, self.call.spec.rows.div_ceil(height));
        let affine = OfMix::<M>::new(self.affine, &self.call);
        let mut before = Summed { x: self.x, residual: self.residual, out: None };
        let mut kept = [[0f32; LANES]; MOST_ROWS];
        let mut magnitudes = S::splat(0.0);
        for (r, kept) in (row..row + rows).zip(&mut kept[..rows]) {
            let mean = self.mean.map_or(0.0, |mean| mean.get(r));
            let statistics = Statistics { mean, rstd: self.rstd.get(r) }.factors(&self.call);
            let values = Values::new(self.gate.affine::<M, _>(affine, r, &self.call), statistics, &self.quant);
            let [_, _, v] = values.of::<S, _>(&before.row::<M, true>(r, 0, &self.call), piece);
            magnitudes = S::max_magnitude(magnitudes, v);
            lanes::store::<S, f32, _>(&mut Out::from(&mut kept[..]), Full { start: 0 }, v);
        }
        let mut largest = [0f32; LANES];
        lanes::store::<S, f32, _>(&mut Out::from(&mut largest[..]), Full { start: 0 }, magnitudes);
        let mut scales = [1f32; LANES];
        let column = piece.start() - self.cols.first;
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
