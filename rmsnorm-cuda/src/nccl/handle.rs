//! NCCL's own handle: made, used and given back, and the first failure, after which nothing is sent.

use std::cell::OnceCell;
use std::ffi::{c_int, c_void};
use std::{ptr, thread};

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::exchange::Exchange;
use super::failure::NcclFailure;
use super::id::NcclId;
use crate::library::nccl::{IN_PROGRESS, Nccl, SUCCESS, Status};

/// Bytes, whatever they are of: NCCL moves them as they are.
const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;

/// A communicator of NCCL's.
pub(super) struct Handle {
    nccl: &'static Nccl,
    comm: ncclComm_t,
    /// Whether it is ours to destroy.
    is_owned: bool,
    failure: OnceCell<NcclFailure>,
}

// SAFETY:
// - handle: NCCL takes a communicator from any thread, of which one at a time uses it: this is not `Sync`.
// - groups: NCCL counts them by thread, and each begins and ends within one call of ours.
unsafe impl Send for Handle {}

impl Handle {
    /// A rank of a new communicator, on the device whose context is current. Waits for the other ranks.
    pub(super) fn init(nccl: &'static Nccl, rank: c_int, ranks: c_int, id: NcclId) -> Result<Self, NcclFailure> {
        let mut comm = ptr::null_mut();
        // SAFETY:
        // - pointer: to a local of the type that the call writes.
        let status = unsafe { (nccl.functions.init_rank)(&raw mut comm, ranks, id.to_raw(), rank) };
        let operation = "ncclCommInitRank";
        // Of one that failed at once there is nothing to give back.
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
    /// It was made by this library, no other thread uses it meanwhile, and it lives as long as the handle.
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

    /// Whether nothing has failed yet, here or on the device. Waits for what a communicator that does not block has under way.
    ///
    /// # Errors
    /// The first failure.
    pub(super) fn check(&self) -> Result<(), NcclFailure> {
        if let Some(first) = self.failure.get() {
            return Err(first.clone());
        }
        self.finish("an earlier call", self.settled())
    }

    /// The communicator's state once it is not in progress.
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

    /// The outcome of a call that gave this status.
    fn finish(&self, operation: &'static str, status: Status) -> Result<(), NcclFailure> {
        let status = if status == IN_PROGRESS { self.settled() } else { status };
        if status == SUCCESS {
            return Ok(());
        }
        Err(self.failure.get_or_init(|| NcclFailure::new(self.nccl, operation, status)).clone())
    }

    /// Sends and receives all at once, in no order.
    ///
    /// # Safety
    /// - Stream: of the communicator's device.
    /// - Memory: the ranges lie within what begins at `from` and at `to`, on that device, and are not freed or used otherwise before the
    ///   stream is done.
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

    /// Every rank's part of `len` bytes of what begins at `to` goes to all; this rank's begins at byte `own`.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange), of as many parts as there are ranks.
    pub(super) unsafe fn all_gather(
        &self,
        to: u64,
        own: usize,
        len: usize,
        stream: cudaStream_t,
    ) -> Result<(), NcclFailure> {
        // SAFETY:
        // - memory, stream: the caller's promises; NCCL knows by the two addresses that it is in place;
        // - communicator: not destroyed before this is dropped.
        let status = unsafe {
            let from = address::<c_void>(to, own).cast_const();
            (self.nccl.functions.all_gather)(from, address(to, 0), len, BYTES, self.comm, stream)
        };
        self.finish("ncclAllGather", status)
    }

    /// The sums of `len` elements over all ranks.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange), of `len` elements of that type; both addresses may be the same.
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

    /// Gives the communicator back without waiting for what is under way.
    pub(super) fn abort(mut self) {
        self.give_up();
    }

    fn give_up(&mut self) {
        if std::mem::take(&mut self.is_owned) {
            // SAFETY:
            // - communicator: made by `init`, given back once, and not used after.
            // Of a failure there is nobody to tell.
            unsafe { (self.nccl.functions.abort)(self.comm) };
        }
    }
}

/// Waits for what is under way. A rank that failed, or whose thread panics, does not: the others may wait for it.
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
        // Of a failure there is nobody to tell, and nothing that could be aborted any more.
        unsafe { (self.nccl.functions.destroy)(self.comm) };
    }
}

/// What is enqueued between the start of a group and its end. It ends in any case, or the thread's later calls would join it.
struct Group<'a> {
    handle: &'a Handle,
    /// Of what is in the group, the first failure.
    failed: Option<(&'static str, Status)>,
}

impl<'a> Group<'a> {
    fn start(handle: &'a Handle) -> Result<Self, NcclFailure> {
        // SAFETY:
        // - pairing: `end` is called by who has the group.
        let status = unsafe { (handle.nccl.functions.group_start)() };
        handle.finish("ncclGroupStart", status)?;
        Ok(Group { handle, failed: None })
    }

    /// One more call, if those before it went well.
    fn enqueue(&mut self, operation: &'static str, call: impl FnOnce() -> Status) {
        if self.failed.is_none() {
            // A communicator that does not block is in progress only from the end of the group on.
            let status = Some(call()).filter(|status| ![SUCCESS, IN_PROGRESS].contains(status));
            self.failed = status.map(|status| (operation, status));
        }
    }

    fn end(self) -> Result<(), NcclFailure> {
        // SAFETY:
        // - pairing: the group was started on this thread, by this call of ours.
        let status = unsafe { (self.handle.nccl.functions.group_end)() };
        let (operation, status) = self.failed.unwrap_or(("ncclGroupEnd", status));
        self.handle.finish(operation, status)
    }
}

/// A byte of device memory, as NCCL takes it.
fn address<T>(begin: u64, byte: usize) -> *mut T {
    ptr::without_provenance_mut(begin as usize + byte)
}
