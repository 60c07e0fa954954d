//! The conformance suite on the first device.

use rmsnorm_cuda::CudaBackend;

rmsnorm_conformance::conformance!(CudaBackend::new(0));

/// With the programs of large calls, which the suite's small cases would not use: rows read twice,
/// partial sums.
mod with_large_plans {
    use super::CudaBackend;

    rmsnorm_conformance::conformance!(CudaBackend::new(0).map(|backend| backend.with_large_plans()));
}
