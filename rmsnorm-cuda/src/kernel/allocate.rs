//! Stream-ordered allocation of workspaces.

use cudarc::driver::{CudaStream, DriverError, result, sys};
use rmsnorm_spec::Error;

use super::Kernels;
use crate::error::device_error;

impl Kernels {
    /// Allocates `len` elements of `T`, uninitialized, in stream order and without waiting. Free
    /// them with `cuMemFreeAsync`. The context must be current on this thread, and its device must
    /// have stream-ordered allocation.
    ///
    /// # Errors
    /// `Device` if there is not enough memory.
    pub(crate) fn allocate<T>(&self, stream: &CudaStream, len: usize) -> Result<sys::CUdeviceptr, Error> {
        let bytes = bytes_of::<T>(len).map_err(device_error("cuMemAllocFromPoolAsync"))?;
        match from_pool(stream, self.pool()?, bytes) {
            // Memory that the caller freed in stream order stays in the device's pool until a
            // synchronization.
            Err(error) if error == OUT_OF_MEMORY => {
                // SAFETY:
                // - as in `from_pool`.
                unsafe { result::malloc_async(stream.cu_stream(), bytes) }.map_err(device_error("cuMemAllocAsync"))
            }
            address => address.map_err(device_error("cuMemAllocFromPoolAsync")),
        }
    }
}

const OUT_OF_MEMORY: DriverError = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);

/// The size of `len` elements in bytes, at least 1, because a device cannot allocate 0 bytes. The
/// driver rounds the size up, so a size over `isize::MAX`, which could wrap, is an error.
pub(crate) fn bytes_of<T>(len: usize) -> Result<usize, DriverError> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes.map(|bytes| bytes.max(1)).ok_or(OUT_OF_MEMORY)
}

fn from_pool(stream: &CudaStream, pool: sys::CUmemoryPool, bytes: usize) -> Result<sys::CUdeviceptr, DriverError> {
    let mut address = 0;
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - context: current on this thread, the stream's and the pool's;
    // - pool: never destroyed;
    // - contents: uninitialized; nothing is read before it is written.
    unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream.cu_stream()) }.result()?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bytes_than_memory_can_have_are_refused() {
        assert_eq!([bytes_of::<u16>(0), bytes_of::<u16>(1), bytes_of::<f32>(3)], [Ok(1), Ok(2), Ok(12)]);
        let most = isize::MAX as usize;
        assert_eq!(bytes_of::<u8>(most), Ok(most));
        for len in [most + 1, usize::MAX] {
            assert_eq!([bytes_of::<u8>(len), bytes_of::<f32>(len)], [Err(OUT_OF_MEMORY); 2]);
        }
        assert_eq!(bytes_of::<f32>(most / 4 + 1), Err(OUT_OF_MEMORY));
    }
}
