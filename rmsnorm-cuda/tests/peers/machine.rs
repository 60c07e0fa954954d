//! The devices, for one test at a time, and ranks on them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use rmsnorm_conformance::testing::available;
use rmsnorm_cuda::cudarc::driver::{result, sys};
use rmsnorm_cuda::{CudaBackend, PeerGroup};

/// The number of CUDA's hardware queues, 8 by default; two streams on one queue wait for each
/// other.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// All devices. No other test runs meanwhile, because ranks on one device take all of it.
pub struct Machine {
    devices: Vec<CudaBackend>,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    /// `None`, with the reason on stdout, if there is no GPU and none is required.
    pub fn open() -> Option<Machine> {
        static ALONE: Mutex<()> = Mutex::new(());
        // The mutex guards no data, so a failed test leaves nothing inconsistent.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        allow_queues();
        available(CudaBackend::device_count().map(|_| ())).unwrap()?;
        let count = CudaBackend::device_count().unwrap();
        let devices = (0..count).map(|ordinal| available(CudaBackend::new(ordinal)).unwrap());
        let devices: Vec<_> = devices.collect::<Option<_>>()?;
        for device in &devices {
            // SAFETY:
            // - streams: these tests use the tensors of one stream on that stream only.
            unsafe { device.stream().context().disable_event_tracking() };
        }
        Some(Machine { devices, _alone: alone })
    }

    /// `ranks` ranks in each way that the machine allows: as streams of one device, and in turn on all
    /// devices, of which some may have more ranks than others.
    pub fn places(&self, ranks: usize) -> Vec<Vec<CudaBackend>> {
        let in_turn = self.devices.iter().cycle().take(ranks).map(stream_of).collect();
        if self.devices.len() == 1 || ranks == 1 { vec![in_turn] } else { vec![self.on_one(ranks), in_turn] }
    }

    /// The number of devices.
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// `ranks` ranks as streams of the first device.
    pub fn on_one(&self, ranks: usize) -> Vec<CudaBackend> {
        (0..ranks).map(|_| stream_of(&self.devices[0])).collect()
    }
}

/// The backend on a new stream.
fn stream_of(device: &CudaBackend) -> CudaBackend {
    device.on(device.stream().context().new_stream().unwrap()).unwrap()
}

/// Raises the number of hardware queues to CUDA's maximum, unless the variable is set. Must come
/// before CUDA starts.
fn allow_queues() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        if std::env::var_os(QUEUES).is_none() {
            // SAFETY:
            // - other threads: those of the test harness, which start tests that wait here for
            //   their turn; none reads the environment.
            unsafe { std::env::set_var(QUEUES, "32") };
        }
    });
}

/// Holds streams until all threads have enqueued their work, so that delays between threads do not
/// matter.
pub struct Gate {
    /// A word in host memory that every device can read; 1 when the gate is open.
    word: &'static AtomicU32,
    threads: Barrier,
}

impl Gate {
    /// A gate for `threads` threads, to be opened once.
    pub fn new(machine: &Machine, threads: usize) -> Gate {
        machine.devices[0].stream().context().bind_to_thread().unwrap();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY:
        // - memory: of the size and alignment of the word, set before it is shared, and never
        //   freed.
        let word = unsafe {
            let word = result::malloc_host(size_of::<AtomicU32>(), flags).unwrap().cast::<AtomicU32>();
            word.write(AtomicU32::new(0));
            &*word
        };
        Gate { word, threads: Barrier::new(threads) }
    }

    /// All work that is enqueued after this call waits.
    pub fn stop(&self, backend: &CudaBackend) {
        backend.stream().context().bind_to_thread().unwrap();
        let (word, is_open) = (std::ptr::from_ref(self.word) as sys::CUdeviceptr, 1);
        let is_equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY:
        // - memory: the word is never freed, and has one address for the host and all devices.
        unsafe { sys::cuStreamWaitValue32_v2(backend.stream().cu_stream(), word, is_open, is_equal) }.result().unwrap();
    }

    /// Waits for all threads, then opens the gate.
    pub fn open(&self) {
        self.threads.wait();
        self.word.store(1, Ordering::Release);
    }
}

/// Runs `run` on a thread for each rank; returns the results by rank.
pub fn on_each<Out: Send>(groups: Vec<PeerGroup>, run: impl Fn(PeerGroup) -> Out + Sync) -> Vec<Out> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
