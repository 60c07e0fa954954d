//! Tensors of CubeCL's wgpu runtime as elements of its buffers.

use std::any::Any;

use burn::backend::wgpu::{AutoCompiler, CubeTensor, WgpuResource, into_contiguous};
use burn::cubecl::client::Client;
use burn::cubecl::server::ServerError;
use burn::cubecl::wgpu::WgpuServer;
use burn::tensor::Shape;
use rmsnorm_core::wgpu::WgpuSlice;
use rmsnorm_core::{DType, Error, RowLayout, Rows, Stored};

use crate::native::theirs;

/// Runs it where burn's device runs: what it asks of the device, a buffer for each tensor, takes one turn instead of one each.
pub(super) fn on_device_thread<T: Send + 'static>(
    client: &Client,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> Result<T, Error> {
    client.exclusive(call).map_err(failed)?
}

/// What burn's runtime reports.
pub(super) fn failed(error: ServerError) -> Error {
    Error::Device { backend: "wgpu", source: error.to_string().into() }
}

/// A tensor whose rows the kernels can read where they lie.
pub(super) struct Regular {
    tensor: CubeTensor,
    pub(super) rows: RowLayout,
}

impl Regular {
    /// The tensor itself or, if its rows lie at more than two distances, or are repeated, burn's contiguous copy.
    pub(super) fn new(tensor: CubeTensor) -> Result<Self, Error> {
        if let Some(rows) = fold(&tensor) {
            return Ok(Regular { tensor, rows });
        }
        let tensor = into_contiguous(tensor);
        match fold(&tensor) {
            Some(rows) => Ok(Regular { tensor, rows }),
            None => Err(Error::Unsupported { rule: format!("{tensor:?} has no rows") }),
        }
    }

    /// Where it lies.
    pub(super) fn lend(&self) -> Result<Lent, Error> {
        Lent::new(&self.tensor, self.rows)
    }

    /// A tensor of its shape to be written.
    pub(super) fn empty_matrix(&self, dtype: DType) -> CubeTensor {
        empty(&self.tensor, self.tensor.meta.shape().clone(), dtype)
    }

    /// A statistic of its rows to be written.
    pub(super) fn empty_statistic(&self) -> CubeTensor {
        empty(&self.tensor, Shape::from([self.rows.rows]), DType::F32)
    }
}

/// The rows of a tensor; `None` if they lie at more than two distances, or in tiles.
fn fold(tensor: &CubeTensor) -> Option<RowLayout> {
    if tensor.meta.is_tiled() {
        return None;
    }
    let strides: Option<Vec<isize>> =
        tensor.meta.strides().iter().map(|stride| isize::try_from(*stride).ok()).collect();
    RowLayout::fold(tensor.meta.shape(), &strides?)
}

/// A tensor to be written: dense, with no contents yet.
fn empty(beside: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    let handle = beside.client.empty(shape.num_elements() * dtype.size());
    CubeTensor::new_contiguous(beside.client.clone(), beside.device.clone(), shape, handle, theirs(dtype))
}

/// Where a tensor lies in a buffer.
pub(super) struct Lent {
    resource: WgpuResource,
    rows: RowLayout,
    /// What keeps it there. CubeCL has a name for it in a crate that it does not pass on.
    _pin: Box<dyn Any>,
}

impl Lent {
    /// The place of a tensor. What burn has recorded for the tensor is submitted.
    fn new(tensor: &CubeTensor, rows: RowLayout) -> Result<Self, Error> {
        let pin = tensor.client.get_resource::<WgpuServer<AutoCompiler>>(tensor.handle.clone());
        let pin = pin.map_err(failed)?;
        Ok(Lent { resource: pin.resource().clone(), rows, _pin: Box::new(pin) })
    }

    /// That of a dense tensor.
    pub(super) fn of_new(tensor: &CubeTensor) -> Result<Self, Error> {
        match RowLayout::dense(tensor.meta.shape()) {
            Some(rows) => Lent::new(tensor, rows),
            None => Err(Error::Unsupported { rule: format!("{tensor:?} has no rows") }),
        }
    }

    /// Its elements, of a vector: one row.
    pub(super) fn vector<T: Stored>(&self) -> WgpuSlice<'_, T> {
        WgpuSlice::new(&self.resource.buffer, self.resource.offset, self.rows.span())
    }

    /// Its rows.
    pub(super) fn matrix<T: Stored>(&self) -> Rows<WgpuSlice<'_, T>> {
        self.rows.rows(self.vector())
    }
}
