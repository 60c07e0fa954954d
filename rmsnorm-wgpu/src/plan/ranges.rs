//! Layouts of tensors, the access that they allow, and ranges of rows that fit bindings and grids.

use std::ops::Range;

use rmsnorm_spec::quant::ScaleLayout;
use rmsnorm_spec::{DType, Problem, Storage, Tensor, TensorSet, TensorShape};

use super::{Access, PlanError, is_split, sharing, stream, width};
use crate::caps::Caps;

/// Position of a tensor in its buffer, and its strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) storage: Storage,
    /// Bytes.
    pub(crate) offset: u64,
    /// Elements; 0 for a vector.
    pub(crate) row_stride: u64,
    /// Elements between groups; 0 for a vector, and for calls without groups.
    pub(crate) group_stride: u64,
}

/// The largest row and group strides of some matrices, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Spacing {
    /// Between rows, including the last of a group and the first of the next; 0 without such
    /// matrices.
    row: u64,
    /// Between groups; 0 if rows are not in groups.
    group: u64,
}

/// The inputs of a plan other than problem and device. They do not affect the assignment of columns
/// to threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Access of the main programs.
    pub(crate) access: Access,
    /// Access of the second phase of the gradients.
    pub(crate) reduce_access: Access,
    /// Whether an input of the main programs shares its buffer with one of their outputs.
    pub(crate) is_aliased: bool,
    /// Whether dweight or dbias shares its buffer with the workspace.
    pub(crate) reduce_aliased: bool,
    /// How byte scales are written: by word, if each word has scales of one row only.
    pub(crate) scales_access: Access,
    /// Access of the program that transposes codes.
    pub(crate) transpose_access: Access,
    /// For matrices of 8-bit codes, of 16-bit elements, and of f32.
    pub(super) spacing: [Spacing; 3],
}

/// Element sizes of the matrices of each [`Spacing`].
const SIZES: [usize; 3] = [1, 2, 4];

impl Layout {
    /// `tensors`: the matrices, weight and bias that the call has. `gradients`: dweight and dbias.
    pub(crate) fn new(
        problem: &Problem,
        tensors: impl IntoIterator<Item = Placed>,
        gradients: impl IntoIterator<Item = Placed>,
        is_aliased: bool,
        reduce_aliased: bool,
    ) -> Self {
        let cols = width(problem) as u64;
        let (mut access, mut spacing) = (Access::Aligned, [Spacing::default(); 3]);
        for tensor in tensors {
            // With one row the stride does not matter.
            let row_stride = if problem.rows > 1 { tensor.row_stride } else { 0 };
            let tensor = Placed { row_stride, ..tensor };
            access = access.max(tensor.access(cols, is_split(problem)));
            for (widest, _) in spacing.iter_mut().zip(SIZES).filter(|(_, size)| *size == tensor.storage.size()) {
                *widest = widest.max(tensor.spacing(problem));
            }
        }
        // The second phase moves one quad per thread.
        let accesses = gradients.into_iter().map(|tensor| tensor.access(cols, true));
        let reduce_access = accesses.max().unwrap_or(Access::Aligned);
        let [scales_access, transpose_access] = [Access::Words; 2];
        Layout { access, reduce_access, is_aliased, reduce_aliased, scales_access, transpose_access, spacing }
    }

    /// Adds the positions of scales and of transposed codes.
    pub(crate) fn with_codes(self, problem: &Problem, scales: Option<Placed>, transposed: [Option<Placed>; 2]) -> Self {
        let groups = problem.quant.and_then(|quant| match quant.layout {
            // The other layouts store the scales of a row in whole words.
            ScaleLayout::RowMajor => quant.scale.groups(problem.cols),
            ScaleLayout::ColumnMajor { .. } | ScaleLayout::PackedUe8m0 { .. } | ScaleLayout::Swizzled128x4 => None,
        });
        let accesses = scales.map(|scales| scales.access(groups.unwrap_or(0) as u64, true)).into_iter();
        let scales_access = accesses.fold(Access::Words, Access::max);
        // Codes are (rows, cols), transposed codes (cols, rows).
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

    /// Contiguous rows from the start of their buffers: no layout is denser.
    pub(crate) fn dense(problem: &Problem) -> Self {
        let row_stride = problem.cols as u64;
        let group_stride = problem.rows_per_group.map_or(0, |rows| row_stride.saturating_mul(rows as u64));
        let placed = |dtype: DType| Placed { storage: dtype.into(), offset: 0, row_stride, group_stride };
        let codes =
            problem.storage(Tensor::Codes).map(|storage| Placed { storage, ..placed(problem.dtypes.activation) });
        let matrices = std::iter::once(problem.dtypes.activation).chain(stream(problem)).map(placed).chain(codes);
        let gradients = problem
            .tensors
            .intersection(TensorSet::SUMS_OVER_ROWS)
            .iter()
            .filter_map(|gradient| Some(Placed::vector(problem.storage(gradient)?, 0)));
        let scales = problem.storage(Tensor::Scales).map(|storage| Placed::vector(storage, 0));
        let codes_t = codes.map(|codes| Placed { row_stride: problem.rows as u64, group_stride: 0, ..codes });
        Layout::new(problem, matrices, gradients, false, false).with_codes(problem, scales, [codes, codes_t])
    }
}

impl Spacing {
    fn max(self, other: Spacing) -> Spacing {
        Spacing { row: self.row.max(other.row), group: self.group.max(other.group) }
    }

