//! The timer, the copies and the size limits of each backend.

mod cpu;
pub(crate) mod cuda;
mod gpu;
mod wgpu;

use rmsnorm_core::{AnyBackend, Error};

use crate::measurable::Measurement;

/// Runs a measurement on any backend. On a CUDA device it runs on a stream whose calls can be
/// captured into a graph.
///
/// # Errors
/// `Device` if there is no such stream, `Unsupported` for a backend without a timer.
pub fn measure<M: Measurement>(backend: &AnyBackend, measurement: M) -> Result<M::Output, Error> {
    if let Some(backend) = backend.as_cpu() {
        Ok(measurement.run(backend))
    } else if let Some(backend) = backend.as_cuda() {
        Ok(measurement.run(&cuda::capturable(backend)?))
    } else if let Some(backend) = backend.as_wgpu() {
        Ok(measurement.run(backend))
    } else {
        let rule = format!("{} cannot be measured: it has no timer", backend.device());
        Err(Error::Unsupported { rule })
    }
}
