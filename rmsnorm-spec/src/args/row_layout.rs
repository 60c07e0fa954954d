//! [`RowLayout`]: a tensor of any rank as rows with one stride or two.

use super::Rows;

/// Rows in groups, such as the heads of each token in a fused QKV buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowGroups {
    /// Rows of a group, at least 1. The last group may have fewer.
    pub rows: usize,
    /// Elements from the first row of a group to the first row of the next.
    pub stride: usize,
}

impl RowGroups {
    /// Elements from the start of the first row to the start of `row`, if rows of a group are
    /// `row_stride` apart.
    pub const fn start(self, row_stride: usize, row: usize) -> usize {
        row / self.rows * self.stride + row % self.rows * row_stride
    }

    /// Elements from the start of the first row to the end of the last group's stride, for `rows`
    /// rows; `None` if they exceed `usize`.
    pub fn padded_span(self, rows: usize) -> Option<usize> {
        rows.div_ceil(self.rows).checked_mul(self.stride)
    }

    /// Whether each group begins exactly one row stride after the last row of the previous group.
    fn are_at(&self, row_stride: usize) -> bool {
        self.rows.checked_mul(row_stride) == Some(self.stride)
    }
}

/// The positions of the rows of a tensor of any rank: [`fold`](Self::fold) makes it from other
/// libraries' dimensions and strides, and a checked call has it.
///
/// # Example
/// The heads of the keys in a fused QKV buffer of (batch, tokens, 3 * heads * head_dim), normalized
/// over `head_dim`:
/// ```
/// # use rmsnorm_spec::{RowGroups, RowLayout};
/// let (tokens, heads, head_dim) = (7, 4, 64);
/// let token = 3 * heads * head_dim;
/// // One head of every token: strided rows.
/// let one = RowLayout::fold(&[2, tokens, head_dim], &[(tokens * token) as isize, token as isize, 1]);
/// assert_eq!(one.map(|one| (one.rows, one.row_stride, one.groups)), Some((2 * tokens, token, None)));
/// // All heads: queries and values lie between the last head of a token and the first of the next.
/// let all = RowLayout::fold(&[tokens, heads, head_dim], &[token as isize, head_dim as isize, 1]);
/// let groups = Some(RowGroups { rows: heads, stride: token });
/// assert_eq!(all.map(|all| (all.rows, all.row_stride, all.groups)), Some((tokens * heads, head_dim, groups)));
/// // Three strides are too many.
/// let half = [(2 * tokens * token) as isize, token as isize, head_dim as isize, 1];
/// assert_eq!(RowLayout::fold(&[2, tokens, heads, head_dim], &half), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct RowLayout {
    /// The product of all dimensions except the last.
    pub rows: usize,
    /// The last dimension.
    pub cols: usize,
    /// Elements from the start of a row to the start of the next row of its group, at least `cols`.
    pub row_stride: usize,
    /// The groups of the rows, if one stride does not describe them: at least two groups of at
    /// least two rows.
    pub groups: Option<RowGroups>,
}

impl RowLayout {
    /// The rows of a dense tensor. `None` for a tensor without dimensions, or if its size exceeds
    /// `usize`.
    pub fn dense(dims: &[usize]) -> Option<Self> {
        let (&cols, batch) = dims.split_last()?;
        let rows = batch.iter().try_fold(1usize, |rows, dim| rows.checked_mul(*dim))?;
        rows.checked_mul(cols)?;
        Some(RowLayout { rows, cols, row_stride: cols, groups: None })
    }

