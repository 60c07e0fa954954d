//! Rows of a matrix as slices, and the split of a matrix between two threads.

use rmsnorm_spec::Element;

use crate::lanes::Out;

/// A matrix that is read.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, E> {
    pub(crate) data: &'a [E],
    pub(crate) row_stride: usize,
}

impl<'a, E: Element> Matrix<'a, E> {
    /// The same matrix under another name of its element type.
    pub(crate) fn cast<F: Element>(self) -> Matrix<'a, F> {
        Matrix { data: bytemuck::cast_slice(self.data), row_stride: self.row_stride }
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize, cols: usize) -> &'a [E] {
        &self.data[row * self.row_stride..][..cols]
    }

    /// The rows before `row`, and the others.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (low, high) = self.data.split_at((row * self.row_stride).min(self.data.len()));
        (Matrix { data: low, ..self }, Matrix { data: high, ..self })
    }
}

/// A matrix that is written, or overwritten.
pub(crate) struct MatrixMut<'a, E> {
    pub(crate) data: Out<'a, E>,
    pub(crate) row_stride: usize,
}

impl<'a, E: Element> MatrixMut<'a, E> {
    /// The same matrix under another name of its element type.
    pub(crate) fn cast<F: Element>(self) -> MatrixMut<'a, F> {
        MatrixMut { data: self.data.cast(), row_stride: self.row_stride }
    }

    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize, cols: usize) -> Out<'_, E> {
        self.data.part(row * self.row_stride, cols)
    }

    /// The rows before `row`, and the others.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let row_stride = self.row_stride;
        let at = (row * row_stride).min(self.data.len());
        let (low, high) = self.data.split_at(at);
        (MatrixMut { data: low, row_stride }, MatrixMut { data: high, row_stride })
    }
}
