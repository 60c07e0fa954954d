//! Tensors that another library owns: an address, a storage and a layout, known at run time only.

use std::ffi::c_void;

use rmsnorm_core::{DType, Error, RowLayout, Storage, Tensor, TensorShape};

/// Where the tensors of a call lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Host memory, to be worked on by so many threads; `None` leaves the number to rmsnorm.
    Cpu { threads: Option<usize> },
    /// Memory of a CUDA device, and the stream (a `CUstream`) that the tensors' owner works on.
    Cuda { ordinal: usize, stream: *mut c_void },
}

/// A tensor, as rows. A vector is one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Foreign {
    pub(crate) data: *mut c_void,
    pub(crate) storage: Storage,
    pub(crate) layout: RowLayout,
}

impl Foreign {
    /// Elements at these strides; `None` if no two strides lead from row to row. A scalar is a vector of one element: a scale, or the
    /// statistics of an `x` that is one row.
    pub(crate) fn strided(
        tensor: Tensor,
        data: *mut c_void,
        storage: Storage,
        dims: &[i64],
        strides: &[i64],
    ) -> Option<Self> {
        let layout = if dims.is_empty() && !tensor.is_matrix() {
            RowLayout::dense(&[1])
        } else {
            RowLayout::fold(sizes(dims)?, bytemuck::try_cast_slice(strides).ok()?)
        };
        Some(Foreign { data, storage, layout: layout? })
    }

    /// Whether every element lies where the other's does.
    pub(crate) fn lies_at(&self, other: &Foreign) -> bool {
        (self.data, self.storage, self.layout) == (other.data, other.storage, other.layout)
    }

    /// All elements, as one row.
    pub(crate) fn flat(self, tensor: Tensor) -> Result<Self, Error> {
        let RowLayout { rows, cols, row_stride, groups, .. } = self.layout;
        let is_dense = rows <= 1 || row_stride == cols && groups.is_none();
        let flat = RowLayout::dense(&[rows.max(1) * if rows == 0 { 0 } else { cols }]).filter(|_| is_dense);
        let apart = || Error::InvalidArgument {
            arg: tensor.name(),
            rule: "its elements must lie side by side, and do not: pass a contiguous copy".into(),
        };
        Ok(Foreign { layout: flat.ok_or_else(apart)?, ..self })
    }

    /// The dtype of its elements, if they are floats of one that norms take.
    ///
    /// # Errors
    /// `Unsupported`.
    pub(crate) fn dtype(&self, tensor: Tensor) -> Result<DType, Error> {
        self.storage.float().ok_or_else(|| not_a_float(tensor, self.storage.name()))
    }
}

/// The shape of a tensor in a call whose `x` has these dimensions, where that follows from them.
pub(crate) fn shape_of(tensor: Tensor, dims: &[i64]) -> Option<&[i64]> {
    let (cols, rows) = dims.split_last().map(|(cols, rows)| (std::slice::from_ref(cols), rows))?;
    match tensor.shape() {
        TensorShape::Matrix => Some(dims),
        TensorShape::Cols => Some(cols),
        TensorShape::Rows => Some(rows),
        TensorShape::Transposed
        | TensorShape::Workspace
        | TensorShape::One
        | TensorShape::Scales
        | TensorShape::ScalesColumnwise => None,
    }
}

/// A dtype as Python's libraries call it.
pub(crate) const fn python_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
    }
}

/// The error of a tensor of another dtype.
pub(crate) fn not_a_float(tensor: Tensor, got: &str) -> Error {
    Error::Unsupported { rule: format!("{tensor} is float32, float16 or bfloat16, got {got}") }
}

/// Dimensions as sizes, unless one is negative.
pub(crate) fn sizes(dims: &[i64]) -> Option<&[usize]> {
    // An address has 64 bits wherever these libraries run.
    bytemuck::try_cast_slice(dims).ok().filter(|_| dims.iter().all(|dim| *dim >= 0))
}