    /// The rows of a tensor with these strides, in elements.
    ///
    /// `None` if the rows need more than two strides, and a copy is needed: the last dimension is
    /// not dense, rows overlap, repeat (a stride of 0) or go backwards, or the other dimensions do
    /// not fold into two strides. Dimensions of one element may have any stride.
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
        // Runs of rows with one stride, innermost first: (stride, number of rows).
        let mut runs: [Option<(usize, usize)>; 2] = [None; 2];
        let mut run = 0;
        for (&dim, &stride) in outer.filter(|(dim, _)| **dim > 1) {
            let stride = usize::try_from(stride).ok()?;
            if let Some((distance, rows)) = *runs.get(run)?
                && distance.checked_mul(rows)? != stride
            {
                run += 1;
            }
            let (distance, rows) = runs.get(run)?.unwrap_or((stride, 1));
            runs[run] = Some((distance, rows.checked_mul(dim)?));
        }
        let (row_stride, rows) = runs[0].unwrap_or((dense.cols, 1));
        let groups = runs[1].map(|(stride, _)| RowGroups { rows, stride });
        let folded = RowLayout::new((dense.rows, dense.cols), row_stride, groups);
        (folded.follow_one_another() && folded.padded_span().is_some()).then_some(folded)
    }

    /// The form with the fewest strides, of any strides.
    pub(crate) fn new((rows, cols): (usize, usize), row_stride: usize, groups: Option<RowGroups>) -> Self {
        let (row_stride, groups) = match groups {
            Some(groups) if groups.rows == 1 => (groups.stride, None),
            // Groups without rows stay, and are refused later.
            Some(groups) if groups.rows > 0 && (groups.rows >= rows || groups.are_at(row_stride)) => (row_stride, None),
            groups => (row_stride, groups),
        };
        RowLayout { rows, cols, row_stride, groups }
    }

    /// Whether each row, and each group, begins after the end of the previous one.
    pub(crate) fn follow_one_another(&self) -> bool {
        let group = |rows: usize| (rows - 1).checked_mul(self.row_stride)?.checked_add(self.cols);
        let are_apart =
            |groups: RowGroups| groups.rows > 0 && group(groups.rows).is_some_and(|len| len <= groups.stride);
        self.row_stride >= self.cols && self.groups.is_none_or(are_apart)
    }

    /// Elements from group to group, in a call whose grouped matrices have `rows_per_group` rows in
    /// each; also for a matrix with one stride. 0 if no matrix has groups.
    pub fn group_stride(&self, rows_per_group: Option<usize>) -> usize {
        // Does not overflow: the matrix has more rows than a group, and fits the address space.
        let dense = rows_per_group.map_or(0, |rows| rows * self.row_stride);
        self.groups.map_or(dense, |groups| groups.stride)
    }

    /// Elements to the end of the last row's stride, or of the last group's; `None` if they exceed
    /// `usize`.
    pub(crate) fn padded_span(&self) -> Option<usize> {
        match self.groups {
            Some(groups) => groups.padded_span(self.rows),
            None => self.rows.checked_mul(self.row_stride),
        }
    }

    /// Elements from the start of the first row to the start of `row`. Wraps, or divides by zero,
    /// only for a layout that every call refuses.
    pub const fn start(&self, row: usize) -> usize {
        match self.groups {
            Some(groups) => groups.start(self.row_stride, row),
            None => row * self.row_stride,
        }
    }

    /// Elements from the first to one past the last; 0 if there are no rows or no columns.
    pub const fn span(&self) -> usize {
        if self.rows == 0 || self.cols == 0 { 0 } else { self.start(self.rows - 1) + self.cols }
    }

    /// `view` as a matrix with these strides; it begins with the first element of row 0.
    pub const fn rows<V>(&self, view: V) -> Rows<V> {
        Rows { view, row_stride: Some(self.row_stride), groups: self.groups }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(rows: usize, cols: usize, row_stride: usize) -> Option<RowLayout> {
        Some(RowLayout { rows, cols, row_stride, groups: None })
    }

    fn grouped(rows: usize, cols: usize, row_stride: usize, groups: (usize, usize)) -> Option<RowLayout> {
        let groups = Some(RowGroups { rows: groups.0, stride: groups.1 });
        Some(RowLayout { rows, cols, row_stride, groups })
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
    fn rows_at_one_distance_or_two_fold_and_others_do_not() {
        // Slices of a fused buffer.
        assert_eq!(RowLayout::fold(&[6, 4], &[12, 1]), layout(6, 4, 12));
        assert_eq!(RowLayout::fold(&[2, 3, 4], &[36, 12, 1]), layout(6, 4, 12));
        // Any stride for dimensions of one element.
        assert_eq!(RowLayout::fold(&[1, 3, 4], &[-5, 12, 1]), layout(3, 4, 12));
        assert_eq!(RowLayout::fold(&[3, 1, 4], &[12, 0, 1]), layout(3, 4, 12));
        assert_eq!(RowLayout::fold(&[3, 1], &[2, 77]), layout(3, 1, 2));
        assert_eq!(RowLayout::fold(&[1, 4], &[0, 1]), layout(1, 4, 4));
        // Groups: in a fused buffer, in dimensions that fold on either side, and of dense rows.
        assert_eq!(RowLayout::fold(&[2, 3, 4], &[40, 12, 1]), grouped(6, 4, 12, (3, 40)));
        assert_eq!(RowLayout::fold(&[5, 2, 1, 3, 4], &[80, 40, 7, 12, 1]), grouped(30, 4, 12, (3, 40)));
        assert_eq!(RowLayout::fold(&[5, 2, 3, 4], &[80, 24, 8, 1]), grouped(30, 4, 8, (6, 80)));
        assert_eq!(RowLayout::fold(&[2, 3, 4], &[20, 4, 1]), grouped(6, 4, 4, (3, 20)));
        for (dims, strides) in [
            // Three strides, groups within groups, and interleaved groups.
            (&[2usize, 2, 3, 4][..], &[200isize, 40, 12, 1][..]),
            (&[2, 3, 4], &[4, 12, 1]),
            (&[2, 3, 4], &[27, 12, 1]),
            (&[2, 3, 4], &[-40, 12, 1]),
            // Beyond the range of an index.
            (&[3, 4], &[isize::MAX, 1]),
            (&[3, 2, 4], &[isize::MAX, 4, 1]),
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

        /// Folding keeps the position of every element; a tensor that does not fold has an element
        /// at another position.
        #[test]
        fn folding_moves_no_element(dims in prop::collection::vec(1usize..4, 1..5), pads in prop::collection::vec(0usize..3, 5)) {
            // Strides of a tensor cut out of a larger one in each dimension.
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
                        prop_assert_eq!(at(index), folded.start(index / cols) + index % cols);
                    }
                    prop_assert_eq!(folded.span(), at(count - 1) + 1);
                }
                None => {
                    // No pair of strides and no group size describes all rows.
                    let rows = count / cols;
                    let first = |row: usize| at(row.min(rows - 1) * cols);
                    let is_form = |group: usize| {
                        (0..rows).all(|row| first(row) == row / group * first(group) + row % group * first(1))
                    };
                    prop_assert!(!(1..=rows).any(is_form));
                }
            }
        }
    }
}
