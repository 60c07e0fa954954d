//! A few backends for all tests of a process, so that most kernels are compiled once. A software
//! adapter compiles on one thread per device: with one device per CPU core, concurrent tests do not
//! wait for each other.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

use rmsnorm_wgpu::WgpuBackend;
use rmsnorm_wgpu::spec::Error;

type Opened = Result<WgpuBackend, Error>;

/// Backends on devices of the first adapter, used in turn.
struct InTurn {
    opened: OnceLock<Vec<Opened>>,
    turn: AtomicUsize,
}

impl InTurn {
    const fn new() -> Self {
        InTurn { opened: OnceLock::new(), turn: AtomicUsize::new(0) }
    }

    /// The next backend. `open` opens all of them before the first is returned.
    fn next(&self, open: impl Fn() -> Opened) -> Opened {
        let opened = self.opened.get_or_init(|| {
            // A GPU's driver compiles on the caller's thread.
            let first = open();
            let is_software = first.as_ref().is_ok_and(WgpuBackend::is_software);
            let more = if is_software { available_parallelism().map_or(1, usize::from) - 1 } else { 0 };
            std::iter::once(first).chain((0..more).map(|_| open())).collect()
        });
        shared(&opened[self.turn.fetch_add(1, Ordering::Relaxed) % opened.len()])
    }
}

/// A backend on the first adapter.
pub fn backend() -> Opened {
    static BACKENDS: InTurn = InTurn::new();
    BACKENDS.next(|| WgpuBackend::new(0))
}

/// The same without subgroups and f16 conversions.
pub fn backend_with_less() -> Opened {
    static BACKENDS: InTurn = InTurn::new();
    BACKENDS.next(|| Ok(WgpuBackend::new(0)?.without_subgroups().with_integer_f16()))
}

/// Errors cannot be cloned: `Unavailable` is made again, others keep their message.
fn shared(opened: &Opened) -> Opened {
    match opened {
        Ok(backend) => Ok(backend.clone()),
        Err(Error::Unavailable { backend, reason }) => Err(Error::Unavailable { backend, reason: reason.clone() }),
        Err(error) => Err(Error::Unsupported { rule: error.to_string() }),
    }
}
