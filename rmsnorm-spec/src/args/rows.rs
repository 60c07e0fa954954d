//! [`Rows`]: a view and the strides of its rows.

use super::{RowGroups, RowLayout};
use crate::AnyElement;

/// A matrix: a view of its elements and the strides of its rows.
///
/// Calls take a matrix as a view of dense rows, as `Rows::strided(view, row_stride)` for rows with
/// gaps, or as [`Rows::grouped`] for rows with two strides. [`RowLayout::fold`] converts dimensions
/// and strides to one of these.
///
/// # Example
/// The middle third of every row of a fused buffer of 3 * `cols` columns:
/// ```
/// # use rmsnorm_spec::Rows;
/// let (fused, cols) = ([0.0f32; 2 * 12], 4);
/// let middle: Rows<&[f32]> = Rows::strided(&fused[cols..2 * 12 - cols], 3 * cols);
/// let dense: Rows<&[f32]> = (&fused).into();
/// let row_stride = |rows: &Rows<_>| rows.layout(2, cols).row_stride;
/// assert_eq!((row_stride(&middle), row_stride(&dense)), (12, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rows<V> {
    /// The elements, from the first of row 0 to at least the last of the last row.
    pub view: V,
    /// Elements from the start of a row to the start of the next; `None` means `cols`.
    pub row_stride: Option<usize>,
    /// The groups of the rows, if a second stride separates groups of rows.
    pub groups: Option<RowGroups>,
}

impl<V> Rows<V> {
    /// Rows without a gap between them.
    pub const fn dense(view: V) -> Self {
        Rows { view, row_stride: None, groups: None }
    }

    /// Rows that start `row_stride` elements apart, at least `cols`.
    pub const fn strided(view: V, row_stride: usize) -> Self {
        Rows { view, row_stride: Some(row_stride), groups: None }
    }

    /// Rows with two strides: `row_stride` elements from row to row within a group, `groups.stride`
    /// from group to group. The last group may have fewer rows.
    ///
    /// Each group begins after the end of the previous one. All grouped matrices of a call must have
    /// the same number of rows in a group; matrices with one stride fit every grouping.
    ///
    /// # Example
    /// All heads of the keys in a fused QKV buffer, one row a head:
    /// ```
    /// # use rmsnorm_spec::{RowGroups, Rows};
    /// let (tokens, heads, head_dim) = (7, 4, 64);
    /// let token = 3 * heads * head_dim;
    /// let qkv = vec![0.0f32; tokens * token];
    /// let groups = RowGroups { rows: heads, stride: token };
    /// let keys: Rows<&[f32]> = Rows::grouped(&qkv[heads * head_dim..], head_dim, groups);
    /// // Head 1 of token 2.
    /// assert_eq!(keys.layout(tokens * heads, head_dim).start(2 * heads + 1), 2 * token + head_dim);
    /// ```
    pub const fn grouped(view: V, row_stride: usize, groups: RowGroups) -> Self {
        Rows { view, row_stride: Some(row_stride), groups: Some(groups) }
    }

    /// Another view with the same strides.
    pub const fn with<U>(&self, view: U) -> Rows<U> {
        Rows { view, row_stride: self.row_stride, groups: self.groups }
    }

    /// The layout in the form with the fewest strides: groups become a plain row stride if they are
    /// `rows` row strides apart, have one row, or if there is only one. Unspecified for rows that a
    /// call would refuse.
    pub fn layout(&self, rows: usize, cols: usize) -> RowLayout {
        RowLayout::new((rows, cols), self.row_stride.unwrap_or(cols), self.groups)
    }
}

impl<V> From<V> for Rows<V> {
    fn from(view: V) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: AnyElement> From<&'a Vec<E>> for Rows<&'a [E]> {
    fn from(view: &'a Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: AnyElement> From<&'a mut Vec<E>> for Rows<&'a mut [E]> {
    fn from(view: &'a mut Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: AnyElement, const N: usize> From<&'a [E; N]> for Rows<&'a [E]> {
    fn from(view: &'a [E; N]) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: AnyElement, const N: usize> From<&'a mut [E; N]> for Rows<&'a mut [E]> {
    fn from(view: &'a mut [E; N]) -> Self {
        Rows::dense(view)
    }
}

/// Several matrices in one view: the same rows, `stride` elements apart.
///
/// Examples: the addends of several ranks, one after the other (`stride` is `rows * cols`); the
/// results of a token's experts, side by side (`stride` is `cols`, the row stride `count * cols`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// The number of matrices, at least 1.
    pub count: usize,
    /// Elements from an element of one matrix to the same element of the next; at least 1 if there
    /// are several matrices and any rows.
    pub stride: usize,
}

impl Parts {
    /// Elements from an element of the first matrix to the same element of the last; `None` on
    /// overflow.
    pub(crate) const fn span(self) -> Option<usize> {
        self.count.saturating_sub(1).checked_mul(self.stride)
    }
}

/// A matrix that a call reads, or overwrites with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<I, O> {
    /// Only read; the result goes to another tensor.
    Read(Rows<I>),
    /// Overwritten with the result.
    Overwrite(Rows<O>),
}

impl<I, O> Source<I, O> {
    /// The matrix, if it is only read.
    pub(crate) fn read(self) -> Option<Rows<I>> {
        if let Source::Read(rows) = self { Some(rows) } else { None }
    }

    /// The matrix, if it is overwritten.
    pub(crate) fn overwritten(self) -> Option<Rows<O>> {
        if let Source::Overwrite(rows) = self { Some(rows) } else { None }
    }
}
