//! The conformance suite's access to this backend.

use std::ops::Range;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DriverError};
use rmsnorm_spec::conformance::{Arithmetic, Harness};
use rmsnorm_spec::{Element, Error};

use crate::error::device_error;
use crate::{CudaBackend, plan};

impl Harness for CudaBackend {
    type Backend = CudaBackend;
    type Buffer<T: Element> = CudaSlice<T>;

    fn backend(&self) -> &CudaBackend {
        self
    }

    /// Roots are the device's estimate and one Newton step, within 2 u as if by a root and a division (docs/math.md,
    /// section 8); averages are products with a rounded `1 / cols`; subnormals are kept.
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic { depth_cols: plan::depth_cols, depth_rows: plan::depth_rows, ..Arithmetic::IEEE }
    }

    fn device(&self) -> String {
        self.to_string()
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        plan::COLS_BREAKPOINTS.to_vec()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn upload<T: Element>(&self, data: &[T]) -> Result<CudaSlice<T>, Error> {
        upload(self, data).map_err(device_error("upload"))
    }

    fn download<T: Element>(&self, buffer: &CudaSlice<T>) -> Result<Vec<T>, Error> {
        download(self, buffer).map_err(device_error("download"))
    }

    fn view<'a, T: Element>(&self, buffer: &'a CudaSlice<T>, range: Range<usize>) -> CudaView<'a, T> {
        buffer.slice(range)
    }

    fn view_mut<'a, T: Element>(&self, buffer: &'a mut CudaSlice<T>, range: Range<usize>) -> CudaViewMut<'a, T> {
        buffer.slice_mut(range)
    }
}

/// cudarc copies types of its own trait, which not every [`Element`] is to the compiler: bytes are.
fn upload<T: Element>(backend: &CudaBackend, data: &[T]) -> Result<CudaSlice<T>, DriverError> {
    let (stream, bytes) = (backend.stream(), bytemuck::cast_slice::<T, u8>(data));
    // No device allocates 0 bytes.
    // SAFETY:
    // - contents: unset until the copy below; where there is nothing to copy, no element is visible.
    let mut buffer = unsafe { stream.alloc::<u8>(bytes.len().max(1)) }?;
    if !bytes.is_empty() {
        stream.memcpy_htod(bytes, &mut buffer)?;
    }
    // The copy has left `data`, and the buffer is given out without the events that would make others wait for it.
    stream.synchronize()?;
    // SAFETY:
    // - address: an allocation of the stream's, given up by `leak`, which the new slice frees;
    // - length: the bytes of `data`, hence its elements;
    // - alignment: allocations are aligned to 256 bytes;
    // - contents: the elements of `data`.
    Ok(unsafe { stream.upgrade_device_ptr(buffer.leak(), data.len()) })
}

fn download<T: Element>(backend: &CudaBackend, buffer: &CudaSlice<T>) -> Result<Vec<T>, DriverError> {
    let stream = backend.stream();
    let mut data = vec![T::default(); buffer.len()];
    // SAFETY:
    // - contents: bytes may have any value.
    if let Some(bytes) = unsafe { buffer.transmute::<u8>(buffer.num_bytes()) }.filter(|bytes| !bytes.is_empty()) {
        stream.memcpy_dtoh(&bytes, bytemuck::cast_slice_mut::<T, u8>(&mut data))?;
    }
    stream.synchronize()?;
    Ok(data)
}
