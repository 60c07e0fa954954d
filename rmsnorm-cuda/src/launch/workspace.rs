//! The workspace of a call that brings none.

use cudarc::driver::{CudaStream, result, sys};
use rmsnorm_spec::Error;

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
        let address = kernels.allocate::<f32>(stream, len)?;
        Ok(Workspace { stream, address })
    }
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
