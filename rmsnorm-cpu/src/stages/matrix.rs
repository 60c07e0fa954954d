//! Rows of a matrix as slices, and the split of a matrix between two threads.

use rmsnorm_spec::{RowGroups, RowLayout};

use crate::lanes::{Any, Elements, In, Numbers, Out};

/// The starts of the rows of a matrix, or of one thread's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowStarts {
    /// Elements from the start of a row to the start of the next row in its group.
    pub(crate) row_stride: usize,
    /// The groups, and the number of rows of the first group that belong to the previous part.
    groups: Option<(RowGroups, usize)>,
}

impl RowStarts {
    /// Rows with one stride.
    pub(crate) const fn strided(row_stride: usize) -> Self {
        RowStarts { row_stride, groups: None }
    }

    /// The starts of a whole matrix.
    pub(crate) fn of(layout: RowLayout) -> Self {
        RowStarts { row_stride: layout.row_stride, groups: layout.groups.map(|groups| (groups, 0)) }
    }

    /// Elements from the first row's start to this row's.
    #[inline(always)]
    pub(crate) fn start(&self, row: usize) -> usize {
        match self.groups {
            None => row * self.row_stride,
            // The first row is `before` rows into its group.
            Some((groups, before)) => groups.start(self.row_stride, before + row) - before * self.row_stride,
        }
    }

    /// The starts of the rows from `row` on.
    fn from(self, row: usize) -> Self {
        RowStarts { groups: self.groups.map(|(groups, before)| (groups, (before + row) % groups.rows)), ..self }
    }
}

/// A matrix to read.
pub(crate) struct Matrix<'a, T: Elements> {
    pub(crate) data: In<'a, T>,
    pub(crate) rows: RowStarts,
}

impl<T: Elements> Clone for Matrix<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Elements> Copy for Matrix<'_, T> {}

impl<'a, T: Elements> Matrix<'a, T> {
    #[inline(always)]
    pub(crate) fn row(&self, row: usize, cols: usize) -> In<'a, T> {
        self.data.part(self.rows.start(row), cols)
    }

    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let (low, high) = self.data.split_at(self.rows.start(row).min(self.data.len()));
        (Matrix { data: low, ..self }, Matrix { data: high, rows: self.rows.from(row) })
    }
}

impl<'a> Matrix<'a, Any> {
    /// The same matrix with a compile-time element type, which must match its tag.
    #[inline(always)]
    pub(crate) fn known<T: Numbers>(&self) -> Matrix<'a, T> {
        Matrix { data: self.data.known(), rows: self.rows }
    }
}

/// A matrix to write or overwrite.
pub(crate) struct MatrixMut<'a, T: Elements> {
    pub(crate) data: Out<'a, T>,
    pub(crate) rows: RowStarts,
}

impl<T: Elements> MatrixMut<'_, T> {
    /// The whole matrix, reborrowed.
    #[inline(always)]
    pub(crate) fn reborrow(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: self.data.reborrow(), rows: self.rows }
    }

    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize, cols: usize) -> Out<'_, T> {
        self.data.part(self.rows.start(row), cols)
    }

    /// The rows before `row`, and the rest.
    pub(crate) fn split_at(self, row: usize) -> (Self, Self) {
        let rows = self.rows;
        let at = rows.start(row).min(self.data.len());
        let (low, high) = self.data.split_at(at);
        (MatrixMut { data: low, rows }, MatrixMut { data: high, rows: rows.from(row) })
    }
}

impl MatrixMut<'_, Any> {
    /// The same matrix with a compile-time element type, which must match its tag.
    #[inline(always)]
    pub(crate) fn known<T: Numbers>(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: self.data.reborrow().known(), rows: self.rows }
    }
}
