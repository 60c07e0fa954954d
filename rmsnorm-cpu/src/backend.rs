//! [`CpuBackend`]: the instruction set, the threads, and the trait.

use std::error::Error as _;
use std::hint::black_box;
use std::sync::{Arc, OnceLock, mpsc};
use std::{fmt, io, thread};

use rmsnorm_spec::Error;
use rmsnorm_tuning::TuningSource;

use crate::caps::{Caps, Isa};
use crate::tuning::Tuning;

/// Normalizes slices on the calling thread and, for large calls, on a rayon thread pool.
///
/// Cheap to clone; clones share the pool. Results do not depend on the instruction set or the
/// number of threads.
///
/// # After a fork
/// A child process has none of its parent's threads. A backend made before the fork runs on the
/// calling thread there, and so does [`new`](Self::new) if the parent has called it.
/// [`with_isa_and_threads`](Self::with_isa_and_threads) starts new threads for the child. If the parent has used rayon's global
/// pool but never called `new`, the child must call `with`: rayon's global pool has lost its
/// threads, and `new` cannot tell.
///
/// # Example
/// ```
/// use rmsnorm_cpu::{Backward, CpuBackend, Forward, spec::{Error, NormSpec}};
/// # fn main() -> Result<(), Error> {
/// let backend = CpuBackend::new();
/// let norm = NormSpec::rms(2, 4, 1e-6);
/// let (x, weight) = ([1.0f32, 2.0, 3.0, 4.0, -1.0, 1.0, -1.0, 1.0], [1.0f32; 4]);
/// let (mut y, mut rstd) = ([0.0f32; 8], [0.0f32; 2]);
/// backend.forward(&norm, Forward::new(&x, &mut y).weight(&weight).rstd(&mut rstd))?;
///
/// let (dy, mut dx, mut dweight) = ([1.0f32; 8], [0.0f32; 8], [0.0f32; 4]);
/// backend.backward(&norm, Backward::new(&dy, &x, &rstd, &mut dx).weight(&weight).dweight(&mut dweight))?;
/// assert!((y[0] - 1.0 / 7.5f32.sqrt()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CpuBackend {
    caps: Caps,
    /// `None`: the pool of the calling thread. That is rayon's global pool unless the caller
    /// installed another.
    pool: Option<Arc<Pool>>,
    /// The process that owns the pool's threads.
    process: u32,
    /// The source of the tuning table.
    source: &'static TuningSource,
}

impl CpuBackend {
    /// The strongest instruction set of this processor, and the rayon pool of the calling thread:
    /// the pool that the thread belongs to, or the global pool, which is started if needed. If the
    /// system refuses its threads, all work runs on the calling thread. If the table named by
    /// `RMSNORM_TUNING` does not fit, the built-in one is used; [`try_new`](Self::try_new) returns
    /// an error instead.
    pub fn new() -> Self {
        let (tuning, source) = table().unwrap_or((Tuning::ZEN5, &BUILT_IN));
        CpuBackend::of_pool(tuning, source)
    }

    /// As [`new`](Self::new), with an error for an unusable tuning table.
    ///
    /// # Errors
    /// `Unavailable`, with the reason, if the table named by `RMSNORM_TUNING` does not fit.
    pub fn try_new() -> Result<Self, Error> {
        let (tuning, source) = table()?;
        Ok(CpuBackend::of_pool(tuning, source))
    }

    fn of_pool(tuning: Tuning, source: &'static TuningSource) -> Self {
        let (threads, process) = pool_here();
        CpuBackend { caps: Caps { isa: Isa::detect(), threads, tuning }, pool: None, process, source }
    }

