//! The conformance suite on the first device.

use rmsnorm_cuda::CudaBackend;

rmsnorm_conformance::conformance!(CudaBackend::new(0));

/// Backward by partial rows, which calls as small as the suite's would not have.
mod unsplit {
    use super::CudaBackend;

    rmsnorm_conformance::conformance!(CudaBackend::new(0).map(|backend| backend.unsplit()));
}
