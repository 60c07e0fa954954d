//! [`Rows`]: a view and the distance between its rows.

use crate::Element;

/// A matrix: a view of its elements and the distance between its rows.
///
/// Wherever a call takes a matrix, a view of dense rows will do, and `Rows::strided(view, row_stride)` where they are
/// apart.
///
/// # Example
/// The middle third of every row of a fused buffer of 3 * `cols` columns:
/// ```
/// # use rmsnorm_spec::Rows;
/// let (fused, cols) = ([0.0f32; 2 * 12], 4);
/// let middle: Rows<&[f32]> = Rows::strided(&fused[cols..2 * 12 - cols], 3 * cols);
/// let dense: Rows<&[f32]> = (&fused).into();
/// assert_eq!((middle.stride(cols), dense.stride(cols)), (12, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rows<V> {
    /// The elements, from the first of row 0 to at least the last of the last row.
    pub view: V,
    /// Elements from the start of a row to the start of the next; `None` means `cols`.
    pub row_stride: Option<usize>,
}

impl<V> Rows<V> {
    /// Rows without a gap between them.
    pub const fn dense(view: V) -> Self {
        Rows { view, row_stride: None }
    }

    /// Rows that start `row_stride` elements after one another, which is at least `cols`.
    pub const fn strided(view: V, row_stride: usize) -> Self {
        Rows { view, row_stride: Some(row_stride) }
    }

    /// The distance between rows, in elements.
    pub fn stride(&self, cols: usize) -> usize {
        self.row_stride.unwrap_or(cols)
    }
}

impl<V> From<V> for Rows<V> {
    fn from(view: V) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Element> From<&'a Vec<E>> for Rows<&'a [E]> {
    fn from(view: &'a Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Element> From<&'a mut Vec<E>> for Rows<&'a mut [E]> {
    fn from(view: &'a mut Vec<E>) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Element, const N: usize> From<&'a [E; N]> for Rows<&'a [E]> {
    fn from(view: &'a [E; N]) -> Self {
        Rows::dense(view)
    }
}

impl<'a, E: Element, const N: usize> From<&'a mut [E; N]> for Rows<&'a mut [E]> {
    fn from(view: &'a mut [E; N]) -> Self {
        Rows::dense(view)
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
