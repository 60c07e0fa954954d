//! The backends of this process: for the CPU one for each number of threads, one for each CUDA device, made when they are first used.

use std::ptr::null_mut;
use std::sync::{PoisonError, RwLock};

use rmsnorm_core::Error;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::cuda::CudaBackend;
use rmsnorm_core::cuda::cudarc::driver::sys;

use crate::call::Call;

/// The backend of host memory, with so many threads.
pub(crate) fn cpu(threads: Option<usize>) -> Result<CpuBackend, Error> {
    match threads {
        Some(threads) => CpuBackend::shared(threads.max(1)),
        None => Ok(CpuBackend::new()),
    }
}

/// The backend of a CUDA device's primary context, for ever: its kernels stay loaded.
pub(crate) fn cuda(ordinal: usize) -> Result<&'static CudaBackend, Error> {
    static BACKENDS: RwLock<Vec<(usize, &CudaBackend)>> = RwLock::new(Vec::new());
    // What is in the list is whole, whoever panicked.
    let found = |backends: &Vec<(usize, &'static CudaBackend)>| {
        backends.iter().find(|(number, _)| *number == ordinal).map(|(_, backend)| *backend)
    };
    if let Some(backend) = found(&BACKENDS.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(backend);
    }
    // Which finds out whether there is a driver. A new context is made current, which is not the caller's wish.
    CudaBackend::device_count()?;
    let _current = KeepCurrent::new()?;
    // SAFETY:
    // - order: every call goes to the stream that the tensors' owner has them on, and what orders streams is theirs.
    let backend = unsafe { CudaBackend::primary(ordinal)? };
    let mut backends = BACKENDS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = found(&backends) {
        return Ok(first);
    }
    let backend: &CudaBackend = Box::leak(Box::new(backend));
    backends.push((ordinal, backend));
    Ok(backend)
}

/// Keeps the calling thread's current CUDA context: PyTorch and JAX take it for their current device.
pub(crate) struct KeepCurrent(sys::CUcontext);

impl KeepCurrent {
    /// Until this is dropped another context may be made current. The driver must have been found, as it is where there is a backend.
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
        // - context: none, or one that was current when this was made, and contexts of frameworks are not destroyed while they call.
        // Its failure would be that of a lost context, which the next call tells.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

/// Compiles what a call needs on that CUDA device.
pub(crate) fn prepare(ordinal: usize, call: &Call) -> Result<(), Error> {
    let backend = cuda(ordinal)?;
    let _current = KeepCurrent::new()?;
    backend.prepare(&call.problem()?)
}
