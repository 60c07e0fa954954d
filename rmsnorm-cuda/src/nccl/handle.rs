//! NCCL's handle: creation, use and destruction, and its first failure, after which nothing is
//! sent.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::{ptr, thread};

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::exchange::Exchange;
use super::failure::NcclFailure;
use super::id::NcclId;
use crate::library::nccl::{IN_PROGRESS, Nccl, SUCCESS, Status};

/// NCCL moves elements of every type as bytes.
const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;

/// NCCL's communicator.
pub(super) struct Handle {
    nccl: &'static Nccl,
    comm: ncclComm_t,
    /// Whether this handle destroys it.
    is_owned: bool,
    failure: OnceCell<NcclFailure>,
}

// SAFETY:
// - handle: NCCL accepts a communicator from any thread, if one at a time uses it: this is not
//   `Sync`.
// - groups: NCCL counts them per thread, and each begins and ends within one call of this crate.
unsafe impl Send for Handle {}

impl Handle {
    /// A rank of a new communicator, on the device of the current context. Waits for all ranks.
    pub(super) fn init(nccl: &'static Nccl, rank: c_int, ranks: c_int, id: NcclId) -> Result<Self, NcclFailure> {
        let mut comm = ptr::null_mut();
        // SAFETY:
        // - pointer: to a local of the type that the call writes.
        let status = unsafe { (nccl.functions.init_rank)(&raw mut comm, ranks, id.to_raw(), rank) };
        let operation = "ncclCommInitRank";
        // A communicator that failed at once needs no destruction.
        if status != SUCCESS && status != IN_PROGRESS {
            return Err(NcclFailure::new(nccl, operation, status));
        }
        let handle = Handle { nccl, comm, is_owned: true, failure: OnceCell::new() };
        handle.finish(operation, status)?;
        Ok(handle)
    }

    /// The caller's communicator.
    ///
    /// # Safety
    /// This library made it, no other thread uses it meanwhile, and it lives as long as the handle.
    pub(super) unsafe fn borrowed(nccl: &'static Nccl, comm: ncclComm_t) -> Self {
        Handle { nccl, comm, is_owned: false, failure: OnceCell::new() }
    }

    pub(super) fn raw(&self) -> ncclComm_t {
        self.comm
    }

    pub(super) fn rank(&self) -> Result<usize, NcclFailure> {
        self.number("ncclCommUserRank", self.nccl.functions.user_rank)
    }

    pub(super) fn ranks(&self) -> Result<usize, NcclFailure> {
        self.number("ncclCommCount", self.nccl.functions.count)
    }

    pub(super) fn device(&self) -> Result<usize, NcclFailure> {
        self.number("ncclCommCuDevice", self.nccl.functions.device)
    }

    fn number(
        &self,
        operation: &'static str,
        read: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> Status,
    ) -> Result<usize, NcclFailure> {
        let mut number = 0;
        // SAFETY:
        // - communicator: not destroyed before this is dropped;
        // - pointer: to a local of the type that the call writes.
        let status = unsafe { read(self.comm, &raw mut number) };
        self.finish(operation, status)?;
        Ok(number.unsigned_abs() as usize)
    }

