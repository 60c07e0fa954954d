//! The outputs of a quantized forward call: scales, quantized values, amax.

use rmsnorm_spec::Tensor;
use rmsnorm_spec::quant::{QuantSource, QuantSpec, ScaleLayout};

use super::scales::{QuantizeBug, Quantizer, Unquantized};
use crate::pieces::math::{Call, ForwardRow, Matrix, Tensors, each, round};

/// Stores scales, quantized values and amax of normalized rows.
pub(super) fn run(call: &Call, tensors: &mut Tensors<'_, '_>, quant: QuantSpec, rows: &[ForwardRow]) {
    let quantizer = Quantizer { call, quant, shape: (call.spec.rows, call.spec.cols) };
    let weight = call.effective_weight(tensors.values(Tensor::Weight));
    let bias = tensors.values(Tensor::Bias);
    let element = |(col, &y): (usize, &f32)| {
        let unbiased = y - bias.as_ref().map_or(0.0, |bias| bias[col]);
        [y, unbiased, if weight[col] == 0.0 { 0.0 } else { unbiased / weight[col] }]
    };
    let unquantized = |row: &ForwardRow| row.result.y.iter().enumerate().map(element).collect();
    let rows: Vec<Unquantized> = rows.iter().map(unquantized).collect();
    let scales = quantizer.scales(&rows, tensors.get(Tensor::Scale).map(|scale| scale.value(0)));
    if let Some(out) = tensors.get_mut(Tensor::Scales) {
        quantizer.store_scales(out, &scales);
    }
    if let Some(amax) = tensors.get_mut(Tensor::Amax) {
        amax.store(0, quantizer.largest(&rows, scales.codes[0], amax.value(0)));
    }
    let codes = quantizer.codes(&rows, &scales);
    if let Some(out) = tensors.get_mut(Tensor::Codes) {
        quantizer.store_codes(out, &codes);
    }
    if let Some(codes_t) = tensors.get_mut(Tensor::CodesT) {
        quantizer.store_transposed(codes_t, &codes, &rows, &scales);
    }
    let values = |row: usize, col: usize| quantizer.values_along_columns(&rows, &codes, &scales, (row, col));
    let (of_rows, cols) = quantizer.shape;
    let along = Quantizer { call, quant: quant.columnwise(), shape: (cols, of_rows) };
    if let Some(scales_out) = tensors.get_mut(Tensor::ScalesColumnwise) {
        let columns = columns(&rows, quantizer.shape, values);
        let scales = along.scales(&columns, None);
        along.store_scales(scales_out, &scales);
        let codes = along.codes(&columns, &along.wrong_along_columns(scales));
        if let Some(codes_out) = tensors.get_mut(Tensor::CodesColumnwise) {
            along.store_along_columns(codes_out, codes);
        }
    }
}

/// The transposed matrix, with y from `y`.
fn columns(rows: &[Unquantized], (_, cols): (usize, usize), y: impl Fn(usize, usize) -> f32) -> Vec<Unquantized> {
    let element = |row: usize, col: usize| [y(row, col), rows[row][col][1], rows[row][col][2]];
    (0..cols).map(|col| (0..rows.len()).map(|row| element(row, col)).collect()).collect()
}

/// The scales of a call: row by row, or one for the tensor.
struct SetScales {
    /// The scales to store.
    stored: Vec<f32>,
    /// The scales to quantize with.
    codes: Vec<f32>,
}

