//! The backends of this process, made on first use: one CPU backend per number of threads, one CUDA
//! backend per device.

use std::ptr::null_mut;
use std::sync::{PoisonError, RwLock};

use rmsnorm_core::Error;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::cuda::CudaBackend;
use rmsnorm_core::cuda::cudarc::driver::sys;

/// The CPU backend with `threads` threads, or the default number.
pub(crate) fn cpu(threads: Option<usize>) -> Result<CpuBackend, Error> {
    match threads {
        Some(threads) => CpuBackend::shared(threads.max(1)),
        None => Ok(CpuBackend::new()),
    }
}

/// The backend of a CUDA device's primary context. It is never dropped, so its kernels stay loaded.
pub(crate) fn cuda(ordinal: usize) -> Result<&'static CudaBackend, Error> {
    static BACKENDS: RwLock<Vec<(usize, &CudaBackend)>> = RwLock::new(Vec::new());
    // A panic cannot leave a partial entry, so a poisoned lock is ignored.
    let found = |backends: &Vec<(usize, &'static CudaBackend)>| {
        backends.iter().find(|(number, _)| *number == ordinal).map(|(_, backend)| *backend)
    };
    if let Some(backend) = found(&BACKENDS.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(backend);
    }
    // `device_count` fails without a driver. `primary` makes its context current; the caller's is
    // restored.
    CudaBackend::device_count()?;
    let _current = KeepCurrent::new()?;
    // SAFETY:
    // - order: every call runs on the stream of the tensors' owner, who orders it with other
    //   streams.
    let backend = unsafe { CudaBackend::primary(ordinal)? };
    let mut backends = BACKENDS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = found(&backends) {
        return Ok(first);
    }
    let backend: &CudaBackend = Box::leak(Box::new(backend));
    backends.push((ordinal, backend));
    Ok(backend)
}

/// Restores the calling thread's current CUDA context when dropped: PyTorch and JAX use it as their
/// current device.
pub(crate) struct KeepCurrent(sys::CUcontext);

impl KeepCurrent {
    /// Saves the current context. The driver must be loaded, as it is once a backend exists.
    pub(crate) fn new() -> Result<Self, Error> {
        let mut current = null_mut();
        // SAFETY:
        // - library: the driver is loaded, as the callers say;
        // - pointer: to a local of the type that the call writes.
        let failed = unsafe { sys::cuCtxGetCurrent(&raw mut current) }.result();
        failed.map_err(|error| Error::Device { backend: "cuda", source: Box::new(error) })?;
        Ok(KeepCurrent(current))
    }
}

impl Drop for KeepCurrent {
    fn drop(&mut self) {
        // SAFETY:
        // - library: loaded;
        // - context: none, or the one that was current when this was made; frameworks do not
        //   destroy a context during a call.
        //
        // The result is ignored: it is an error only if the context is lost, which the next call
        // reports.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}
