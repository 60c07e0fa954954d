//! What a measured operation ran, on this machine's device or on one that was recorded.

use super::workload::problem;
use super::{Operation, Shape};
use crate::conformance::Record;
#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
use crate::conformance::Recorded;
use crate::{AnyBackend, DType, Device, Error};

impl AnyBackend {
    /// What plans on this device depend on besides the problem, as JSON; [`record`] reads it.
    pub fn caps(&self) -> String {
        match *self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(ref backend) => Recorded::caps(backend),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(ref backend) => Recorded::caps(backend),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(ref backend) => Recorded::caps(backend),
        }
    }
}

/// What an operation on tensors of one dtype runs where these capabilities hold: no device is asked.
///
/// # Errors
/// `Unsupported` if this build lacks the backend, the capabilities are not of one, or it has no plan for the operation.
pub fn record(device: Device, caps: &str, operation: Operation, dtype: DType, shape: Shape) -> Result<Record, Error> {
    let problem = problem(operation, dtype, shape);
    match device {
        #[cfg(feature = "cpu")]
        Device::Cpu => crate::cpu::CpuBackend::record(caps, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::cuda::CudaBackend::record(caps, &problem),
        #[cfg(feature = "wgpu")]
        Device::Wgpu(_) => crate::wgpu::WgpuBackend::record(caps, &problem),
        #[cfg(not(all(feature = "cpu", feature = "cuda", feature = "wgpu")))]
        _ => Err(Error::Unsupported {
            rule: format!("this build has no {device} backend to plan {problem:?} for {caps}"),
        }),
    }
}
