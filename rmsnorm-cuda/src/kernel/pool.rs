//! The pool of workspaces, for allocations in stream order.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, DriverError, sys};
use rmsnorm_spec::Error;

use crate::error::device_error;

/// Bytes that the pool keeps for the next call. The device's default pool keeps none: it unmaps
/// free memory at each synchronization, and the next allocation maps it again.
const KEPT_BYTES: u64 = 256 << 20;

/// A pool of this crate, because the settings of the device's default pool belong to the caller. A
/// dropped pool frees its memory and is reused by the next one of the context; it is never
/// destroyed.
///
/// The driver promises that a pool may be destroyed while frees are pending. On driver 580 the next
/// synchronization then ended in a segmentation fault (docs/internals/tried.md).
#[derive(Debug)]
pub(super) struct Pool {
    context: Arc<CudaContext>,
    handle: sys::CUmemoryPool,
}

/// The pools that are not in use. Each is empty after the next synchronization.
static UNUSED: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

// SAFETY:
// - handle: the driver accepts a pool from any thread, and orders concurrent calls itself.
unsafe impl Send for Pool {}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`
const NO_HANDLE: u32 = 0;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const DEVICE: u32 = 1;

/// `CUmemPoolProps`. Its fields and enums differ between versions of cudarc's bindings; its bytes
/// do not.
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
    /// A pool on the context's device, empty at the latest after the next synchronization. The
    /// context must be current on this thread.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = match unused.iter().position(|pool| pool.context == *context) {
            Some(index) => unused.swap_remove(index),
            None => Pool { context: context.clone(), handle: create(context)? },
        };
        drop(unused);
        // If this fails, `drop` puts the pool into `UNUSED`.
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
        // - value: a u64, the type of this attribute.
        unsafe { sys::cuMemPoolSetAttribute(self.handle, threshold, value) }.result()
    }

    /// Returns free memory to the device, now and at each later synchronization.
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
    // - pointers: to locals; `Properties` has the size and the leading fields that the call reads.
    unsafe { sys::cuMemPoolCreate(&raw mut handle, (&raw const properties).cast()) }
        .result()
        .map_err(device_error("cuMemPoolCreate"))?;
    Ok(handle)
}

impl Drop for Pool {
    fn drop(&mut self) {
        // `drop` cannot return an error, so cudarc reports it at the next call. If emptying fails
        // (the context may be lost, and its pools with it), the pool is not reused. An error that
        // was recorded earlier does not prevent reuse.
        let before = self.context.check_err();
        let emptied = self.empty();
        if emptied.is_ok() {
            let pool = Pool { context: self.context.clone(), handle: self.handle };
            UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(pool);
        }
        self.context.record_err(before.and(emptied));
    }
}
