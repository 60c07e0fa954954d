//! The workspace that a call allocates itself.

use cudarc::driver::{CudaStream, result, sys};
use rmsnorm_spec::Error;

use crate::kernel::Kernels;

/// The size of `elements` f32 in bytes.
pub(super) fn bytes_of(elements: usize) -> u64 {
    elements as u64 * size_of::<f32>() as u64
}

/// A workspace of this backend, allocated and freed in stream order, without waiting.
pub(super) struct Workspace<'a> {
    stream: &'a CudaStream,
    pub(super) address: sys::CUdeviceptr,
}

impl<'a> Workspace<'a> {
    pub(super) fn allocate(stream: &'a CudaStream, kernels: &Kernels, len: usize) -> Result<Self, Error> {
        if !stream.context().has_async_alloc() {
            let rule = format!(
                "this device has no stream-ordered allocation: pass a workspace of {len} f32 to a backward call; \
                 ScaleKind::Current cannot be used on this device"
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
        // - order: the stream's, so it is freed after the last kernel that uses it.
        let freed = unsafe { result::free_async(self.address, self.stream.cu_stream()) };
        // `drop` cannot return the error; cudarc reports it at the next call.
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
