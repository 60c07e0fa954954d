//! The memory that ranks share, and the word through which a kernel reports to the host.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use rmsnorm_spec::Error;

use super::params::{EMPTY_BYTE, STATE_BYTES};
use super::users::{User, Users};
use crate::backend::CudaBackend;
use crate::error::device_error;

/// CUDA's handle of the calling thread's per-thread default stream.
const PER_THREAD: sys::CUstream = std::ptr::without_provenance_mut(2);

/// The layout of a rank's memory: `bytes` of slots for each other rank, twice, then the rank's
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) ranks: usize,
    /// A multiple of 16.
    pub(super) bytes: usize,
}

impl Layout {
    /// A layout with `bytes` rounded up to whole slots; `None` if the size is more than a memory
    /// can have.
    pub(super) fn new(ranks: usize, bytes: usize) -> Option<Self> {
        let layout = Layout { ranks, bytes: bytes.checked_next_multiple_of(16)? };
        let slots = layout.bytes.checked_mul(2 * ranks)?;
        (slots <= isize::MAX as usize - STATE_BYTES).then_some(layout)
    }

    /// Bytes of slots for one epoch.
    pub(super) fn set_bytes(&self) -> usize {
        (self.ranks - 1) * self.bytes
    }

    /// The offset of rank `from`'s slots in the memory of rank `at`; a rank has no slots for
    /// itself.
    pub(super) fn first_slot(&self, at: usize, from: usize) -> usize {
        (if from < at { from } else { from - 1 }) * self.bytes
    }

    /// The offset of the state.
    pub(super) fn state(&self) -> usize {
        2 * self.set_bytes()
    }

    /// The size of the memory in bytes.
    pub(super) fn len(&self) -> usize {
        self.state() + STATE_BYTES
    }
}

/// The memory of one rank of a group.
pub(super) struct Part {
    stream: Arc<CudaStream>,
    /// The address of the memory.
    pub(super) address: sys::CUdeviceptr,
    /// Whether this crate frees that memory.
    is_owned: bool,
    pub(super) report: Report,
}

/// The memory of the ranks in this process, by rank, or of one rank. It is freed with the last
/// group that uses any of it, when all work on their streams is done.
#[derive(Default)]
pub(super) struct Parts {
    here: Vec<Part>,
    /// Memory of ranks in other processes, as mapped here.
    mapped: Vec<Mapped>,
    /// The processes that map the memory of this process, if they may.
    users: Option<Users>,
}

/// A peer's memory, mapped into this process.
pub(super) struct Mapped {
    pub(super) address: sys::CUdeviceptr,
    pub(super) context: Arc<CudaContext>,
    /// Keeps the owner from freeing the memory, until this is dropped.
    pub(super) _user: User,
}

impl Parts {
    /// Allocates the next rank's memory and clears it.
    pub(super) fn allocate(&mut self, backend: &CudaBackend, layout: &Layout) -> Result<(), Error> {
        bind(backend)?;
        let report = Report::new()?;
        // SAFETY:
        // - context: current on this thread;
        // - length: not zero, as there always is a state;
        // - contents: set below, before the address is given out.
        // Not from a pool: peers cannot access the memory of pools.
        let allocated = unsafe { result::malloc_sync(layout.len()) };
        // A report that is not pushed must be freed here; a second failure adds no information.
        let give_up = |_: &DriverError| report.free().unwrap_or_default();
        let address = allocated.inspect_err(give_up).map_err(device_error("cuMemAlloc"))?;
        self.here.push(Part { stream: backend.stream().clone(), address, is_owned: true, report });
        // SAFETY:
        // - memory: allocated above, with the layout's length.
        unsafe { empty(backend, address, layout) }
    }

