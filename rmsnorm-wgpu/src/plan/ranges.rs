//! How tensors lie, what that means for the access to them, and the ranges of rows that bindings and grids take.

use std::ops::Range;

use rmsnorm_spec::quant::ScaleLayout;
use rmsnorm_spec::{DType, Problem, Storage, Tensor, TensorShape};

use super::{Access, Unfit, is_split, stream};
use crate::caps::Caps;

/// Where a tensor begins in its buffer, and how far apart its rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) storage: Storage,
    /// Bytes.
    pub(crate) offset: u64,
    /// Elements; 0 for a vector.
    pub(crate) row_stride: u64,
    /// Elements from group to group; 0 for a vector, and where no rows of the call lie in groups.
    pub(crate) group_stride: u64,
}

/// The most bytes between the rows of some matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spacing {
    /// From a row to the next, also to that of the next group; 0 where there are no such matrices.
    row: u64,
    /// From group to group; 0 where no rows lie in groups.
    group: u64,
}

/// What a plan depends on besides the problem and the device: nothing that decides who owns which columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Access of the main programs.
    pub(crate) access: Access,
    /// Access of the second stage of the gradients.
    pub(crate) reduce_access: Access,
    /// Whether an input of the main programs shares its buffer with a tensor that they write.
    pub(crate) is_aliased: bool,
    /// Whether dweight or dbias shares its buffer with the workspace.
    pub(crate) reduce_aliased: bool,
    /// How scales are written that are bytes: by the word, where a word has those of one row.
    pub(crate) scales_access: Access,
    /// Access of the program that transposes codes.
    pub(crate) transpose_access: Access,
    /// Of the matrices of 8-bit codes, of 16-bit elements, and of f32.
    pub(super) spacing: [Spacing; 3],
}

/// Bytes of an element of the matrices that have a [`Spacing`] each.
const SIZES: [usize; 3] = [1, 2, 4];

impl Layout {
    /// `tensors` are the matrices, weight and bias, as far as the call has them, `gradients` dweight and dbias.
    pub(crate) fn new(
        problem: &Problem,
        tensors: impl IntoIterator<Item = Placed>,
        gradients: impl IntoIterator<Item = Placed>,
        is_aliased: bool,
        reduce_aliased: bool,
    ) -> Self {
        let cols = problem.cols as u64;
        let (mut access, mut spacing) = (Access::Aligned, [Spacing::default(); 3]);
        for tensor in tensors {
            // There is no second row to be apart.
            let row_stride = if problem.rows > 1 { tensor.row_stride } else { 0 };
            let tensor = Placed { row_stride, ..tensor };
            access = access.max(tensor.access(cols, is_split(problem)));
            for (widest, _) in spacing.iter_mut().zip(SIZES).filter(|(_, size)| *size == tensor.storage.size()) {
                *widest = widest.max(tensor.spacing(problem));
            }
        }
        // The second stage moves one quad a thread.
        let accesses = gradients.into_iter().map(|tensor| tensor.access(cols, true));
        let reduce_access = accesses.max().unwrap_or(Access::Aligned);
        let [scales_access, transpose_access] = [Access::Words; 2];
        Layout { access, reduce_access, is_aliased, reduce_aliased, scales_access, transpose_access, spacing }
    }

    /// With scales, and codes that are transposed, which lie so.
    pub(crate) fn with_codes(self, problem: &Problem, scales: Option<Placed>, transposed: [Option<Placed>; 2]) -> Self {
        let groups = problem.quant.and_then(|quant| match quant.layout {
            // The others have a row's scales in whole words.
            ScaleLayout::RowMajor => quant.scale.groups(problem.cols),
            ScaleLayout::ColumnMajor { .. } | ScaleLayout::PackedUe8m0 { .. } | ScaleLayout::Swizzled128x4 => None,
        });
        let accesses = scales.map(|scales| scales.access(groups.unwrap_or(0) as u64, true)).into_iter();
        let scales_access = accesses.fold(Access::Words, Access::max);
        // Rows of codes are columns of the other, which has as many rows as there are columns.
        let lengths = [problem.cols, problem.rows];
        let accesses = transposed.into_iter().zip(lengths).zip([problem.rows, problem.cols]).filter_map(
            |((placed, len), rows)| {
                let placed = placed?;
                let row_stride = if rows > 1 { placed.row_stride } else { 0 };
                Some(Placed { row_stride, ..placed }.access(len as u64, true))
            },
        );
        Layout { scales_access, transpose_access: accesses.fold(Access::Words, Access::max), ..self }
    }

    /// Rows side by side from the start of their buffers: what other layouts are not denser than.
    pub(crate) fn dense(problem: &Problem) -> Self {
        let row_stride = problem.cols as u64;
        let group_stride = problem.rows_per_group.map_or(0, |rows| row_stride.saturating_mul(rows as u64));
        let placed = |dtype: DType| Placed { storage: dtype.into(), offset: 0, row_stride, group_stride };
        let codes =
            problem.storage(Tensor::Codes).map(|storage| Placed { storage, ..placed(problem.dtypes.activation) });
        let matrices = std::iter::once(problem.dtypes.activation).chain(stream(problem)).map(placed).chain(codes);
        let gradients = [Tensor::Dweight, Tensor::Dbias].into_iter().filter(|gradient| problem.has(*gradient));
        let gradients = gradients.filter_map(|gradient| Some(Placed::vector(problem.storage(gradient)?, 0)));
        let scales = problem.storage(Tensor::Scales).map(|storage| Placed::vector(storage, 0));
        let codes_t = codes.map(|codes| Placed { row_stride: problem.rows as u64, group_stride: 0, ..codes });
        Layout::new(problem, matrices, gradients, false, false).with_codes(problem, scales, [codes, codes_t])
    }
}