impl Quantizer<'_> {
    /// Columns that share a scale, and scales of a row; `None` for one scale per tensor.
    fn sets(&self) -> Option<(usize, usize)> {
        let (_, cols) = self.shape;
        self.quant.scale.set_cols(cols).zip(self.quant.scale.groups(cols))
    }

    /// The index of a column's scale in its row.
    fn group(&self, col: usize, (width, groups): (usize, usize)) -> usize {
        let late = usize::from(self.has(QuantizeBug::BlockBoundaryLate) && col > 0 && col.is_multiple_of(width));
        ((col - late) / width).min(groups - 1)
    }

    fn scales(&self, rows: &[Unquantized], given: Option<f32>) -> SetScales {
        let amax: Vec<f32> = match (given, self.sets()) {
            (Some(scale), _) => return SetScales { stored: vec![scale], codes: vec![scale] },
            (None, None) => vec![self.amax_of_all(rows)],
            (None, Some(sets)) => self.amax_of_sets(rows, sets),
        };
        let (stored, codes) = amax.into_iter().map(|amax| self.scale(amax)).unzip();
        self.mixed_up(SetScales { stored, codes })
    }

    fn amax_of_all(&self, rows: &[Unquantized]) -> f32 {
        let dropped = usize::from(self.has(QuantizeBug::AmaxDropsLastRow) && rows.len() > 1);
        let of_rows = rows[..rows.len() - dropped].iter().map(|row| self.amax(&self.magnitudes(row)).to_bits());
        f32::from_bits(of_rows.max().unwrap_or(0))
    }

    fn amax_of_sets(&self, rows: &[Unquantized], sets: (usize, usize)) -> Vec<f32> {
        let magnitudes: Vec<Vec<f32>> = rows.iter().map(|row| self.magnitudes(row)).collect();
        let of_set = |row: usize, group: usize| {
            if self.has(QuantizeBug::BlocksAlongRows) && sets.1 > 1 {
                // Rows of a column instead of columns of a row.
                let last = (row + sets.0).min(rows.len());
                let column: Vec<f32> = magnitudes[row..last].iter().map(|row| row[group * sets.0]).collect();
                return self.amax(&column);
            }
            let of_row = &magnitudes[row];
            let set: Vec<f32> =
                (0..of_row.len()).filter(|col| self.group(*col, sets) == group).map(|col| of_row[col]).collect();
            self.amax(&set)
        };
        each(0..rows.len(), 0..sets.1).map(|(row, group)| of_set(row, group)).collect()
    }

    /// The scales, with a bug those of other rows or blocks.
    fn mixed_up(&self, scales: SetScales) -> SetScales {
        let Some((width, groups)) = self.sets() else { return scales };
        let (rows, cols) = self.shape;
        let is_partial = |group: usize| group > 0 && group + 1 == groups && !cols.is_multiple_of(width);
        let stored = |row: usize, group: usize| match self.call.bug() {
            Some(QuantizeBug::ScaleOfEightRows) if group == 0 => (row / 8 * 8, 0),
            Some(QuantizeBug::PartialBlockByOther) if is_partial(group) => (row, group - 1),
            Some(_) | None => (row, group),
        };
        let codes = |row: usize, group: usize| match self.call.bug() {
            Some(QuantizeBug::ScaleOfOtherRow) if row > 0 && row + 1 == rows => (row - 1, group),
            Some(QuantizeBug::CodesByOtherBlock) if group == 1 => (row, 0),
            Some(QuantizeBug::PartialBlockByOther) if is_partial(group) => (row, group - 1),
            Some(_) | None => (row, group),
        };
        let moved = |of: &[f32], from: &dyn Fn(usize, usize) -> (usize, usize)| -> Vec<f32> {
            let sets = each(0..rows, 0..groups).map(|(row, group)| from(row, group));
            sets.map(|(row, group)| of[row * groups + group]).collect()
        };
        let (mut stored, codes) = (moved(&scales.stored, &stored), moved(&scales.codes, &codes));
        if self.has(QuantizeBug::ScalesShifted) && !stored.is_empty() {
            stored.rotate_right(1);
        }
        SetScales { stored, codes }
    }

    fn store_scales(&self, out: &mut Matrix<'_>, scales: &SetScales) {
        let Some((_, groups)) = self.sets() else {
            out.store(0, scales.stored[0]);
            return;
        };
        if !self.has(QuantizeBug::PaddingNotZeroed) {
            (0..out.len()).for_each(|place| out.store(place, 0.0));
        }
        let (rows, _) = self.shape;
        for (row, group) in each(0..rows, 0..groups) {
            let right = self.quant.layout.index(groups, row, group);
            let place = match (self.call.bug(), self.quant.layout) {
                (Some(QuantizeBug::ScalesTransposed), ScaleLayout::RowMajor) => group * rows + row,
                (Some(QuantizeBug::SwizzleExchanged), ScaleLayout::Swizzled128x4) => {
                    right / 512 * 512 + (row % 32 * 16 + group % 4 * 4 + row % 128 / 32)
                }
                (Some(QuantizeBug::PackedReversed), ScaleLayout::PackedUe8m0 { ld }) => {
                    (group / 4 * ld + row) * 4 + 3 - group % 4
                }
                (Some(_) | None, _) => right,
            };
            out.store(place, scales.stored[row * groups + group]);
        }
    }

    /// The output `amax`. `before` is its old value.
    fn largest(&self, rows: &[Unquantized], scale: f32, before: f32) -> f32 {
        let mut largest = self.amax_of_all(rows);
        if self.has(QuantizeBug::AmaxOfQuotient) {
            largest /= scale;
        }
        if self.has(QuantizeBug::AmaxOfClamped) {
            largest = largest.min(scale * self.quant.codes.largest());
        }
        let folds = self.quant.folds_amax != self.has(QuantizeBug::AmaxNotCleared);
        if folds { f32::from_bits(largest.to_bits().max(before.to_bits() & 0x7fff_ffff)) } else { largest }
    }

    fn scale_at<'s>(&self, scales: &'s SetScales, row: usize, col: usize) -> &'s f32 {
        match self.sets() {
            None => &scales.codes[0],
            Some(sets) => &scales.codes[row * sets.1 + self.group(col, sets)],
        }
    }

    fn codes(&self, rows: &[Unquantized], scales: &SetScales) -> Vec<Vec<u8>> {
        let of_row = |(row, normalized): (usize, &Unquantized)| {
            let code = |(col, v): (usize, f32)| self.code(self.quotient(v, *self.scale_at(scales, row, col)));
            let mut codes: Vec<u8> = self.v(normalized).into_iter().enumerate().map(code).collect();
            if self.has(QuantizeBug::PairsSwapped) {
                codes.as_chunks_mut::<2>().0.iter_mut().for_each(|pair| pair.reverse());
            }
            codes
        };
        rows.iter().enumerate().map(of_row).collect()
    }

    fn store_codes(&self, out: &mut Matrix<'_>, codes: &[Vec<u8>]) {
        if self.shape.1 == 0 {
            // The columnwise copy of a matrix without rows.
            return;
        }
        let rows = codes.len() - usize::from(self.has(QuantizeBug::CodesLastRowMissing) && !codes.is_empty());
        let cols = self.shape.1 - usize::from(self.has(QuantizeBug::CodesLastColMissing));
        for (row, codes) in codes[..rows].iter().enumerate() {
            let start = out.rows.start(row);
            (start..start + cols).zip(codes).for_each(|(index, &code)| out.store_code(index, code));
        }
    }

    /// The source of the columnwise copy: y in a correct kernel.
    fn values_along_columns(
        &self,
        rows: &[Unquantized],
        codes: &[Vec<u8>],
        scales: &SetScales,
        (row, col): (usize, usize),
    ) -> f32 {
        let [y, ..] = rows[row][col];
        if self.has(QuantizeBug::ColumnwiseOfCodes) {
            return self.quant.codes.decode(codes[row][col]) * self.scale_at(scales, row, col);
        }
        if self.has(QuantizeBug::ColumnwiseRounded) && self.quant.source == QuantSource::F32 {
            return round(y, self.call.low());
        }
        y
    }

    /// The scales to quantize the columnwise copy with; with a bug, those of another block.
    fn wrong_along_columns(&self, mut scales: SetScales) -> SetScales {
        let Some((_, groups)) = self.sets() else { return scales };
        if self.has(QuantizeBug::ColumnwiseByFirstBlock) && groups > 1 {
            for of_column in scales.codes.chunks_mut(groups) {
                of_column[1] = of_column[0];
            }
        }
        scales
    }

    fn store_along_columns(&self, out: &mut Matrix<'_>, mut codes: Vec<Vec<u8>>) {
        let (cols, rows) = self.shape;
        let width = self.sets().map_or(rows, |(width, _)| width);
        if self.has(QuantizeBug::ColumnwiseReshaped) {
            let dense: Vec<u8> = (0..rows).flat_map(|row| codes.iter().map(move |column| column[row])).collect();
            codes = dense.chunks(rows.max(1)).map(<[u8]>::to_vec).collect();
        }
        if self.has(QuantizeBug::ColumnwiseStrideIgnored) {
            out.rows.row_stride = rows;
        }
        if self.has(QuantizeBug::ColumnwiseTailMissing) {
            // The last, partial block of rows.
            codes.iter_mut().for_each(|column| column.truncate(rows / width * width));
        }
        debug_assert!(codes.len() == cols || rows == 0, "a column each");
        self.store_codes(out, &codes);
    }

    fn store_transposed(
        &self,
        out: &mut Matrix<'_>,
        codes: &[Vec<u8>],
        normalized: &[Unquantized],
        scales: &SetScales,
    ) {
        let (rows, cols) = self.shape;
        let ld = if self.has(QuantizeBug::TransposedStrideIgnored) { rows } else { out.rows.row_stride };
        let is_last_tile = |row: usize, col: usize| row / 16 == (rows - 1) / 16 && col / 16 == (cols - 1) / 16;
        for (col, row) in each(0..cols, 0..rows) {
            let index = col * rows + row;
            let code = match self.call.bug() {
                Some(QuantizeBug::TransposedTileMissing) if is_last_tile(row, col) => continue,
                Some(QuantizeBug::TransposedReshaped) => codes[index / cols][index % cols],
                Some(QuantizeBug::TransposedRowsSwapped) if rows > 1 && row < 2 => codes[1 - row][col],
                Some(QuantizeBug::TransposedRoundedAgain) => {
                    let v = round(normalized[row][col][0], self.call.low());
                    self.code(self.quotient(v, *self.scale_at(scales, row, col)))
                }
                Some(_) | None => codes[row][col],
            };
            if col * ld + row < out.len() {
                out.store_code(col * ld + row, code);
            }
        }
    }
}