    /// Uses memory of the caller as the next rank's, and clears it.
    ///
    /// # Safety
    /// - Memory: `layout.len()` bytes lie at `address`, which the backend's device can write, and
    ///   no other code uses them yet.
    pub(super) unsafe fn borrow(
        &mut self,
        backend: &CudaBackend,
        address: sys::CUdeviceptr,
        layout: &Layout,
    ) -> Result<(), Error> {
        bind(backend)?;
        let report = Report::new()?;
        self.here.push(Part { stream: backend.stream().clone(), address, is_owned: false, report });
        // SAFETY:
        // - memory: the caller's promise.
        unsafe { empty(backend, address, layout) }
    }

    pub(super) fn get(&self, index: usize) -> Option<&Part> {
        self.here.get(index)
    }

    /// Allows other processes to map the memory of this process.
    pub(super) fn has_users(&mut self, users: Users) {
        self.users = Some(users);
    }

    /// Keeps a peer's memory mapped.
    pub(super) fn has_mapped(&mut self, mapped: Mapped) {
        self.mapped.push(mapped);
    }

    /// The address of each rank's memory.
    pub(super) fn addresses(&self) -> Vec<sys::CUdeviceptr> {
        self.here.iter().map(|part| part.address).collect()
    }
}

/// Fills slots with [`EMPTY_BYTE`] and the state with zeros, and waits until that is done.
///
/// # Safety
/// - Memory: `layout.len()` bytes lie at `address`, which the backend's device can write, and no
///   other code uses them yet.
unsafe fn empty(backend: &CudaBackend, address: sys::CUdeviceptr, layout: &Layout) -> Result<(), Error> {
    let stream = backend.stream();
    let fill = |first: usize, byte: u8, len: usize| {
        // The driver rejects a length of zero, which the slots of a single rank have.
        if len == 0 {
            return Ok(());
        }
        // SAFETY:
        // - memory: a part of the memory that the caller promises;
        // - context: current on this thread, as `bind` was called.
        unsafe { result::memset_d8_async(address + first as u64, byte, len, stream.cu_stream()) }
    };
    fill(0, EMPTY_BYTE, layout.state())
        .and_then(|()| fill(layout.state(), 0, STATE_BYTES))
        .and_then(|()| stream.synchronize())
        .map_err(device_error("cuMemsetD8Async"))
}

/// Makes the backend's context current on this thread; reports an earlier error that cudarc could
/// not return.
fn bind(backend: &CudaBackend) -> Result<(), Error> {
    backend.stream().context().bind_to_thread().map_err(device_error("before a group is made"))
}

impl Drop for Parts {
    fn drop(&mut self) {
        // Each kernel ends by its deadline. Memory stays allocated while a kernel may run, and also
        // if that is unknown, as with a stream under capture or a lost context.
        let is_idle = |part: &Part| part.wait().is_ok();
        if !self.here.iter().fold(true, |all, part| all & is_idle(part)) {
            // Forgetting also keeps the locks, so the owners do not free their memory.
            self.mapped.drain(..).for_each(std::mem::forget);
            return;
        }
        // Unmap first: all ranks may be waiting for each other below.
        self.mapped.clear();
        if self.users.as_ref().is_some_and(|users| !users.are_gone()) {
            return;
        }
        for part in &self.here {
            // `drop` cannot return an error; cudarc reports it at the next call.
            let context = part.stream.context();
            context.record_err(context.bind_to_thread().and_then(|()| part.free()));
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let close = || {
            self.context.bind_to_thread()?;
            // SAFETY:
            // - address: mapped by `process::map` in this context, closed here only;
            // - order: no work of this process that uses it is pending: `Parts` has waited, or
            //   there was no group yet.
            unsafe { sys::cuIpcCloseMemHandle(self.address) }.result()
        };
        // `drop` cannot return an error; cudarc reports it at the next call.
        self.context.record_err(close());
    }
}

impl Part {
    /// Waits for enqueued work.
    fn wait(&self) -> Result<(), DriverError> {
        // The per-thread handle means another stream on this thread than on the thread that made
        // the calls.
        if self.stream.cu_stream() == PER_THREAD {
            self.stream.context().synchronize()
        } else {
            self.stream.synchronize()
        }
    }

