//! [`NcclComm`]: the communicator that callers hold.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::nccl::sys::ncclComm_t;
use rmsnorm_spec::Error;

use super::handle::Handle;
use super::id::NcclId;
use crate::backend::place;
use crate::error::device_error;
use crate::library::nccl::nccl;

/// A rank of a group of devices that communicate through NCCL: a
/// [`Collective`](rmsnorm_dist::Collective) of [`CudaBackend`]s. Each rank has its own device;
/// ranks are threads of one process, or processes.
///
/// NCCL 2.14 or later is loaded at its first use: `libnccl.so.2` or `libnccl.so`, from the folder
/// in the variable `RMSNORM_NCCL`, or, if it is not set, through the system's loader.
///
/// # Ordering
/// Calls are enqueued on the communicator's stream, not on a backend's: create the communicator
/// with `backend.stream().clone()`. Writes of a tensor must come before the call, on that stream or
/// on another stream of the context that cudarc orders by its events. With events off, the caller
/// orders them, and a norm composed by [`Sharded`](rmsnorm_dist::Sharded) needs the backend's own
/// stream, because only `Sharded` sees the memory between its steps. Every rank makes the same
/// calls in the same order, and none while the thread has an open `ncclGroupStart` group.
///
/// # Errors
/// An invalid argument is refused before anything is sent; the call may be repeated with a valid
/// one. After a failure of NCCL, in the call or later on the device, the ranks may be out of step:
/// every later call returns [`Error::Device`] with that first [`NcclFailure`](crate::NcclFailure).
/// NCCL does not detect a rank that makes no call: the other ranks wait.
///
/// # Order of additions
/// [`all_to_all`](rmsnorm_dist::Collective::all_to_all) and
/// [`all_gather`](rmsnorm_dist::Collective::all_gather) only move bytes.
/// [`all_reduce_sum`](Self::all_reduce_sum) adds in an order that NCCL chooses.
///
/// # CUDA graphs
/// Calls may be captured, under the conditions of [`CudaBackend`]. NCCL connects the ranks at the
/// first call of each kind, so make one before the capture. Drop the graph before the communicator.
///
/// # Dropping
/// Dropping waits for enqueued work, and for NCCL's other ranks on this machine, so let each thread
/// drop its own communicator. After a failure, or if the thread panics, the communicator is
/// [aborted](Self::abort) instead, so that a failed rank does not block the others.
///
/// [`CudaBackend`]: crate::CudaBackend
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::dist::{Collective, RowShares};
/// use rmsnorm_cuda::spec::bf16;
/// use rmsnorm_cuda::{CudaBackend, NcclComm, NcclId};
///
/// /// One of two processes; `id` was made by `NcclComm::unique_id` in one of them.
/// fn run(rank: usize, id: NcclId) -> Result<(), Box<dyn std::error::Error>> {
///     let backend = CudaBackend::new(rank)?;
///     let comm = NcclComm::from_rank(backend.stream().clone(), rank, 2, id)?;
///     let shares = RowShares { units: 4096, unit: 8192, ranks: 2 };
///     let mut rows = backend.stream().alloc_zeros::<bf16>(shares.len())?;
///     // ... this rank writes its share, `rows.slice_mut(shares.elements(rank))`, and gets all shares:
///     comm.all_gather_in_place(&shares, rows.as_view_mut())?;
///     Ok(())
/// }
/// ```
pub struct NcclComm {
    pub(super) handle: Handle,
    pub(super) stream: Arc<CudaStream>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl NcclComm {
    /// The version of the NCCL in use: major, minor, patch.
    ///
    /// # Errors
    /// `Unavailable`, with the places searched, if NCCL is missing, too old or broken.
    pub fn version() -> Result<(u32, u32, u32), Error> {
        Ok(nccl()?.version())
    }

    /// A new identifier for a communicator. One rank creates it and sends it to the other ranks.
    ///
    /// # Errors
    /// `Unavailable` if NCCL is missing; `Device` if it fails, for example without a network
    /// interface.
    pub fn unique_id() -> Result<NcclId, Error> {
        NcclId::new(nccl()?)
    }

    /// A rank of a new communicator, on the stream's device. Waits until every rank has called it,
    /// each with its own device. Processes on one machine may each see only some of its devices
    /// (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// `InvalidArgument` if `rank` is not less than `ranks`, `ranks` is 0 or more than `i32::MAX`,
    /// or the stream is not of a primary context, which NCCL requires; `Unavailable` if NCCL is
    /// missing; `Device` if the driver or NCCL fails.
    pub fn from_rank(stream: Arc<CudaStream>, rank: usize, ranks: usize, id: NcclId) -> Result<Self, Error> {
        let (number, count) = check_rank(rank, ranks)?;
        let nccl = nccl()?;
        // NCCL uses the device of the thread's current context.
        prepare(&stream)?;
        let handle = Handle::init(nccl, number, count, id)?;
        Ok(NcclComm { handle, stream, rank, ranks })
    }

    /// A communicator that another library or the caller created and will destroy. Its rank, ranks
    /// and device are read from it.
    ///
    /// # Safety
    /// - Library: it was made by the NCCL that is used here: the one that the process has loaded,
    ///   unless `RMSNORM_NCCL` names another.
    /// - Life: it lives, and is neither finalized nor aborted, until this is dropped.
    /// - Sharing: no other code uses it during a call here. All other work on it is enqueued in the
    ///   same order on every rank.
    ///
    /// # Errors
    /// As [`from_rank`](Self::from_rank), and `InvalidArgument` if the stream is of another device.
    pub unsafe fn from_raw(comm: ncclComm_t, stream: Arc<CudaStream>) -> Result<Self, Error> {
        let nccl = nccl()?;
        prepare(&stream)?;
        // SAFETY:
        // - library, life, sharing: the caller's promises.
        let handle = unsafe { Handle::borrowed(nccl, comm) };
        // A non-blocking communicator may still be in initialization.
        handle.check()?;
        let (rank, ranks, device) = (handle.rank()?, handle.ranks()?, handle.device()?);
        let ordinal = stream.context().ordinal();
        if device != ordinal {
            let rule =
                format!("a communicator on device {device} needs a stream of that device, got one of device {ordinal}");
            return Err(Error::InvalidArgument { arg: "stream", rule });
        }
        Ok(NcclComm { handle, stream, rank, ranks })
    }

    /// NCCL's communicator, for functions that this crate does not call. Do not destroy it; enqueue
    /// other work on it in the same order on every rank.
    pub fn as_raw(&self) -> ncclComm_t {
        self.handle.raw()
    }

    /// The stream that calls are enqueued on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Gives the communicator up without waiting: enqueued work ends, and its outputs are invalid.
    /// Use it if other ranks will not make their calls. A communicator from
    /// [`from_raw`](Self::from_raw) is left as it is.
    pub fn abort(self) {
        self.handle.abort();
    }
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclComm")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// Converts both numbers to NCCL's type.
fn check_rank(rank: usize, ranks: usize) -> Result<(c_int, c_int), Error> {
    let count = c_int::try_from(ranks).ok().filter(|count| *count > 0);
    let Some(count) = count else {
        let rule = format!("a communicator has 1 to {} ranks, got {ranks}", c_int::MAX);
        return Err(Error::InvalidArgument { arg: "ranks", rule });
    };
    match c_int::try_from(rank) {
        Ok(number) if number < count => Ok((number, count)),
        Ok(_) | Err(_) => {
            let rule = format!("must be less than {ranks}, the number of ranks, got {rank}");
            Err(Error::InvalidArgument { arg: "rank", rule })
        }
    }
}

/// Makes the stream's context current on this thread; fails if it is not a primary context.
fn prepare(stream: &CudaStream) -> Result<(), Error> {
    let context = stream.context();
    if !context.is_primary() {
        // NCCL would switch to the primary context, where the stream's handle is invalid or means
        // another stream.
        let rule = format!("NCCL needs a stream of the device's primary context, got a stream of {}", place(context));
        return Err(Error::InvalidArgument { arg: "stream", rule });
    }
    context.bind_to_thread().map_err(device_error("before a communicator is made"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_checked_before_nccl_sees_them() {
        assert!(matches!(check_rank(0, 1), Ok((0, 1))));
        assert!(matches!(check_rank(7, 8), Ok((7, 8))));
        assert!(matches!(check_rank(0, i32::MAX as usize), Ok((0, i32::MAX))));
        for (rank, ranks, message) in [
            (1, 1, "rank: must be less than 1, the number of ranks, got 1"),
            (8, 2, "rank: must be less than 2, the number of ranks, got 8"),
            (usize::MAX, 2, "rank: must be less than 2, the number of ranks, got 18446744073709551615"),
            (0, 0, "ranks: a communicator has 1 to 2147483647 ranks, got 0"),
            (0, 1 << 31, "ranks: a communicator has 1 to 2147483647 ranks, got 2147483648"),
            (0, 1 << 32, "ranks: a communicator has 1 to 2147483647 ranks, got 4294967296"),
        ] {
            assert_eq!(check_rank(rank, ranks).map_err(|error| error.to_string()), Err(message.to_owned()));
        }
    }
}
