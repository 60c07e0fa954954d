//! The tensors of a call in host memory, with elements of any type: read as f32, rounded once when
//! written.

use std::ops::DerefMut;

use rmsnorm_spec::{AnyElement, DType, NormSpec, RowLayout, Rows, Storage, Tensor, TensorShape};

use super::call::Call;
use crate::judge::smallest_normal;
use crate::run::memory::{decode_f32, encode_f32, round};
use crate::selftest::planted::{NormBug, StrideBug};

/// The elements of a view, as bits.
pub(crate) trait Elements {
    fn len(&self) -> usize;
    fn bits(&self, index: usize) -> u32;
    fn set(&mut self, index: usize, bits: u32);
}

impl<E: AnyElement, S: DerefMut<Target = [E]>> Elements for S {
    fn len(&self) -> usize {
        <[E]>::len(self)
    }

    fn bits(&self, index: usize) -> u32 {
        self[index].bits()
    }

    fn set(&mut self, index: usize, bits: u32) {
        self[index] = E::from_bits(bits);
    }
}

/// A tensor with the strides that the kernel uses. A vector is one row.
pub(crate) struct Matrix<'a> {
    view: Box<dyn Elements + 'a>,
    storage: Storage,
    pub(crate) rows: RowLayout,
}

impl Matrix<'_> {
    /// A row as f32.
    pub(crate) fn row(&self, row: usize) -> Vec<f32> {
        self.row_from(0, row)
    }

    /// A row, if the first row starts at element `first`.
    pub(crate) fn row_from(&self, first: usize, row: usize) -> Vec<f32> {
        // A wrong stride may point beyond the view, where a slice cannot be read.
        let start = (first + self.rows.start(row)).min(self.view.len() - self.rows.cols);
        (start..start + self.rows.cols).map(|index| self.value(index)).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.view.len()
    }

    pub(crate) fn value(&self, index: usize) -> f32 {
        decode_f32(self.view.bits(index), self.storage)
    }

    /// Writes the nearest value of the tensor's type.
    pub(crate) fn store(&mut self, index: usize, value: f32) {
        self.view.set(index, encode_f32(value, self.storage));
    }

    /// Writes consecutive values, up to the end of the view.
    pub(crate) fn store_from(&mut self, start: usize, values: &[f32]) {
        (start..self.len()).zip(values).for_each(|(index, &value)| self.store(index, value));
    }

    /// Writes the bits of a quantized value.
    pub(crate) fn store_code(&mut self, index: usize, code: u8) {
        self.view.set(index, u32::from(code));
    }

    /// Writes a row of `y`, `dx` or `dresidual`.
    fn store_result(&mut self, call: &Call, row: usize, values: &[f32]) {
        if call.has(NormBug::SkipLastRowWrite) && row + 1 == call.spec.rows {
            return;
        }
        let (start, cols) = (self.rows.start(row), self.rows.cols);
        let written = if call.has(NormBug::SkipLastColWrite) { cols - 1 } else { cols };
        for (index, &value) in (start..self.len()).zip(&values[..written]) {
            let value = if call.has(NormBug::OutputRead) { value + 0.0 * self.value(index) } else { value };
            self.view.set(index, self.rounded(call, value));
        }
        if call.has(NormBug::GapOverwritten) && self.rows.row_stride > cols && start + cols < self.len() {
            self.view.set(start + cols, self.view.bits(start + cols - 1));
        }
    }

    /// The bits of a result, rounded once to nearest even.
    fn rounded(&self, call: &Call, value: f32) -> u32 {
        let nearest = encode_f32(value, self.storage);
        let magnitude = decode_f32(nearest, self.storage).abs();
        match call.bug() {
            // The next lower bit pattern is the next value toward zero; for infinity, the largest
            // finite value.
            Some(NormBug::RtzStore) if magnitude > value.abs() => nearest - 1,
            Some(NormBug::DoubleRound) => {
                let is_bf16 = self.storage == DType::Bf16.into();
                encode_f32(round(value, if is_bf16 { DType::F16 } else { DType::Bf16 }), self.storage)
            }
            Some(NormBug::SubnormalFlush)
                if f64::from(magnitude) < self.storage.float().map_or(0.0, smallest_normal) =>
            {
                0
            }
            Some(NormBug::NanSwallowed) if value.is_nan() => 0,
            Some(_) | None => nearest,
        }
    }
}