    /// Whether no call has failed yet, including work on the device. Waits for pending operations
    /// of a non-blocking communicator.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn check(&self) -> Result<(), NcclFailure> {
        if let Some(first) = self.failure.get() {
            return Err(first.clone());
        }
        self.finish("an earlier call", self.settled())
    }

    /// The communicator's state when it is no longer in progress.
    fn settled(&self) -> Status {
        loop {
            let mut state = SUCCESS;
            // SAFETY:
            // - communicator: not destroyed before this is dropped;
            // - pointer: to a local of the type that the call writes.
            let status = unsafe { (self.nccl.functions.async_error)(self.comm, &raw mut state) };
            let state = if status == SUCCESS { state } else { status };
            if state != IN_PROGRESS {
                return state;
            }
            thread::yield_now();
        }
    }

    /// The result of a call with this status.
    fn finish(&self, operation: &'static str, status: Status) -> Result<(), NcclFailure> {
        let status = if status == IN_PROGRESS { self.settled() } else { status };
        if status == SUCCESS {
            return Ok(());
        }
        Err(self.failure.get_or_init(|| NcclFailure::new(self.nccl, operation, status)).clone())
    }

    /// Enqueues all sends and receives as one group, without an order between them.
    ///
    /// # Safety
    /// - Stream: of the communicator's device.
    /// - Memory: the ranges lie within the tensors at `from` and `to`, which are on that device,
    ///   and are not freed or used otherwise before the stream is done.
    pub(super) unsafe fn exchange(
        &self,
        exchanges: impl Iterator<Item = Exchange>,
        from: u64,
        to: u64,
        stream: cudaStream_t,
    ) -> Result<(), NcclFailure> {
        let functions = &self.nccl.functions;
        let mut group = Group::start(self)?;
        for Exchange { peer, send, receive } in exchanges {
            if !send.is_empty() {
                let data = address::<c_void>(from, send.start).cast_const();
                // SAFETY:
                // - memory, stream: the caller's promises;
                // - communicator: not destroyed before this is dropped.
                group.enqueue("ncclSend", || unsafe {
                    (functions.send)(data, send.len(), BYTES, peer, self.comm, stream)
                });
            }
            if !receive.is_empty() {
                let data = address(to, receive.start);
                // SAFETY:
                // - as above.
                group.enqueue("ncclRecv", || unsafe {
                    (functions.receive)(data, receive.len(), BYTES, peer, self.comm, stream)
                });
            }
        }
        group.end()
    }

    /// Gathers a part of `len` bytes from every rank into the tensor at `to`. This rank's part is
    /// already there, at byte `own`.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange); the tensor has a part for every rank.
    pub(super) unsafe fn all_gather(
        &self,
        to: u64,
        own: usize,
        len: usize,
        stream: cudaStream_t,
    ) -> Result<(), NcclFailure> {
        // SAFETY:
        // - memory, stream: the caller's promises; NCCL recognizes an in-place call from the two
        //   addresses;
        // - communicator: not destroyed before this is dropped.
        let status = unsafe {
            let from = address::<c_void>(to, own).cast_const();
            (self.nccl.functions.all_gather)(from, address(to, 0), len, BYTES, self.comm, stream)
        };
        self.finish("ncclAllGather", status)
    }

    /// Sums `len` elements over all ranks.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange), for `len` elements of `dtype`; both addresses may be the
    /// same.
    pub(super) unsafe fn all_reduce_sum(
        &self,
        from: u64,
        to: u64,
        len: usize,
        dtype: ncclDataType_t,
        stream: cudaStream_t,
    ) -> Result<(), NcclFailure> {
        let sum = ncclRedOp_t::ncclSum;
        // SAFETY:
        // - memory, stream: the caller's promises;
        // - communicator: not destroyed before this is dropped.
        let status = unsafe {
            let from = address::<c_void>(from, 0).cast_const();
            (self.nccl.functions.all_reduce)(from, address(to, 0), len, dtype, sum, self.comm, stream)
        };
        self.finish("ncclAllReduce", status)
    }

    /// Aborts the communicator without waiting for pending operations.
    pub(super) fn abort(mut self) {
        self.give_up();
    }

    fn give_up(&mut self) {
        if std::mem::take(&mut self.is_owned) {
            // SAFETY:
            // - communicator: made by `init`, given back once, and not used after.
            // A failure here cannot be reported.
            unsafe { (self.nccl.functions.abort)(self.comm) };
        }
    }
}

/// Waits for pending operations. A failed rank, or one whose thread panics, aborts instead, because
/// other ranks may be waiting for it.
impl Drop for Handle {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        if thread::panicking() || self.check().is_err() {
            return self.give_up();
        }
        // SAFETY:
        // - communicator: made by `init`, not destroyed yet.
        let status = unsafe { (self.nccl.functions.finalize)(self.comm) };
        if self.finish("ncclCommFinalize", status).is_err() {
            return self.give_up();
        }
        // SAFETY:
        // - communicator: made by `init`, finalized, given back once, and not used after.
        // A failure here cannot be reported, and a finalized communicator cannot be aborted.
        unsafe { (self.nccl.functions.destroy)(self.comm) };
    }
}

/// The calls between the start and the end of a group. `end` is always called; otherwise the
/// thread's later calls would join the group.
struct Group<'a> {
    handle: &'a Handle,
    /// The first failure in the group.
    failed: Option<(&'static str, Status)>,
}

impl<'a> Group<'a> {
    fn start(handle: &'a Handle) -> Result<Self, NcclFailure> {
        // SAFETY:
        // - pairing: the holder of the group calls `end`.
        let status = unsafe { (handle.nccl.functions.group_start)() };
        handle.finish("ncclGroupStart", status)?;
        Ok(Group { handle, failed: None })
    }

    /// Adds a call, if all calls before it succeeded.
    fn enqueue(&mut self, operation: &'static str, call: impl FnOnce() -> Status) {
        if self.failed.is_none() {
            // A non-blocking communicator is in progress only after the end of the group.
            let status = Some(call()).filter(|status| ![SUCCESS, IN_PROGRESS].contains(status));
            self.failed = status.map(|status| (operation, status));
        }
    }

    fn end(self) -> Result<(), NcclFailure> {
        // SAFETY:
        // - pairing: this call of `exchange` started the group on this thread.
        let status = unsafe { (self.handle.nccl.functions.group_end)() };
        let (operation, status) = self.failed.unwrap_or(("ncclGroupEnd", status));
        self.handle.finish(operation, status)
    }
}

/// The address of a byte of device memory, as NCCL's type.
fn address<T>(begin: u64, byte: usize) -> *mut T {
    ptr::without_provenance_mut(begin as usize + byte)
}