    /// Rows such that the first and the start of the last are at most `bytes` apart, for every
    /// position of the first in its group.
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

    /// The access of a tensor with rows of `cols` elements. In calls that also have f32 matrices,
    /// narrower matrices move by one quad, otherwise by two.
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
    /// The access of a copy: both tensors are one row of `len` elements.
    pub(crate) fn of_copy(from_offset: u64, to_offset: u64, dtype: DType, len: u64) -> Self {
        let access = |offset| Placed::vector(dtype.into(), offset).access(len, dtype == DType::F32);
        access(from_offset).max(access(to_offset))
    }
}

/// Maximum rows of a dispatch: limited by every binding, and by `rows_per_workgroup` times the
/// largest grid.
///
/// # Errors
/// [`PlanError::Row`]
pub(super) fn most_rows(
    problem: &Problem,
    layout: &Layout,
    rows_per_workgroup: u32,
    caps: &Caps,
) -> Result<u64, PlanError> {
    let available = caps.available_bytes();
    // Parameters and their gradients are bound whole, and may be wider than the matrices.
    let vectors = problem.tensors.iter().filter(|tensor| tensor.shape() == TensorShape::Cols);
    let vectors = vectors.filter_map(|tensor| problem.storage(tensor)).map(Storage::size);
    let matrices = [Some(problem.dtypes.activation), stream(problem)].into_iter().flatten().map(DType::size);
    let widest = matrices.chain(vectors).max();
    let bytes = (problem.cols as u64).saturating_mul(widest.unwrap_or_default() as u64);
    if bytes > available {
        return Err(PlanError::Row { bytes, most: available });
    }
    // mean and rstd have one f32 per row, or per group of its columns.
    let by_statistics = sharing::most_rows(problem, caps).unwrap_or(available / 4 / problem.groups as u64);
    let spaced = layout.spacing.iter().zip(SIZES).filter(|(spacing, _)| spacing.row > 0);
    let by_matrices = spaced.map(|(spacing, size)| {
        let row = (problem.cols * size) as u64;
        spacing.rows_within(available - row, problem.rows_per_group)
    });
    let by_grid = caps.most_groups() * u64::from(rows_per_workgroup);
    Ok(by_matrices.fold(by_statistics.min(by_grid), u64::min).max(1))
}

/// Ranges of at most `most` rows, about equally long.
pub(super) fn even(rows: u64, most: u64) -> impl ExactSizeIterator<Item = Range<u64>> {
    let ranges = rows.div_ceil(most.max(1)).max(1);
    split(rows, rows.div_ceil(ranges))
}

/// Ranges of `size`; the last may be shorter.
pub(super) fn split(len: u64, size: u64) -> impl ExactSizeIterator<Item = Range<u64>> {
    let size = size.max(1);
    // More than 2^32 ranges would exceed any memory.
    let count = u32::try_from(len.div_ceil(size)).unwrap_or(u32::MAX) as usize;
    (0..count).map(move |index| {
        let start = index as u64 * size;
        start..len.min(start + size)
    })
}

/// At least `groups` workgroups in two dimensions, with few surplus ones, since an empty workgroup
/// also costs time. Without this balance (65535 and one more in a second row) a copy took a quarter
/// longer on an H200.
///
/// # Errors
/// [`PlanError::Grid`]
pub(super) fn grid(groups: u64, caps: &Caps) -> Result<[u32; 2], PlanError> {
    let most = caps.most_groups();
    if groups > most {
        return Err(PlanError::Grid { groups, most });
    }
    // Both are at most 65535 now.
    let y = groups.div_ceil(u64::from(caps.groups_per_dimension.clamp(1, 65535))).max(1);
    Ok([groups.div_ceil(y).max(1) as u32, y as u32])
}