/// All tensors of a call. In place, `Y` holds `X`, and `ResidualOut` holds `Residual`.
pub(crate) struct Tensors<'c, 'a> {
    call: &'c Call,
    of: [Option<Matrix<'a>>; Tensor::COUNT],
}

impl<'c, 'a> Tensors<'c, 'a> {
    pub(crate) fn new(call: &'c Call) -> Self {
        Tensors { call, of: [const { None }; Tensor::COUNT] }
    }

    pub(crate) fn get(&self, tensor: Tensor) -> Option<&Matrix<'a>> {
        self.of[tensor as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, tensor: Tensor) -> Option<&mut Matrix<'a>> {
        self.of[tensor as usize].as_mut()
    }

    /// The tensor to read as `tensor`: in place, the output that overwrites it; in a cast, the
    /// residual as `x`.
    fn input(&self, tensor: Tensor) -> Option<&Matrix<'a>> {
        let of_x = if self.call.problem.tensors.is_cast() { Tensor::Residual } else { Tensor::Y };
        let in_place = [(Tensor::X, of_x), (Tensor::Residual, Tensor::ResidualOut)];
        let overwritten =
            in_place.into_iter().find(|(input, _)| *input == tensor).and_then(|(_, output)| self.get(output));
        self.get(tensor).or(overwritten)
    }

    /// A row of an input as f32.
    pub(crate) fn row(&self, tensor: Tensor, row: usize) -> Option<Vec<f32>> {
        self.input(tensor).map(|matrix| matrix.row(row))
    }

    /// All values of a vector.
    pub(crate) fn values(&self, tensor: Tensor) -> Option<Vec<f32>> {
        self.row(tensor, 0)
    }

    /// Writes a row of `residual_out`, whose values are already rounded.
    pub(crate) fn store_residual(&mut self, row: usize, values: &[f32]) {
        let is_missing = self.call.has(NormBug::ResOutMissing);
        if let Some(out) = self.get_mut(Tensor::ResidualOut).filter(|_| !is_missing) {
            out.store_from(out.rows.start(row), values);
        }
    }

    /// Writes a row of a result, if it is requested.
    pub(crate) fn store_result(&mut self, tensor: Tensor, row: usize, values: &[f32]) {
        let call = self.call;
        if let Some(out) = self.get_mut(tensor) {
            out.store_result(call, row, values);
        }
    }

    pub(crate) fn put<E: AnyElement>(&mut self, tensor: Tensor, given: Rows<Box<dyn Elements + 'a>>) {
        let call = self.call;
        let NormSpec { rows, cols, .. } = call.spec;
        let (rows, cols) = if tensor.shape() == TensorShape::Transposed { (cols, rows) } else { (rows, cols) };
        let mut rows = if tensor.is_matrix() { given.layout(rows, cols) } else { given.layout(1, given.view.len()) };
        let of = match call.problem.tensors {
            tensors if tensor == Tensor::Y && tensors.is_in_place() => Tensor::X,
            tensors if tensor == Tensor::ResidualOut && !tensors.has(Tensor::Residual) => Tensor::Residual,
            _ => tensor,
        };
        if call.has_on(StrideBug::Strides, of) {
            rows.row_stride = rows.cols;
        }
        if let Some(x) = self.get(Tensor::X).filter(|_| of == Tensor::Dy && call.has(NormBug::DyStrideOfX)) {
            rows.row_stride = x.rows.row_stride;
        }
        if call.has_on(StrideBug::Groups, of) {
            rows.groups = None;
        }
        self.of[tensor as usize] = Some(Matrix { view: given.view, storage: E::STORAGE, rows });
    }
}
