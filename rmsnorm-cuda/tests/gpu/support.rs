//! The device, for one test at a time, and data for it.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::testing::{available, values};
use rmsnorm_cuda::CudaBackend;
use rmsnorm_cuda::cudarc::driver::{CudaSlice, DeviceRepr};
use rmsnorm_cuda::spec::Element;

/// The backend of one test. No other test runs meanwhile: some need most of the memory, and work on
/// the default stream would disturb the captures of another test.
pub struct Gpu {
    backend: CudaBackend,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for Gpu {
    type Target = CudaBackend;

    fn deref(&self) -> &CudaBackend {
        &self.backend
    }
}

impl Gpu {
    /// A backend on the default stream; `None`, with the reason on stdout, if there is no GPU and
    /// none is required.
    pub fn open() -> Option<Gpu> {
        static ALONE: Mutex<()> = Mutex::new(());
        // The mutex guards no data, so a failed test leaves nothing inconsistent.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let backend = available(CudaBackend::new(0)).unwrap()?;
        Some(Gpu { backend, _alone: alone })
    }

    /// Drops the backend, and keeps other tests locked out.
    pub fn close(self) -> MutexGuard<'static, ()> {
        self._alone
    }

    /// Whether this much memory is free; prints a line if not.
    pub fn has_free(&self, bytes: usize) -> bool {
        self.stream().synchronize().unwrap();
        let (free, _) = self.stream().context().mem_get_info().unwrap();
        let enough = free >= bytes;
        if !enough {
            println!("skipped: needs {} MiB of device memory, {} MiB are free", bytes >> 20, free >> 20);
        }
        enough
    }
}

/// [`values`] on the device.
pub fn upload<E: Element + DeviceRepr>(backend: &CudaBackend, seed: u64, len: usize) -> CudaSlice<E> {
    backend.stream().clone_htod(&values::<E>(seed, len)).unwrap()
}

/// The bytes of a tensor on the device: equal bytes are equal bits, NaN and signs of zero included.
pub fn bytes<E: Element>(backend: &CudaBackend, buffer: &CudaSlice<E>) -> Vec<u8> {
    bytemuck::cast_slice(&backend.download(buffer).unwrap()).to_vec()
}
