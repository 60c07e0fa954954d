//! The conformance suite on the first device.

use rmsnorm_cuda::CudaBackend;

rmsnorm_conformance::conformance!(CudaBackend::new(0));

/// By the programs of large calls, which calls as small as the suite's would not have: rows that are read again, partial rows.
mod as_if_large {
    use super::CudaBackend;

    rmsnorm_conformance::conformance!(CudaBackend::new(0).map(|backend| backend.as_if_large()));
}
