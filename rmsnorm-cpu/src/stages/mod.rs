//! The arithmetic, one file per stage. Stages are generic over [`crate::lanes::Simd`] and over the
//! types of elements; `kernel` compiles them.

pub(crate) mod backward;
pub(crate) mod columns;
pub(crate) mod columnwise;
pub(crate) mod copy;
pub(crate) mod forward;
pub(crate) mod gate;
pub(crate) mod groups;
mod matrix;
pub(crate) mod quantized_forward;
pub(crate) mod ranks;
pub(crate) mod reduce_partials;
pub(crate) mod scaled;
pub(crate) mod transposed;

use rmsnorm_spec::{DTypes, NormSpec};

pub(crate) use matrix::{Matrix, MatrixMut, Row, RowStarts};

use crate::lanes::{Elements, Mix, Out, Simd};

/// The work of a stage, or one thread's part of it.
pub(crate) trait Stage {
    /// Does all the work. The types of `M` must match the tags of the elements.
    fn run<S: Simd, M: Mix>(&mut self);
}

/// A stage of common calls, which has a body for every mix of dtypes.
pub(crate) trait Common: Stage {
    fn dtypes(&self) -> DTypes;
}

/// Work or a tensor that can be divided among threads.
pub(crate) trait Split: Sized {
    /// The rows before `row`, and the rest. A stage that works on columns or blocks is split at those.
    fn split_at(self, row: usize) -> (Self, Self);
}

/// Implements [`Split`] for a struct: the fields before `;` are split, those after it are copied.
macro_rules! split {
    ([$($generics:tt)*] $name:ty { $($part:ident),*; $($same:ident),* }) => {
        impl<$($generics)*> $crate::stages::Split for $name {
            fn split_at(self, row: usize) -> (Self, Self) {
                $(let $part = $crate::stages::Split::split_at(self.$part, row);)*
                (Self { $($part: $part.0,)* $($same: self.$same),* }, Self { $($part: $part.1,)* $($same: self.$same),* })
            }
        }
    };
}
pub(crate) use split;

impl Split for () {
    fn split_at(self, _: usize) -> (Self, Self) {
        ((), ())
    }
}

impl<P: Split> Split for Option<P> {
    fn split_at(self, row: usize) -> (Self, Self) {
        self.map(|part| part.split_at(row)).unzip()
    }
}

/// One value per row.
impl<E: Elements> Split for Out<'_, E> {
    fn split_at(self, row: usize) -> (Self, Self) {
        self.split_at(row)
    }
}

/// One value per row.
impl Split for &[f32] {
    fn split_at(self, row: usize) -> (Self, Self) {
        self.split_at(row)
    }
}

/// The rows or columns of one task, where tensors are not split.
#[derive(Clone, Copy)]
pub(crate) struct Section {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

impl Split for Section {
    fn split_at(self, at: usize) -> (Self, Self) {
        (Section { len: at, ..self }, Section { first: self.first + at, len: self.len - at })
    }
}

/// The norm of a call, or of some of its rows.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// `rows` are those of this part.
    pub(crate) spec: NormSpec,
    pub(crate) dtypes: DTypes,
    pub(crate) streaming: bool,
    /// Groups of columns of a whole row, each of which is a row of `spec`; otherwise 1.
    pub(crate) column_groups: usize,
}

impl Call {
    /// The same norm with each group of columns as a row.
    pub(crate) fn in_column_groups(self) -> Self {
        let NormSpec { rows, cols, groups, .. } = self.spec;
        if groups == 1 {
            return self;
        }
        Call { spec: self.spec.rows(rows * groups).cols(cols / groups).groups(1), column_groups: groups, ..self }
    }

    /// The column of the vectors at which row `r` begins.
    #[inline(always)]
    fn first_col(&self, r: usize) -> usize {
        if self.column_groups == 1 { 0 } else { r % self.column_groups * self.spec.cols }
    }
}

impl Split for Call {
    fn split_at(self, row: usize) -> (Self, Self) {
        let of_rows = |rows| Call { spec: self.spec.rows(rows), ..self };
        (of_rows(row), of_rows(self.spec.rows - row))
    }
}