    /// This instruction set and exactly this number of threads. With 1 thread all work runs on the
    /// calling thread.
    ///
    /// # Errors
    /// `Unavailable` if the processor lacks the instruction set (the error then names the backend,
    /// such as `cpu-avx2`), `threads` is 0, the threads cannot be started, or the table named by
    /// `RMSNORM_TUNING` does not fit.
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::{CpuBackend, Isa};
    /// let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1)?;
    /// assert_eq!(backend.threads(), 1);
    /// # Ok::<(), rmsnorm_cpu::spec::Error>(())
    /// ```
    pub fn with_isa_and_threads(isa: Isa, threads: usize) -> Result<Self, Error> {
        if !isa.is_available() {
            let backend = match isa {
                Isa::Portable => "cpu-portable",
                Isa::Avx2 => "cpu-avx2",
                Isa::Avx512 => "cpu-avx512",
            };
            return Err(Error::Unavailable { backend, reason: format!("this processor has no {isa}") });
        }
        let unavailable = |reason| Error::Unavailable { backend: "cpu", reason };
        if threads == 0 {
            return Err(unavailable("threads must be at least 1, got 0".into()));
        }
        let (tuning, source) = table()?;
        // With one thread nothing is split, so the process id is not needed, and the system call is
        // saved.
        let process = if threads == 1 { 0 } else { std::process::id() };
        let pool = if threads == 1 {
            None
        } else {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).spawn_handler(start).build();
            Some(Arc::new(Pool(Some(pool.map_err(|error| unavailable(error.to_string()))?), process)))
        };
        Ok(CpuBackend { caps: Caps { isa, threads, tuning }, pool, process, source })
    }

    /// The strongest instruction set and exactly this number of threads, shared by all callers that
    /// pass the same number. For libraries with a number of threads that may change from call to
    /// call (PyTorch). The threads start on the first request and end with the process. After a
    /// fork, a child starts new ones.
    ///
    /// # Errors
    /// As [`with_isa_and_threads`](Self::with_isa_and_threads).
    ///
    /// # Example
    /// ```
    /// # use rmsnorm_cpu::CpuBackend;
    /// assert_eq!(CpuBackend::shared(2)?.threads(), 2);
    /// # Ok::<(), rmsnorm_cpu::spec::Error>(())
    /// ```
    pub fn shared(threads: usize) -> Result<Self, Error> {
        if threads <= 1 {
            return CpuBackend::with_isa_and_threads(Isa::detect(), threads);
        }
        let process = std::process::id();
        let mut place = &SHARED;
        loop {
            match place.get().map(AsRef::as_ref) {
                Some(Shared { backend, .. }) if (backend.process, backend.threads()) == (process, threads) => {
                    return Ok(backend.clone());
                }
                Some(shared) => place = &shared.next,
                // If another thread sets this entry first, the loop checks its backend next, and
                // this one's threads end.
                None => drop(place.set(Box::new(Shared {
                    backend: CpuBackend::with_isa_and_threads(Isa::detect(), threads)?,
                    next: OnceLock::new(),
                }))),
            }
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.caps.isa
    }

    /// The number of threads that large calls are split over; 1 in a child of the process that owns
    /// the threads.
    pub fn threads(&self) -> usize {
        self.tasks_here(self.caps.threads)
    }

    /// The tuning table in use: `built in`, or a file and its date. The bits of results do not
    /// depend on it.
    pub fn tuning(&self) -> String {
        self.source.to_string()
    }

    /// The same threads with another tuning table.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_tuning(&self, tuning: Tuning) -> Self {
        static TRIED: TuningSource = TuningSource::Tried;
        CpuBackend { caps: Caps { tuning, ..self.caps }, source: &TRIED, ..self.clone() }
    }

    pub(crate) fn caps(&self) -> &Caps {
        &self.caps
    }

    /// The number of tasks in this process, for a plan with `tasks` tasks. It is 1 in a child
    /// process, which has no threads for the others. The bits of a result do not depend on it.
    pub(crate) fn tasks_here(&self, tasks: usize) -> usize {
        // The process id takes a system call, so it is read only if there are tasks to split.
        if tasks > 1 && std::process::id() != self.process { 1 } else { tasks }
    }

    /// Runs `work` in this backend's pool, if there is one and `work` has several tasks; otherwise
    /// on the calling thread.
    pub(crate) fn install<O: Send>(&self, tasks: usize, work: impl FnOnce() -> O + Send) -> O {
        match self.pool.as_ref().and_then(|pool| pool.0.as_ref()) {
            Some(pool) if tasks > 1 => pool.install(work),
            Some(_) | None => work(),
        }
    }
}

/// The device as text: `x86_64, avx512, 2 threads`.
impl fmt::Display for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = self.threads();
        let plural = if threads == 1 { "" } else { "s" };
        write!(f, "{}, {}, {threads} thread{plural}", std::env::consts::ARCH, self.isa())
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        CpuBackend::new()
    }
}

/// A backend made by [`CpuBackend::shared`], and the next one. A list without a lock, because a
/// lock held by another thread during a fork is never released in the child.
struct Shared {
    backend: CpuBackend,
    next: OnceLock<Box<Shared>>,
}

static SHARED: OnceLock<Box<Shared>> = OnceLock::new();

/// The source of the built-in table.
static BUILT_IN: TuningSource = TuningSource::BuiltIn;

/// The tuning table chosen by the environment.
fn table() -> Result<(Tuning, &'static TuningSource), Error> {
    match Tuning::of_process() {
        Ok((tuning, source)) => Ok((*tuning, source)),
        Err(reason) => Err(Error::Unavailable { backend: "cpu", reason: reason.clone() }),
    }
}

/// The threads of a backend, and the process that owns them.
#[derive(Debug)]
struct Pool(Option<rayon::ThreadPool>, u32);

impl Drop for Pool {
    fn drop(&mut self) {
        if std::process::id() != self.1 {
            // A child has no threads to end, and a lock held by one during the fork is never
            // released.
            std::mem::forget(self.0.take());
        }
    }
}

/// Bytes of address space that must be free when a thread starts. Its stack takes 2 MiB, and glibc
/// reserves 64 MiB for its heap. Allocators keep no free blocks of this size, so each request
/// reaches the system.
const ROOM_OF_A_THREAD: usize = 64 << 20;

/// Starts a thread and waits until it runs. A thread maps memory before it runs, and the process
/// aborts if the system refuses. So this checks for room first, and threads start one after the
/// other.
fn start(thread: rayon::ThreadBuilder) -> io::Result<()> {
    let mut room = Vec::<u8>::new();
    room.try_reserve_exact(ROOM_OF_A_THREAD).map_err(|_| io::ErrorKind::OutOfMemory)?;
    drop(black_box(room));
    let (running, is_running) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        // The receiver is still waiting.
        let _: Result<(), _> = running.send(());
        thread.run();
    })?;
    is_running.recv().map_err(io::Error::other)
}

/// The pool that splits work of the calling thread: its number of threads (1 if there are none and
/// nothing may be split), and the process that owns them. The process id is read once, because that
/// takes a tenth of the time of a call of one row.
fn pool_here() -> (usize, u32) {
    if rayon::current_thread_index().is_some() {
        return (rayon::current_num_threads(), std::process::id());
    }
    static GLOBAL: OnceLock<(usize, u32)> = OnceLock::new();
    *GLOBAL.get_or_init(|| {
        let threads = match rayon::ThreadPoolBuilder::new().spawn_handler(start).build_global() {
            // The error has a source if the system refused a thread. Asking rayon again would
            // panic.
            Err(error) if error.source().is_some() => 1,
            // Started here, or before by the application.
            Ok(()) | Err(_) => rayon::current_num_threads(),
        };
        (threads, std::process::id())
    })
}
