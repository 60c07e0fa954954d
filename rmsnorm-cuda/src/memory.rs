//! Buffers between two calls, and parts of views.

use std::ops::Range;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, result};
use rmsnorm_spec::{AnyElement, Error, Memory};

use crate::backend::CudaBackend;
use crate::error::device_error;
use crate::kernel::bytes_of;

/// A buffer comes from the pool of workspaces and returns to it when dropped, both in the order of
/// the backend's stream. Another stream waits for that stream before it uses a new buffer.
impl Memory for CudaBackend {
    type Buffer<T: AnyElement> = CudaSlice<T>;

    fn buffer<T: AnyElement>(&self, len: usize) -> Result<CudaSlice<T>, Error> {
        let stream = self.stream();
        // cudarc panics if it cannot create a slice's events, so a lost context is reported here.
        stream.context().bind_to_thread().map_err(device_error("before memory is allocated"))?;
        let address = if stream.context().has_async_alloc() {
            self.kernels().allocate::<T>(stream, len)?
        } else {
            let bytes = bytes_of::<T>(len).map_err(device_error("cuMemAlloc"))?;
            // SAFETY:
            // - context: current on this thread;
            // - contents: uninitialized; elements may have any bits.
            unsafe { result::malloc_sync(bytes) }.map_err(device_error("cuMemAlloc"))?
        };
        // SAFETY:
        // - address: allocated above, for this slice alone, which frees it the way this context
        //   allocates;
        // - length: the allocation has the bytes of `len` elements;
        // - alignment: the driver's, 256 bytes;
        // - contents: any bytes are valid elements, and callers write before they read.
        Ok(unsafe { stream.upgrade_device_ptr(address, len) })
    }

    fn buffer_in<T: AnyElement>(buffer: &CudaSlice<T>, range: Range<usize>) -> CudaView<'_, T> {
        buffer.slice(range)
    }

    fn buffer_out<T: AnyElement>(buffer: &mut CudaSlice<T>, range: Range<usize>) -> CudaViewMut<'_, T> {
        buffer.slice_mut(range)
    }

    fn part_in<'a, T: AnyElement>(view: &'a CudaView<'_, T>, range: Range<usize>) -> CudaView<'a, T> {
        view.slice(range)
    }

    fn part_out<'a, T: AnyElement>(view: &'a mut CudaViewMut<'_, T>, range: Range<usize>) -> CudaViewMut<'a, T> {
        view.slice_mut(range)
    }

    fn read_out<'a, T: AnyElement>(view: &'a CudaViewMut<'_, T>) -> CudaView<'a, T> {
        view.as_view()
    }

    fn copy<T: AnyElement>(&self, from: CudaView<'_, T>, mut to: CudaViewMut<'_, T>) -> Result<(), Error> {
        let stream = self.stream();
        stream.context().bind_to_thread().map_err(device_error("before a copy"))?;
        // The driver rejects a length of zero.
        if from.is_empty() {
            Ok(())
        } else {
            stream.memcpy_dtod(&from, &mut to).map_err(device_error("cuMemcpyDtoDAsync"))
        }
    }
}
