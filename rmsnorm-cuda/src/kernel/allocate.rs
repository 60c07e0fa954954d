//! Memory in the order of a stream, for what a call needs beside its arguments.

use cudarc::driver::{CudaStream, DriverError, result, sys};
use rmsnorm_spec::Error;

use super::Kernels;
use crate::error::device_error;

impl Kernels {
    /// Room for `len` elements of `T`, of any values, in the order of the stream and without waiting. `cuMemFreeAsync` frees it. The
    /// context must be current on this thread, and have such allocations.
    ///
    /// # Errors
    /// `Device` if there is no room.
    pub(crate) fn allocate<T>(&self, stream: &CudaStream, len: usize) -> Result<sys::CUdeviceptr, Error> {
        let bytes = bytes_of::<T>(len).map_err(device_error("cuMemAllocFromPoolAsync"))?;
        match from_pool(stream, self.pool()?, bytes) {
            // What the caller has freed in the order of the stream is in the device's pool until a synchronization.
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

/// Bytes of that many elements, at least 1, as no device allocates none. The driver rounds up, and must not wrap.
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
    // - contents: unset, and nothing reads what was not written before.
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
