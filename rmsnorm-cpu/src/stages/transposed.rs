//! The transposed copy of codes, in tiles, so that both sides are accessed in whole cache lines.

use super::{MatrixMut, RowStarts, Split};
use crate::lanes::{Out, Written};

/// Some columns of the codes, as rows of the copy.
pub(crate) struct TransposedCols<'a> {
    pub(crate) codes: Written<'a, u8>,
    pub(crate) codes_rows: RowStarts,
    /// Rows of the codes, and columns of the copy.
    pub(crate) rows: usize,
    /// The first column of this part.
    pub(crate) first: usize,
    pub(crate) cols: usize,
    pub(crate) codes_t: MatrixMut<'a, u8>,
}

/// Rows and columns of a tile: one cache line on each side.
const TILE: usize = 64;

impl Split for TransposedCols<'_> {
    fn split_at(self, col: usize) -> (Self, Self) {
        let (low, high) = self.codes_t.split_at(col);
        (
            TransposedCols { codes_t: low, cols: col, ..self },
            TransposedCols { codes_t: high, first: self.first + col, cols: self.cols - col, ..self },
        )
    }
}

impl TransposedCols<'_> {
    /// Copies all of them.
    pub(crate) fn run(mut self) {
        let mut tile = [[0; TILE]; TILE];
        for col in (0..self.cols).step_by(TILE) {
            let width = TILE.min(self.cols - col);
            for row in (0..self.rows).step_by(TILE) {
                let height = TILE.min(self.rows - row);
                for (r, line) in tile[..height].iter_mut().enumerate() {
                    let start = self.codes_rows.start(row + r) + self.first + col;
                    line[..width].copy_from_slice(self.codes.part(start, width));
                }
                for c in 0..width {
                    let mut column = [0; TILE];
                    for (to, line) in column.iter_mut().zip(&tile) {
                        *to = line[c];
                    }
                    let mut to: Out<'_, u8> = self.codes_t.row(col + c, self.rows);
                    to.part(row, height).copy_from_slice(&column[..height]);
                }
            }
        }
    }
}
