//! The transposed copy of codes, in tiles, so that both sides are accessed in whole cache lines.

use super::{MatrixMut, RowStarts, Section, split};
use crate::lanes::{In, Out};

/// Some columns of the codes, as rows of the copy.
pub(crate) struct TransposedCols<'a> {
    pub(crate) codes: In<'a, u8>,
    pub(crate) codes_rows: RowStarts,
    /// Rows of the codes, and columns of the copy.
    pub(crate) rows: usize,
    pub(crate) cols: Section,
    pub(crate) codes_t: MatrixMut<'a, u8>,
}

/// Rows and columns of a tile: one cache line on each side.
const TILE: usize = 64;

split!(['a] TransposedCols<'a> { codes_t, cols; codes, codes_rows, rows });

impl TransposedCols<'_> {
    /// Copies all of them.
    pub(crate) fn run(mut self) {
        let mut tile = [[0; TILE]; TILE];
        for col in (0..self.cols.len).step_by(TILE) {
            let width = TILE.min(self.cols.len - col);
            for row in (0..self.rows).step_by(TILE) {
                let height = TILE.min(self.rows - row);
                for (r, line) in tile[..height].iter_mut().enumerate() {
                    let start = self.codes_rows.start(row + r) + self.cols.first + col;
                    line[..width].copy_from_slice(self.codes.part(start, width).elements());
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
