//! The pool that workspaces are allocated from in the order of a stream.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};
use rmsnorm_spec::Error;

use crate::error::device_error;

/// Bytes that the pool keeps for the next call. The device's own pool keeps none: it gives memory back whenever a
/// stream is synchronized, and the next allocation maps it again.
const KEPT_BYTES: u64 = 256 << 20;

/// A pool of our own, since what the device's pool keeps is the caller's to say.
#[derive(Debug)]
pub(super) struct Pool {
    context: Arc<CudaContext>,
    handle: sys::CUmemoryPool,
}

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
    /// An empty pool on the context's device.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, Error> {
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
        // From here on it is destroyed when it is dropped.
        let pool = Pool { context: context.clone(), handle };
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
        // - pool: made by `new`, destroyed when `self` is dropped;
        // - value: a u64, as this attribute has.
        unsafe { sys::cuMemPoolSetAttribute(self.handle, threshold, value) }.result()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Of an error there is nowhere to return it: cudarc hands it to the next call.
        let bound = self.context.bind_to_thread();
        if bound.is_err() {
            // The context is lost, and its pools with it.
            return self.context.record_err(bound);
        }
        // SAFETY:
        // - context: current on this thread;
        // - pool: made by `new`, destroyed here only;
        // - memory: the driver keeps what was not freed yet, and the pool until it is.
        let destroyed = unsafe { sys::cuMemPoolDestroy(self.handle) }.result();
        self.context.record_err(destroyed);
    }
}
