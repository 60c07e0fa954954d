//! Tensors that another library owns: an address, a storage and a layout, known only at run time.

use std::borrow::Cow;
use std::ffi::c_void;

use rmsnorm_core::{DType, Error, RowLayout, Storage, Tensor, TensorShape};

/// The device of a call's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Host memory, and the number of threads; `None` is the default number.
    Cpu { threads: Option<usize> },
    /// Memory of a CUDA device, and the owner's stream (a `CUstream`).
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
    /// A tensor with these dimensions and strides, in elements; `None` if its rows need more than
    /// two strides. A scalar (a scale, or the statistics of a one-row `x`) becomes a vector of one
    /// element.
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

    /// Whether both have the same address, storage and layout.
    pub(crate) fn lies_at(&self, other: &Foreign) -> bool {
        (self.data, self.storage, self.layout) == (other.data, other.storage, other.layout)
    }

    /// All elements as one row.
    ///
    /// # Errors
    /// `InvalidArgument` if they are not contiguous.
    pub(crate) fn flat(self, tensor: Tensor) -> Result<Self, Error> {
        let RowLayout { rows, cols, row_stride, groups, .. } = self.layout;
        let is_dense = rows <= 1 || row_stride == cols && groups.is_none();
        let flat = RowLayout::dense(&[rows.max(1) * if rows == 0 { 0 } else { cols }]).filter(|_| is_dense);
        let apart = || Error::InvalidArgument {
            arg: tensor.name(),
            rule: "its elements must be contiguous: pass a contiguous copy".into(),
        };
        Ok(Foreign { layout: flat.ok_or_else(apart)?, ..self })
    }

    /// The dtype of its elements.
    ///
    /// # Errors
    /// `Unsupported` if norms do not support it.
    pub(crate) fn dtype(&self, tensor: Tensor) -> Result<DType, Error> {
        self.storage.float().ok_or_else(|| not_a_float(tensor, self.storage.name()))
    }
}

/// The shape of a tensor in a call whose `x` has these dimensions; `None` if `x` does not determine
/// it. Several groups of columns have statistics of one dimension more.
pub(crate) fn shape_of(tensor: Tensor, dims: &[i64], groups: usize) -> Option<Cow<'_, [i64]>> {
    let (cols, rows) = dims.split_last().map(|(cols, rows)| (std::slice::from_ref(cols), rows))?;
    match tensor.shape() {
        TensorShape::Matrix => Some(dims.into()),
        TensorShape::Cols => Some(cols.into()),
        TensorShape::Rows if groups == 1 => Some(rows.into()),
        TensorShape::Rows => Some([rows, &[i64::try_from(groups).ok()?]].concat().into()),
        TensorShape::Transposed
        | TensorShape::Workspace
        | TensorShape::One
        | TensorShape::Scales
        | TensorShape::ScalesColumnwise => None,
    }
}

/// The name of a dtype in Python's libraries.
pub(crate) const fn python_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
    }
}

/// The error for a dtype that norms do not support.
pub(crate) fn not_a_float(tensor: Tensor, got: &str) -> Error {
    Error::Unsupported { rule: format!("{tensor} must be float32, float16 or bfloat16, got {got}: convert it first") }
}

/// Dimensions as sizes; `None` if one is negative.
pub(crate) fn sizes(dims: &[i64]) -> Option<&[usize]> {
    // The cast succeeds on 64-bit platforms, and the frameworks support no others.
    bytemuck::try_cast_slice(dims).ok().filter(|_| dims.iter().all(|dim| *dim >= 0))
}
