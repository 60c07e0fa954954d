//! Rows in host memory: read into f32, rounded once when they are written.

use std::ops::{Deref, DerefMut};

use rmsnorm_spec::{DType, Element, RowLayout, Rows, Source, bf16, f16};

use super::call::Call;
use crate::selftest::planted::Bug;

/// A matrix with the strides that the kernel believes in.
pub(super) struct Matrix<V> {
    view: V,
    rows: RowLayout,
}

impl<V> Matrix<V> {
    /// The matrix as given; with the first bug its rows are taken to be dense, with the second its groups are overlooked.
    pub(super) fn new(given: Rows<V>, call: &Call, [dense, ungrouped]: [Bug; 2]) -> Self {
        let mut rows = given.layout(call.spec.rows, call.spec.cols);
        if call.has(dense) {
            rows.row_stride = rows.cols;
        }
        if call.has(ungrouped) {
            rows.groups = None;
        }
        Matrix { view: given.view, rows }
    }

    /// This matrix, taken to have the stride of another one if so.
    pub(super) fn with_stride_of<U>(mut self, other: &Matrix<U>, mistaken: bool) -> Self {
        if mistaken {
            self.rows.row_stride = other.rows.row_stride;
        }
        self
    }
}

/// A matrix that is read, and in place written to as well.
pub(super) enum Input<'a, T> {
    Read(Matrix<&'a [T]>),
    Overwrite(Matrix<&'a mut [T]>),
}

impl<'a, T: Element> Input<'a, T> {
    pub(super) fn new(source: Source<&'a [T], &'a mut [T]>, call: &Call, bugs: [Bug; 2]) -> Self {
        match source {
            Source::Read(rows) => Input::Read(Matrix::new(rows, call, bugs)),
            Source::Overwrite(rows) => Input::Overwrite(Matrix::new(rows, call, bugs)),
        }
    }

    /// The row, in f32.
    pub(super) fn row(&self, row: usize) -> Vec<f32> {
        match self {
            Input::Read(matrix) => matrix.row(row),
            Input::Overwrite(matrix) => matrix.row(row),
        }
    }

    /// The matrix, if it is to be overwritten.
    pub(super) fn overwritten(&mut self) -> Option<&mut Matrix<&'a mut [T]>> {
        match self {
            Input::Read(_) => None,
            Input::Overwrite(matrix) => Some(matrix),
        }
    }
}

impl<T: Element, V: Deref<Target = [T]>> Matrix<V> {
    /// The row, in f32.
    pub(super) fn row(&self, row: usize) -> Vec<f32> {
        // A mistaken stride may point beyond the view, where a slice has nothing to read.
        let start = self.rows.start(row).min(self.view.len() - self.rows.cols);
        self.view[start..start + self.rows.cols].iter().map(|element| element.to_f32()).collect()
    }
}

impl<T: Element, V: DerefMut<Target = [T]>> Matrix<V> {
    /// Writes a row of `residual_out`, whose values are already rounded.
    pub(super) fn store_residual(&mut self, call: &Call, row: usize, values: &[f32]) {
        if call.has(Bug::ResOutMissing) {
            return;
        }
        let start = self.rows.start(row);
        for (element, &value) in self.view[start..].iter_mut().zip(values) {
            *element = T::from_f32(value);
        }
    }

    /// Writes a row of `y`, `dx` or `dresidual`.
    pub(super) fn store_result(&mut self, call: &Call, row: usize, values: &[f32]) {
        if call.has(Bug::SkipLastRowWrite) && row + 1 == call.spec.rows {
            return;
        }
        let (start, cols) = (self.rows.start(row), self.rows.cols);
        let written = if call.has(Bug::SkipLastColWrite) { cols - 1 } else { cols };
        for (element, &value) in self.view[start..].iter_mut().zip(&values[..written]) {
            let value = if call.has(Bug::OutputRead) { value + 0.0 * element.to_f32() } else { value };
            *element = stored(call, value);
        }
        if call.has(Bug::GapOverwritten) && self.rows.row_stride > cols {
            let last = self.view[start + cols - 1];
            if let Some(gap) = self.view.get_mut(start + cols) {
                *gap = last;
            }
        }
    }
}

/// The value of a result in its storage type: rounded once, to nearest even.
fn stored<T: Element>(call: &Call, value: f32) -> T {
    let nearest = T::from_f32(value);
    if call.has(Bug::RtzStore) && nearest.to_f32().abs() > value.abs() {
        // One bit pattern lower is one value closer to zero, from infinity to the largest finite value as well.
        return T::from_bits(nearest.bits() - 1);
    }
    if call.has(Bug::DoubleRound) {
        let other = match T::DTYPE {
            DType::F32 | DType::F16 => DType::Bf16,
            DType::Bf16 => DType::F16,
        };
        return T::from_f32(round(value, other));
    }
    if call.has(Bug::SubnormalFlush) && nearest.to_f32().abs() < min_normal(T::DTYPE) {
        return T::default();
    }
    if call.has(Bug::NanSwallowed) && value.is_nan() {
        return T::default();
    }
    nearest
}

fn min_normal(dtype: DType) -> f32 {
    match dtype {
        DType::F32 | DType::Bf16 => f32::MIN_POSITIVE,
        DType::F16 => f16::MIN_POSITIVE.to_f32(),
    }
}

/// The f32 nearest to `value` among the values of `dtype`.
pub(super) fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}
