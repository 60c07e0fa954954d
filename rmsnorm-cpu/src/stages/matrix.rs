//! Rows of a matrix as slices, and the split of a matrix between two threads.

use rmsnorm_spec::{RowGroups, RowLayout};

use super::{Call, Split};
use crate::lanes::{Any, Elements, In, Numbers, Out, Piece, Simd};

/// The starts of the rows of a matrix, or of one thread's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowStarts {
    /// Elements from the start of a row to the start of the next row in its group.
    pub(crate) row_stride: usize,
    /// The groups of rows, and the number of rows of the first group that belong to the previous part.
    groups: Option<(RowGroups, usize)>,
    /// The groups of columns that count as rows, and the columns of a group.
    column_groups: (usize, usize),
}

impl RowStarts {
    /// Rows with one stride.
    pub(crate) const fn strided(row_stride: usize) -> Self {
        RowStarts { row_stride, groups: None, column_groups: (1, 0) }
    }

    /// The starts of a whole matrix.
    pub(crate) fn of(layout: RowLayout) -> Self {
        RowStarts { groups: layout.groups.map(|groups| (groups, 0)), ..RowStarts::strided(layout.row_stride) }
    }

    /// The starts of each row's `count` groups of `cols` columns.
    pub(crate) fn in_column_groups(self, count: usize, cols: usize) -> Self {
        RowStarts { column_groups: (count, cols), ..self }
    }

    /// Elements from the first row's start to this row's.
    #[inline(always)]
    pub(crate) fn start(&self, row: usize) -> usize {
        match self.column_groups {
            (1, _) => self.start_of_whole(row),
            (count, cols) => self.start_of_whole(row / count) + row % count * cols,
        }
    }

    #[inline(always)]
    fn start_of_whole(&self, row: usize) -> usize {
        match self.groups {
            None => row * self.row_stride,
            // The first row is `before` rows into its group.
            Some((groups, before)) => groups.start(self.row_stride, before + row) - before * self.row_stride,
        }
    }

    /// The starts of the rows from `row` on, which begins a whole row.
    fn from(self, row: usize) -> Self {
        let row = row / self.column_groups.0;
        RowStarts { groups: self.groups.map(|(groups, before)| (groups, (before + row) % groups.rows)), ..self }
    }
}

/// A matrix to read.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: In<'a, Any>,
    pub(crate) rows: RowStarts,
}

impl<'a> Matrix<'a> {
    /// A row of elements of this type, which must match their tag. While it is visited, the row `ahead` rows later is
    /// prefetched.
    #[inline(always)]
    pub(crate) fn row<T: Numbers>(&self, row: usize, cols: usize, ahead: usize) -> Row<'a, T> {
        let elements = self.data.known::<T>().part(self.rows.start(row), cols);
        Row { elements, ahead: ahead.wrapping_mul(self.rows.row_stride) }
    }
}

impl Matrix<'_> {
    /// With the groups of columns of each row as rows, if the call counts them so.
    pub(crate) fn in_column_groups(self, call: &Call) -> Self {
        Matrix { rows: self.rows.in_column_groups(call.column_groups, call.spec.cols), ..self }
    }
}

impl Split for Matrix<'_> {
    fn split_at(self, row: usize) -> (Self, Self) {
        let (low, high) = self.data.split_at(self.rows.start(row).min(self.data.len()));
        (Matrix { data: low, ..self }, Matrix { data: high, rows: self.rows.from(row) })
    }
}

/// A row to read.
#[derive(Clone, Copy)]
pub(crate) struct Row<'r, T: Elements> {
    pub(crate) elements: In<'r, T>,
    /// Elements to the row to prefetch.
    ahead: usize,
}

impl<T: Numbers> Row<'_, T> {
    /// No elements.
    #[inline(always)]
    pub(crate) fn none(tag: T::Tag) -> Self {
        Row { elements: In::none(tag), ahead: 0 }
    }

    #[inline(always)]
    pub(crate) fn load<S: Simd, P: Piece>(self, piece: P) -> S::Lanes {
        self.elements.load::<S, P>(piece)
    }

    /// Prefetches the same piece of the row to prefetch.
    #[inline(always)]
    pub(crate) fn prefetch<S: Simd, P: Piece>(self, piece: P) {
        self.elements.prefetch::<S, P>(self.ahead, piece);
    }
}

/// A matrix to write or overwrite.
pub(crate) struct MatrixMut<'a, T: Elements = Any> {
    pub(crate) data: Out<'a, T>,
    pub(crate) rows: RowStarts,
}

impl<T: Elements> MatrixMut<'_, T> {
    /// The whole matrix, reborrowed.
    pub(crate) fn reborrow(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: self.data.reborrow(), rows: self.rows }
    }

    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize, cols: usize) -> Out<'_, T> {
        self.data.part(self.rows.start(row), cols)
    }
}

impl MatrixMut<'_> {
    /// The whole matrix of elements of this type, which must match their tag.
    #[inline(always)]
    pub(crate) fn known<T: Numbers>(&mut self) -> MatrixMut<'_, T> {
        MatrixMut { data: self.data.reborrow().known(), rows: self.rows }
    }

    /// A row of elements of this type, which must match their tag.
    #[inline(always)]
    pub(crate) fn row_of<T: Numbers>(&mut self, row: usize, cols: usize) -> Out<'_, T> {
        let start = self.rows.start(row);
        self.data.reborrow().known::<T>().into_part(start, cols)
    }
}

impl<T: Elements> Split for MatrixMut<'_, T> {
    fn split_at(self, row: usize) -> (Self, Self) {
        let rows = self.rows;
        let at = rows.start(row).min(self.data.len());
        let (low, high) = self.data.split_at(at);
        (MatrixMut { data: low, rows }, MatrixMut { data: high, rows: rows.from(row) })
    }
}
