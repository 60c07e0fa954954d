//! Tensors of burn's CPU backend as rows of elements.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{AnyIn, AnyOut, Element, Error, RowLayout, Rows, Stored, with_type};

use crate::native::{element, theirs};

/// A tensor whose rows the kernels can read where they lie.
pub(crate) struct Regular {
    tensor: FlexTensor,
    pub(crate) rows: RowLayout,
}

impl Regular {
    /// The tensor itself or, if its rows lie at more than two distances, backwards, or are repeated, burn's contiguous copy.
    pub(crate) fn new(tensor: FlexTensor) -> Result<Self, Error> {
        if let Some(rows) = fold(tensor.layout()) {
            return Ok(Regular { tensor, rows });
        }
        let tensor = tensor.to_contiguous();
        match fold(tensor.layout()) {
            Some(rows) => Ok(Regular { tensor, rows }),
            None => Err(unusable(format!("a tensor of shape {:?} has no rows", tensor.layout().shape()))),
        }
    }

    /// Its rows, which say their type.
    pub(crate) fn view(&self) -> Result<Rows<AnyIn<'_, CpuBackend>>, Error> {
        with_type!(kernels_dtype(self.tensor.dtype())?; T => {
            Ok(self.rows.rows(T::any_in::<CpuBackend>(self.vector()?)))
        })
    }

    /// Its rows.
    pub(crate) fn read<T: Element>(&self) -> Result<Rows<&[T]>, Error> {
        let storage: &[T] = bytemuck::try_cast_slice(self.tensor.bytes())
            .map_err(|error| unusable(format!("the memory of a tensor of {}: {error}", T::DTYPE)))?;
        let start = self.tensor.layout().start_offset();
        match storage.get(start..start.saturating_add(self.rows.span())) {
            Some(elements) => Ok(self.rows.rows(elements)),
            None => Err(unusable(format!("rows at {start} of a storage of {} elements", storage.len()))),
        }
    }

    /// Its elements, of a vector: one row.
    pub(crate) fn vector<T: Element>(&self) -> Result<&[T], Error> {
        self.read().map(|rows| rows.view)
    }
}

/// The memory of a tensor that nobody else has, to be overwritten.
pub(crate) struct Owned {
    bytes: Bytes,
    layout: Layout,
    dtype: DType,
}

impl Owned {
    /// Whether a tensor is that: the only one of its memory, and all of it.
    pub(crate) fn is(tensor: &FlexTensor) -> bool {
        let layout = tensor.layout();
        let is_all = layout.num_elements().checked_mul(tensor.dtype().size()) == Some(tensor.bytes().len());
        tensor.is_unique() && layout.is_contiguous() && layout.start_offset() == 0 && is_all
    }

    /// Of a tensor that [`is`](Self::is) that. A copy of another.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        let (bytes, shape, dtype) = tensor.into_data().into_parts();
        Owned { bytes, layout: Layout::contiguous(shape), dtype }
    }

    /// Its dense rows.
    pub(crate) fn elements(&mut self) -> Result<AnyOut<'_, CpuBackend>, Error> {
        let dtype = kernels_dtype(self.dtype)?;
        with_type!(dtype; T => match bytemuck::try_cast_slice_mut(&mut self.bytes) {
            Ok(elements) => Ok(T::any_out::<CpuBackend>(elements)),
            Err(error) => Err(unusable(format!("the memory of a tensor of {dtype}: {error}"))),
        })
    }

    /// The tensor with its new elements.
    pub(crate) fn into_tensor(self) -> FlexTensor {
        FlexTensor::new(self.bytes, self.layout, self.dtype)
    }
}

/// The rows of a tensor, whose first element is this far into its storage. `None` if they lie at more than two distances, or
/// overlap.
fn fold(layout: &Layout) -> Option<RowLayout> {
    RowLayout::fold(layout.shape(), layout.strides())
}

/// A dense tensor of these elements, which are not copied.
pub(crate) fn wrap<T: Element>(values: Vec<T>, shape: Shape) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), theirs(T::DTYPE))
}

/// Ours of that dtype.
fn kernels_dtype(dtype: DType) -> Result<rmsnorm_core::DType, Error> {
    element(dtype).ok_or_else(|| unusable(format!("no kernels for {dtype:?}")))
}

fn unusable(rule: String) -> Error {
    Error::Unsupported { rule }
}
