//! The pool that workspaces are allocated from in the order of a stream.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, DriverError, sys};
use rmsnorm_spec::Error;

use crate::error::device_error;

/// Bytes that the pool keeps for the next call. The device's own pool keeps none: it gives memory back whenever a
/// stream is synchronized, and the next allocation maps it again.
const KEPT_BYTES: u64 = 256 << 20;

/// A pool of our own, since what the device's pool keeps is the caller's to say. Dropped, it gives its memory back and waits
/// for the context's next one: it is never destroyed.
///
/// The driver promises that a pool may be destroyed while frees of it are on their way. On driver 580 the next
/// synchronization then ended in a segmentation fault (docs/tried.md).
#[derive(Debug)]
pub(super) struct Pool {
    context: Arc<CudaContext>,
    handle: sys::CUmemoryPool,
}

/// The pools that nobody has. Each is empty after the next synchronization.
static UNUSED: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

// SAFETY:
// - handle: the driver takes a pool from any thread, and orders concurrent calls itself.
unsafe impl Send for Pool {}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`
const NO_HANDLE: u32 = 0;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: u32 = 1;

/// `CUmemPoolProps`, whose fields and enums differ from one version of cudarc's bindings to the next, while the bytes do not.
#[repr(C)]
struct Properties {
    allocation: u32,
    handles: u32,
    location: u32,
    device: i32,
    unused: [u64; 9],
}

const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemPoolProps>());

impl Pool {
    /// A pool on the context's device, empty or about to be. The context must be current on this thread.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = match unused.iter().position(|pool| pool.context == *context) {
            Some(index) => unused.swap_remove(index),
            None => Pool { context: context.clone(), handle: create(context)? },
        };
        drop(unused);
        // From here on it is put by when it is dropped.
        pool.keep(KEPT_BYTES).map_err(device_error("cuMemPoolSetAttribute"))?;
        Ok(pool)
    }

    pub(super) const fn handle(&self) -> sys::CUmemoryPool {
        self.handle
    }

    fn keep(&self, mut bytes: u64) -> Result<(), DriverError> {
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value: *mut c_void = (&raw mut bytes).cast();
        // SAFETY:
        // - pool: made by `create`, never destroyed;
        // - value: a u64, as this attribute has.
        unsafe { sys::cuMemPoolSetAttribute(self.handle, threshold, value) }.result()
    }

    /// Gives back what is free now, and at every synchronization what is free then.
    fn empty(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        self.keep(0)?;
        // SAFETY:
        // - context: current on this thread;
        // - pool: made by `create`, never destroyed.
        unsafe { sys::cuMemPoolTrimTo(self.handle, 0) }.result()
    }
}

fn create(context: &CudaContext) -> Result<sys::CUmemoryPool, Error> {
    let properties = Properties {
        allocation: PINNED,
        handles: NO_HANDLE,
        location: DEVICE,
        device: context.cu_device(),
        unused: [0; 9],
    };
    let mut handle = std::ptr::null_mut();
    // SAFETY:
    // - pointers: to locals; `Properties` has the size and the leading fields of what the call reads.
    unsafe { sys::cuMemPoolCreate(&raw mut handle, (&raw const properties).cast()) }
        .result()
        .map_err(device_error("cuMemPoolCreate"))?;
    Ok(handle)
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Of an error there is nowhere to return it: cudarc hands it to the next call. The context may be lost, and its pools
        // with it; what was handed over before is no reason to lose the pool.
        let before = self.context.check_err();
        let emptied = self.empty();
        if emptied.is_ok() {
            let pool = Pool { context: self.context.clone(), handle: self.handle };
            UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(pool);
        }
        self.context.record_err(before.and(emptied));
    }
}
