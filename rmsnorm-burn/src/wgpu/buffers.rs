//! Tensors of CubeCL's wgpu runtime as elements of its buffers.

use std::any::Any;

use burn::backend::wgpu::{AutoCompiler, CubeTensor, WgpuResource, into_contiguous};
use burn::cubecl::client::Client;
use burn::cubecl::server::ServerError;
use burn::cubecl::wgpu::WgpuServer;
use burn::tensor::Shape;
use rmsnorm_core::wgpu::{WgpuBackend, WgpuSlice};
use rmsnorm_core::{AnyElement, AnyIn, AnyOut, DType, Error, RowLayout, Rows, with_type};

use crate::native::{element, theirs};

/// Runs a call on burn's device thread: its requests to the device, one buffer for each tensor,
/// take one turn instead of one each.
pub(super) fn on_device_thread<T: Send + 'static>(
    client: &Client,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    client.exclusive(call).map_err(failed)?
}

/// The error of burn's runtime.
pub(super) fn failed(error: ServerError) -> Error {
    Error::Device { backend: "wgpu", source: error.to_string().into() }
}

/// A tensor's place in a buffer, for kernels.
pub(super) struct Lent {
    tensor: CubeTensor,
    dtype: DType,
    pub(super) rows: RowLayout,
    resource: WgpuResource,
    /// Keeps the tensor in its buffer. CubeCL's type of it is in a crate that it does not
    /// re-export.
    _pin: Box<dyn Any>,
}

impl Lent {
    /// The place of a tensor; or of burn's contiguous copy if its rows need more than two strides,
    /// or repeat.
    pub(super) fn read(tensor: CubeTensor) -> Result<Self, Error> {
        match fold(&tensor) {
            Some(rows) => Lent::new(tensor, rows),
            None => Lent::dense(into_contiguous(tensor)),
        }
    }

    /// The place of a dense tensor.
    pub(super) fn dense(tensor: CubeTensor) -> Result<Self, Error> {
        match RowLayout::dense(tensor.meta.shape()) {
            Some(rows) => Lent::new(tensor, rows),
            None => Err(Error::Unsupported { rule: format!("a tensor needs a dimension, got {tensor:?}") }),
        }
    }

    /// Submits the commands that burn has recorded for the tensor.
    fn new(tensor: CubeTensor, rows: RowLayout) -> Result<Self, Error> {
        let rule = || format!("no kernels for {:?}", tensor.dtype);
        let dtype = element(tensor.dtype).ok_or_else(|| Error::Unsupported { rule: rule() })?;
        let pin = tensor.client.get_resource::<WgpuServer<AutoCompiler>>(tensor.handle.clone());
        let pin = pin.map_err(failed)?;
        Ok(Lent { tensor, dtype, rows, resource: pin.resource().clone(), _pin: Box::new(pin) })
    }

    /// A matrix of the same shape for writing, without contents yet.
    pub(super) fn new_matrix(&self, dtype: DType) -> Result<Lent, Error> {
        self.empty(self.tensor.meta.shape().clone(), dtype)
    }

    /// A vector for one statistic of each group of columns of its rows, for writing.
    pub(super) fn new_statistic(&self, groups: usize) -> Result<Lent, Error> {
        self.empty(Shape::from([self.rows.rows * groups]), DType::F32)
    }

    fn empty(&self, shape: Shape, dtype: DType) -> Result<Lent, Error> {
        let CubeTensor { client, device, .. } = &self.tensor;
        let handle = client.empty(shape.num_elements() * dtype.size());
        Lent::dense(CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, theirs(dtype)))
    }

    /// Its elements as a vector, for reading.
    pub(super) fn input(&self) -> AnyIn<'_, WgpuBackend> {
        with_type!(self.dtype; T => T::any_in::<WgpuBackend>(self.slice()))
    }

    /// The same, for writing.
    pub(super) fn output(&self) -> AnyOut<'_, WgpuBackend> {
        with_type!(self.dtype; T => T::any_out::<WgpuBackend>(self.slice()))
    }

    /// Its rows, for reading.
    pub(super) fn input_rows(&self) -> Rows<AnyIn<'_, WgpuBackend>> {
        self.rows.rows(self.input())
    }

    /// The same, for writing.
    pub(super) fn output_rows(&self) -> Rows<AnyOut<'_, WgpuBackend>> {
        self.rows.rows(self.output())
    }

    fn slice<T: AnyElement>(&self) -> WgpuSlice<'_, T> {
        WgpuSlice::new(&self.resource.buffer, self.resource.offset, self.rows.span())
    }

    /// The tensor, with the written values.
    pub(super) fn into_tensor(self) -> CubeTensor {
        self.tensor
    }
}

/// The rows of a tensor; `None` if they need more than two strides, or are tiled.
fn fold(tensor: &CubeTensor) -> Option<RowLayout> {
    if tensor.meta.is_tiled() {
        return None;
    }
    let strides: Option<Vec<isize>> =
        tensor.meta.strides().iter().map(|stride| isize::try_from(*stride).ok()).collect();
    RowLayout::fold(tensor.meta.shape(), &strides?)
}
