//! [`Rows`]: a view and the distances between its rows.

use super::{RowGroups, RowLayout};
use crate::Stored;

/// A matrix: a view of its elements and the distances between its rows.
///
/// Wherever a call takes a matrix, a view of dense rows will do, `Rows::strided(view, row_stride)` where they are apart, and
/// [`Rows::grouped`] where they lie in groups. [`RowLayout::fold`] finds out which, from dimensions and strides.
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
    /// Where the rows are not all `row_stride` apart: the groups that they lie in.
    pub groups: Option<RowGroups>,
}

impl<V> Rows<V> {
    /// Rows without a gap between them.
    pub const fn dense(view: V) -> Self {
        Rows { view, row_stride: None, groups: None }
    }

    /// Rows that start `row_stride` elements after one another, which is at least `cols`.
    pub const fn strided(view: V, row_stride: usize) -> Self {
        Rows { view, row_stride: Some(row_stride), groups: None }
    }

    /// Rows at two distances: `row_stride` elements within a group, `groups.stride` from group to group. The last group may
    /// have fewer rows.
    ///
    /// Groups follow one another in memory. All matrices of a call that have groups have as many rows in each; rows that are
    /// all at one distance go with any.
    ///
    /// # Example
    /// All heads of the keys in a fused QKV buffer, each a row of its own:
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

    /// Another view of rows at the same distances.
    pub const fn with<U>(&self, view: U) -> Rows<U> {
        Rows { view, row_stride: self.row_stride, groups: self.groups }
    }

    /// Where the rows begin, in the form with the fewest strides: groups that lie `rows` row strides apart, that have one
    /// row, or of which there is one, are none. Of rows that no call would accept nothing is promised.
    pub fn layout(&self, rows: usize, cols: usize) -> RowLayout {
        RowLayout::new((rows, cols), self.row_stride.unwrap_or(cols), self.groups)
    }
}

impl<V> From<V> for Rows<V> {
    fn from(view: V) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Stored> From<&'a Vec<E>> for Rows<&'a [E]> {
    fn from(view: &'a Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Stored> From<&'a mut Vec<E>> for Rows<&'a mut [E]> {
    fn from(view: &'a mut Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Stored, const N: usize> From<&'a [E; N]> for Rows<&'a [E]> {
    fn from(view: &'a [E; N]) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Stored, const N: usize> From<&'a mut [E; N]> for Rows<&'a mut [E]> {
    fn from(view: &'a mut [E; N]) -> Self {
        Rows::dense(view)
    }
}

/// Several matrices in one view: the same rows, each time `stride` elements further on.
///
/// What ranks of a group have sent, one after the other (`stride` is `rows * cols`), or the results of a token's experts side by side
/// (`stride` is `cols`, and rows are `count * cols` apart).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// How many there are, at least 1.
    pub count: usize,
    /// Elements from an element of one to the same of the next, at least 1 where there are several, and rows.
    pub stride: usize,
}

impl Parts {
    /// Elements from an element of the first to the same of the last, if they can be counted.
    pub(crate) const fn span(self) -> Option<usize> {
        self.count.saturating_sub(1).checked_mul(self.stride)
    }
}

/// A matrix that is read, and perhaps overwritten by what the call computes from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<I, O> {
    /// It is read, and stays as it is; the result goes elsewhere.
    Read(Rows<I>),
    /// The result takes its place.
    Overwrite(Rows<O>),
}
