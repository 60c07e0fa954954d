//! The workspace of a call that brings none.

use cudarc::driver::{CudaStream, DriverError, result, sys};
use rmsnorm_spec::Error;

use crate::error::device_error;
use crate::kernel::Kernels;

/// Bytes of that many f32.
pub(super) fn bytes_of(elements: usize) -> u64 {
    elements as u64 * size_of::<f32>() as u64
}

/// A workspace of our own: allocated and freed in the order of the stream, without waiting.
pub(super) struct Workspace<'a> {
    stream: &'a CudaStream,
    pub(super) address: sys::CUdeviceptr,
}

impl<'a> Workspace<'a> {
    pub(super) fn allocate(stream: &'a CudaStream, kernels: &Kernels, len: usize) -> Result<Self, Error> {
        if !stream.context().has_async_alloc() {
            let rule = format!(
                "this device cannot allocate in stream order: a backward call can be given its workspace of {len} f32, a call that \
                 finds a tensor's scale cannot be made"
            );
            return Err(Error::Unsupported { rule });
        }
        let out_of_memory = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        // The driver rounds up, and must not wrap.
        let Some(bytes) = len.checked_mul(size_of::<f32>()).filter(|bytes| *bytes <= isize::MAX as usize) else {
            return Err(device_error("cuMemAllocFromPoolAsync")(out_of_memory));
        };
        let address = match from_pool(stream, kernels.pool()?, bytes) {
            // What the caller has freed in the order of the stream is in the device's pool until a synchronization.
            Err(error) if error == out_of_memory => {
                // SAFETY:
                // - as in `from_pool`.
                unsafe { result::malloc_async(stream.cu_stream(), bytes) }.map_err(device_error("cuMemAllocAsync"))?
            }
            address => address.map_err(device_error("cuMemAllocFromPoolAsync"))?,
        };
        Ok(Workspace { stream, address })
    }
}

fn from_pool(stream: &CudaStream, pool: sys::CUmemoryPool, bytes: usize) -> Result<sys::CUdeviceptr, DriverError> {
    let mut address = 0;
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - context: current on this thread, the stream's and the pool's;
    // - pool: never destroyed;
    // - contents: unset, and no kernel reads what the steps before it have not written.
    unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream.cu_stream()) }.result()?;
    Ok(address)
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        // SAFETY:
        // - address: allocated by `allocate`, freed here only;
        // - order: the stream's, so after the last kernel that uses it.
        let freed = unsafe { result::free_async(self.address, self.stream.cu_stream()) };
        // Nowhere to return it: cudarc hands it to the next call.
        self.stream.context().record_err(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::bytes_of;

    #[test]
    fn bytes_of_a_workspace_do_not_wrap_at_32_bits() {
        assert_eq!(
            [0, 1, (1 << 30) - 1, 1 << 30, (1 << 40) + 3].map(bytes_of),
            [0, 4, (1 << 32) - 4, 1 << 32, (1 << 42) + 12]
        );
    }
}