    fn free(&self) -> Result<(), DriverError> {
        let freed = self.report.free();
        if !self.is_owned {
            return freed;
        }
        // SAFETY:
        // - address: allocated by `Parts::allocate`, freed here only, which is called once, in the
        //   `Drop` of the `Parts` that it belongs to;
        // - order: no work is pending on any of the group's streams, so no peer writes to it any
        //   more.
        freed.and(unsafe { result::free_sync(self.address) })
    }
}

/// A word in host memory that kernels write and the host reads without waiting for them.
pub(super) struct Report {
    host: *const AtomicU32,
    pub(super) device: sys::CUdeviceptr,
}

// SAFETY:
// - host: an address in page-locked memory that lives as long as the `Part`; the word there is only
//   accessed as an atomic.
unsafe impl Send for Report {}

// SAFETY:
// - as for `Send`.
unsafe impl Sync for Report {}

impl Report {
    /// A word that reports no missing rank. The context must be current on this thread.
    fn new() -> Result<Self, Error> {
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY:
        // - context: current on this thread;
        // - contents: set below.
        let host = unsafe { result::malloc_host(size_of::<AtomicU32>(), flags) };
        let host = host.map_err(device_error("cuMemHostAlloc"))?.cast::<AtomicU32>();
        let mut device = 0;
        // SAFETY:
        // - host: allocated above, page-aligned, long enough for an AtomicU32, and its address is
        //   not known to other code;
        // - pointer: to a local of the type that the call writes.
        let mapped = unsafe {
            host.write(AtomicU32::new(0));
            sys::cuMemHostGetDevicePointer_v2(&raw mut device, host.cast(), 0).result()
        };
        let report = Report { host, device };
        let give_up = |_: &DriverError| report.free().unwrap_or_default();
        mapped.inspect_err(give_up).map_err(device_error("cuMemHostGetDevicePointer"))?;
        Ok(report)
    }

    /// The owner calls it once, when no kernel that writes the word is pending, and does not read
    /// the word after.
    fn free(&self) -> Result<(), DriverError> {
        // SAFETY:
        // - host: allocated by `new`;
        // - once, and not used any more: this module calls it only for a report that is discarded.
        unsafe { result::free_host(self.host.cast_mut().cast::<c_void>()) }
    }

    /// The missing rank, if a kernel has reported one.
    pub(super) fn missing(&self) -> Option<usize> {
        // SAFETY:
        // - host: an AtomicU32 that lives as long as this does, as `Parts` frees it when it is
        //   dropped itself.
        let word = unsafe { &*self.host }.load(Ordering::Acquire);
        (word as usize).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_slots_for_all_others_twice_and_a_state() {
        let layout = Layout::new(4, 100).expect("a layout");
        assert_eq!(
            (layout.bytes, layout.set_bytes(), layout.state(), layout.len()),
            (112, 336, 672, 672 + STATE_BYTES)
        );
        // The slots of rank 1, without a gap for rank 1 itself.
        assert_eq!([0, 2, 3].map(|from| layout.first_slot(1, from)), [0, 112, 224]);
        for at in 0..4 {
            let mut slots: Vec<_> = (0..4).filter(|from| *from != at).map(|from| layout.first_slot(at, from)).collect();
            slots.sort_unstable();
            assert_eq!(slots, [0, 112, 224]);
        }
        assert_eq!(Layout::new(1, 100).map(|layout| layout.len()), Some(STATE_BYTES));
    }

    #[test]
    fn more_than_any_memory_has_is_no_layout() {
        assert_eq!(Layout::new(2, usize::MAX), None);
        assert_eq!(Layout::new(8, usize::MAX / 16), None);
        assert!(Layout::new(8, 1 << 40).is_some());
    }
}
