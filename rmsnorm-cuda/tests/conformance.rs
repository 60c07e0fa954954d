//! The conformance suite on the first device.

use rmsnorm_cuda::CudaBackend;

rmsnorm_conformance::conformance!(CudaBackend::new(0));
