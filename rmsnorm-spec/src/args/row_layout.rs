//! [`RowLayout`]: a tensor of any rank, as rows.

use super::Rows;

/// Where the rows of a tensor of any rank lie, if they lie at one distance: what other libraries' (dims, strides) come to.
///
/// # Example
/// The heads of the keys in a fused QKV buffer of (batch, tokens, 3 * heads * head_dim), normalized over `head_dim`:
/// ```
/// # use rmsnorm_spec::RowLayout;
/// let (tokens, heads, head_dim) = (7, 4, 64);
/// let row = 3 * heads * head_dim;
/// // One head of every token: rows that are apart.
/// let one = RowLayout::fold(&[2, tokens, head_dim], &[(tokens * row) as isize, row as isize, 1]);
/// assert_eq!(one.map(|one| (one.rows, one.cols, one.row_stride)), Some((2 * tokens, head_dim, row)));
/// // All heads: between the last of a token and the first of the next lie queries and values.
/// let all = RowLayout::fold(&[tokens, heads, head_dim], &[row as isize, head_dim as isize, 1]);
/// assert_eq!(all, None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RowLayout {
    /// The product of all dimensions but the last.
    pub rows: usize,
    /// The last dimension.
    pub cols: usize,
    /// Elements from the start of a row to the start of the next, at least `cols`.
    pub row_stride: usize,
}

impl RowLayout {
    /// The rows of a dense tensor. `None` for a tensor without dimensions, or one whose size exceeds `usize`.
    pub fn dense(dims: &[usize]) -> Option<Self> {
        let (&cols, batch) = dims.split_last()?;
        let rows = batch.iter().try_fold(1usize, |rows, dim| rows.checked_mul(*dim))?;
        rows.checked_mul(cols)?;
        Some(RowLayout { rows, cols, row_stride: cols })
    }

    /// The rows of a tensor with these strides, in elements.
    ///
    /// `None` if they lie at no common distance: the last dimension is not dense, rows overlap, are repeated (a stride of 0)
    /// or go backwards, or the dimensions before it do not follow one another at one stride. Dimensions of one element may
    /// have any stride. A copy is needed then.
    pub fn fold(dims: &[usize], strides: &[isize]) -> Option<Self> {
        let dense = RowLayout::dense(dims)?;
        if strides.len() != dims.len() {
            return None;
        }
        if dense.rows == 0 || dense.cols == 0 {
            return Some(dense);
        }
        let mut outer = dims.iter().zip(strides).rev();
        if outer.next().is_some_and(|(&cols, &stride)| cols > 1 && stride != 1) {
            return None;
        }
        let (mut row_stride, mut next) = (None, None);
        for (&dim, &stride) in outer.filter(|(dim, _)| **dim > 1) {
            let stride = usize::try_from(stride).ok()?;
            if next.is_some_and(|next| stride != next) {
                return None;
            }
            row_stride = row_stride.or(Some(stride));
            next = Some(stride.checked_mul(dim)?);
        }
        let row_stride = row_stride.unwrap_or(dense.cols);
        (row_stride >= dense.cols).then_some(RowLayout { row_stride, ..dense })
    }

    /// Elements from the first to the one after the last; 0 without rows.
    pub const fn span(&self) -> usize {
        if self.rows == 0 { 0 } else { (self.rows - 1) * self.row_stride + self.cols }
    }

    /// A view of these rows, which begins with the first element.
    pub const fn rows<V>(&self, view: V) -> Rows<V> {
        Rows::strided(view, self.row_stride)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(rows: usize, cols: usize, row_stride: usize) -> Option<RowLayout> {
        Some(RowLayout { rows, cols, row_stride })
    }

    #[test]
    fn dense_tensors_are_rows_side_by_side() {
        assert_eq!(RowLayout::dense(&[2, 3, 4]), layout(6, 4, 4));
        assert_eq!(RowLayout::dense(&[5]), layout(1, 5, 5));
        assert_eq!(RowLayout::dense(&[]), None);
        assert_eq!(RowLayout::dense(&[usize::MAX, 2]), None);
        assert_eq!(RowLayout::fold(&[2, 3, 4], &[12, 4, 1]), layout(6, 4, 4));
        assert_eq!(RowLayout::fold(&[0, 4], &[4, 1]), layout(0, 4, 4));
        assert_eq!(RowLayout::fold(&[3, 0], &[-7, 0]), layout(3, 0, 0));
    }

    #[test]
    fn rows_at_one_distance_fold_and_others_do_not() {
        // Slices of a fused buffer.
        assert_eq!(RowLayout::fold(&[6, 4], &[12, 1]), layout(6, 4, 12));
        assert_eq!(RowLayout::fold(&[2, 3, 4], &[36, 12, 1]), layout(6, 4, 12));
        // Any stride where there is one element.
        assert_eq!(RowLayout::fold(&[1, 3, 4], &[-5, 12, 1]), layout(3, 4, 12));
        assert_eq!(RowLayout::fold(&[3, 1, 4], &[12, 0, 1]), layout(3, 4, 12));
        assert_eq!(RowLayout::fold(&[3, 1], &[2, 77]), layout(3, 1, 2));
        assert_eq!(RowLayout::fold(&[1, 4], &[0, 1]), layout(1, 4, 4));
        for (dims, strides) in [
            (&[2usize, 3, 4][..], &[40isize, 12, 1][..]),
            (&[3, 4], &[1, 3]),
            (&[3, 4], &[4, -1]),
            (&[3, 4], &[0, 1]),
            (&[3, 4], &[3, 1]),
            (&[3, 4], &[-4, 1]),
            (&[2, 3, 4], &[0, 4, 1]),
            (&[3, 4], &[4]),
        ] {
            assert_eq!(RowLayout::fold(dims, strides), None, "{dims:?} {strides:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

        /// Every element is where the strides say, and what does not fold has an element that is elsewhere.
        #[test]
        fn folding_moves_no_element(dims in prop::collection::vec(1usize..4, 1..5), pads in prop::collection::vec(0usize..3, 5)) {
            // Strides of a tensor that was cut out of a larger one, in each dimension.
            let mut strides = vec![1isize; dims.len()];
            for i in (0..dims.len() - 1).rev() {
                strides[i] = strides[i + 1] * (dims[i + 1] + pads[i]) as isize;
            }
            let count: usize = dims.iter().product();
            let at = |mut index: usize| {
                let mut offset = 0;
                for (dim, stride) in dims.iter().zip(&strides).rev() {
                    offset += (index % dim) as isize * stride;
                    index /= dim;
                }
                offset as usize
            };
            let cols = dims[dims.len() - 1];
            match RowLayout::fold(&dims, &strides) {
                Some(folded) => {
                    for index in 0..count {
                        prop_assert_eq!(at(index), index / cols * folded.row_stride + index % cols);
                    }
                    prop_assert_eq!(folded.span(), at(count - 1) + 1);
                }
                None => {
                    let stride = at(cols.min(count - 1));
                    prop_assert!((0..count).any(|index| at(index) != index / cols * stride + index % cols));
                }
            }
        }
    }
}
