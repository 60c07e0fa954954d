//! Tensors of burn's CPU backend as rows of elements.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{AnyElement, AnyIn, AnyOut, Element, Error, RowLayout, Rows, with_type};

use crate::native::{element, theirs};

/// A tensor whose rows the kernels can read without a copy.
pub(crate) struct Regular {
    tensor: FlexTensor,
    pub(crate) rows: RowLayout,
}

impl Regular {
    /// The tensor itself; or burn's contiguous copy if its rows need more than two strides, go
    /// backwards, or repeat.
    pub(crate) fn new(tensor: FlexTensor) -> Result<Self, Error> {
        if let Some(rows) = fold(tensor.layout()) {
            return Ok(Regular { tensor, rows });
        }
        let tensor = tensor.to_contiguous();
        match fold(tensor.layout()) {
            Some(rows) => Ok(Regular { tensor, rows }),
            None => Err(unusable(format!("a tensor needs a dimension, got the shape {:?}", tensor.layout().shape()))),
        }
    }

    /// Its rows, of any type.
    pub(crate) fn view(&self) -> Result<Rows<AnyIn<'_, CpuBackend>>, Error> {
        with_type!(kernels_dtype(self.tensor.dtype())?; T => {
            Ok(self.rows.rows(T::any_in::<CpuBackend>(self.vector()?)))
        })
    }

    /// Its rows.
    pub(crate) fn read<T: Element>(&self) -> Result<Rows<&[T]>, Error> {
        let storage: &[T] = bytemuck::try_cast_slice(self.tensor.bytes())
            .map_err(|error| unusable(format!("cannot read the memory of a {} tensor: {error}", T::DTYPE)))?;
        let start = self.tensor.layout().start_offset();
        match storage.get(start..start.saturating_add(self.rows.span())) {
            Some(elements) => Ok(self.rows.rows(elements)),
            None => Err(unusable(format!("rows from element {start} exceed their storage of {}", storage.len()))),
        }
    }

    /// The elements of a vector, which is one row.
    pub(crate) fn vector<T: Element>(&self) -> Result<&[T], Error> {
        self.read().map(|rows| rows.view)
    }
}

/// The memory of a tensor without another owner, to be overwritten.
pub(crate) struct Owned {
    bytes: Bytes,
    layout: Layout,
    dtype: DType,
}

impl Owned {
    /// Whether a tensor is the only owner of its memory, and uses all of it.
    pub(crate) fn is(tensor: &FlexTensor) -> bool {
        let layout = tensor.layout();
        let is_all = layout.num_elements().checked_mul(tensor.dtype().size()) == Some(tensor.bytes().len());
        tensor.is_unique() && layout.is_contiguous() && layout.start_offset() == 0 && is_all
    }

    /// Takes the memory of a tensor that [`is`](Self::is) its only owner, and copies that of
    /// another.
    pub(crate) fn new(tensor: FlexTensor) -> Self {
        let (bytes, shape, dtype) = tensor.into_data().into_parts();
        Owned { bytes, layout: Layout::contiguous(shape), dtype }
    }

    /// Its dense rows.
    pub(crate) fn elements(&mut self) -> Result<AnyOut<'_, CpuBackend>, Error> {
        let dtype = kernels_dtype(self.dtype)?;
        with_type!(dtype; T => match bytemuck::try_cast_slice_mut(&mut self.bytes) {
            Ok(elements) => Ok(T::any_out::<CpuBackend>(elements)),
            Err(error) => Err(unusable(format!("cannot write the memory of a {dtype} tensor: {error}"))),
        })
    }

    /// The tensor with its new elements.
    pub(crate) fn into_tensor(self) -> FlexTensor {
        FlexTensor::new(self.bytes, self.layout, self.dtype)
    }
}

/// The rows of a tensor, relative to its start offset. `None` if they need more than two strides,
/// or overlap.
fn fold(layout: &Layout) -> Option<RowLayout> {
    RowLayout::fold(layout.shape(), layout.strides())
}

/// A dense tensor of these elements, without a copy.
pub(crate) fn wrap<T: Element>(values: Vec<T>, shape: Shape) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), theirs(T::DTYPE))
}

/// Our name of the dtype.
fn kernels_dtype(dtype: DType) -> Result<rmsnorm_core::DType, Error> {
    element(dtype).ok_or_else(|| unusable(format!("no kernels for {dtype:?}")))
}

fn unusable(rule: String) -> Error {
    Error::Unsupported { rule }
}