impl Spacing {
    fn max(self, other: Spacing) -> Spacing {
        Spacing { row: self.row.max(other.row), group: self.group.max(other.group) }
    }

    /// Rows that at most so many bytes reach from the first to the start of the last, wherever in its group the first is.
    fn rows_within(self, bytes: u64, rows_per_group: Option<usize>) -> u64 {
        let by_rows = bytes / self.row;
        let by_groups =
            bytes.checked_div(self.group).zip(rows_per_group).map_or(0, |(groups, rows)| groups * rows as u64);
        by_rows.max(by_groups) + 1
    }
}

impl Placed {
    pub(crate) const fn vector(storage: Storage, offset: u64) -> Self {
        Placed { storage, offset, row_stride: 0, group_stride: 0 }
    }

    fn spacing(&self, problem: &Problem) -> Spacing {
        let Placed { row_stride, group_stride, .. } = *self;
        // From the last row of a group to the first of the next.
        let within = |rows: usize| row_stride.saturating_mul(rows as u64 - 1);
        let between = problem.rows_per_group.map_or(0, |rows| group_stride.saturating_sub(within(rows)));
        let bytes = |elements: u64| elements.saturating_mul(self.storage.size() as u64);
        Spacing { row: bytes(row_stride.max(between)), group: bytes(group_stride) }
    }

    /// How a tensor of rows of `cols` elements can be read and written. Where f32 matrices are read beside others, what is
    /// narrower moves by the quad, else by two quads.
    fn access(&self, cols: u64, is_split: bool) -> Access {
        let size = self.storage.size() as u64;
        let pack_bytes = match (size, is_split) {
            (4, _) | (2, false) => 16,
            (2, true) | (1, false) => 8,
            _ => 4,
        };
        let is_multiple = |bytes: u64| {
            [
                self.offset,
                cols.wrapping_mul(size),
                self.row_stride.wrapping_mul(size),
                self.group_stride.wrapping_mul(size),
            ]
            .into_iter()
            .all(|at| at.is_multiple_of(bytes))
        };
        if is_multiple(pack_bytes) {
            Access::Aligned
        } else if is_multiple(4) {
            Access::Words
        } else {
            Access::Parts
        }
    }
}

impl Access {
    /// That of a copy, whose tensors are a row of `len` elements each.
    pub(crate) fn of_copy(from_offset: u64, to_offset: u64, dtype: DType, len: u64) -> Self {
        let access = |offset| Placed::vector(dtype.into(), offset).access(len, dtype == DType::F32);
        access(from_offset).max(access(to_offset))
    }
}

/// The most rows that one dispatch may have: as many as every binding reaches, and `rows_per_workgroup` for each workgroup
/// of a grid.
///
/// # Errors
/// [`Unfit::Row`]
pub(super) fn most_rows(
    problem: &Problem,
    layout: &Layout,
    rows_per_workgroup: u32,
    caps: &Caps,
) -> Result<u64, Unfit> {
    let available = caps.available_bytes();
    // Parameters and their gradients are bound whole, and may be wider than the matrices.
    let vectors = problem.tensors.iter().filter(|tensor| tensor.shape() == TensorShape::Cols);
    let vectors = vectors.filter_map(|tensor| problem.storage(tensor)).map(Storage::size);
    let matrices = [Some(problem.dtypes.activation), stream(problem)].into_iter().flatten().map(DType::size);
    let widest = matrices.chain(vectors).max();
    let bytes = (problem.cols as u64).saturating_mul(widest.unwrap_or_default() as u64);
    if bytes > available {
        return Err(Unfit::Row { bytes, most: available });
    }
    // mean and rstd have one f32 a row.
    let by_statistics = available / 4;
    let spaced = layout.spacing.iter().zip(SIZES).filter(|(spacing, _)| spacing.row > 0);
    let by_matrices = spaced.map(|(spacing, size)| {
        let row = (problem.cols * size) as u64;
        spacing.rows_within(available - row, problem.rows_per_group)
    });
    let by_grid = caps.most_groups() * u64::from(rows_per_workgroup);
    Ok(by_matrices.fold(by_statistics.min(by_grid), u64::min).max(1))
}

/// Ranges of at most that many rows, about even.
pub(super) fn even(rows: u64, most: u64) -> impl ExactSizeIterator<Item = Range<u64>> {
    let ranges = rows.div_ceil(most.max(1)).max(1);
    split(rows, rows.div_ceil(ranges))
}

/// Ranges of `size`, the last of what is left.
pub(super) fn split(len: u64, size: u64) -> impl ExactSizeIterator<Item = Range<u64>> {
    let size = size.max(1);
    // A call of more ranges than 32 bits count has more rows than any memory.
    let count = u32::try_from(len.div_ceil(size)).unwrap_or(u32::MAX) as usize;
    (0..count).map(move |index| {
        let start = index as u64 * size;
        start..len.min(start + size)
    })
}

/// Workgroups in two dimensions, at least so many: rows of workgroups of about equal length, since a surplus one costs
/// as much as an empty one. With 65535 and one workgroup left over, a copy took a quarter longer on an H200.
///
/// # Errors
/// [`Unfit::Grid`]
pub(super) fn grid(groups: u64, caps: &Caps) -> Result<[u32; 2], Unfit> {
    let most = caps.most_groups();
    if groups > most {
        return Err(Unfit::Grid { groups, most });
    }
    // Both are at most 65535 now.
    let y = groups.div_ceil(u64::from(caps.groups_per_dimension.clamp(1, 65535))).max(1);
    Ok([groups.div_ceil(y).max(1) as u32, y as u32])
}
