//! One backend for all tests of a process, so that each kernel is compiled once.

use std::sync::OnceLock;

use rmsnorm_wgpu::WgpuBackend;
use rmsnorm_wgpu::spec::Error;

type Opened = Result<WgpuBackend, Error>;

/// The backend on the first adapter.
pub fn backend() -> Opened {
    static BACKEND: OnceLock<Opened> = OnceLock::new();
    shared(BACKEND.get_or_init(|| WgpuBackend::new(0)))
}

/// The same device as if it had no subgroups.
pub fn backend_without_subgroups() -> Opened {
    static BACKEND: OnceLock<Opened> = OnceLock::new();
    shared(BACKEND.get_or_init(|| Ok(backend()?.without_subgroups())))
}

/// Errors cannot be cloned: the one that tests tell apart is made again, others keep their words.
fn shared(opened: &Opened) -> Opened {
    match opened {
        Ok(backend) => Ok(backend.clone()),
        Err(Error::Unavailable { backend, reason }) => Err(Error::Unavailable { backend, reason: reason.clone() }),
        Err(error) => Err(Error::Unsupported { rule: error.to_string() }),
    }
}
