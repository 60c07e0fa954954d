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

/// A rank of a group whose devices reach each other through NCCL: a [`Collective`](rmsnorm_dist::Collective) of [`CudaBackend`]s, each
/// on a device of its own, in threads of one process or in processes.
///
/// NCCL is looked for when it is first needed: `libnccl.so.2` or `libnccl.so`, from 2.14 on, in the folder that the variable
/// `RMSNORM_NCCL` names, or, without it, where the system's loader looks.
///
/// # Ordering
/// Calls are enqueued on the communicator's stream, whichever stream a backend has: make it with the backend's own,
/// `backend.stream().clone()`. As with a call to the backend, what wrote a tensor comes before, on that stream or on another of the
/// context that cudarc orders by its events; where those are off, the caller orders it, and a norm composed by
/// [`Sharded`](rmsnorm_dist::Sharded), whose memory between two steps nobody else sees, needs the backend's own stream. Every rank makes the same calls in the same order,
/// and none while a group of the caller's, by `ncclGroupStart`, is open on the thread.
///
/// # Errors
/// An argument that does not fit is refused before anything is sent, and may be corrected. After a call that NCCL failed, at once or on
/// the device, the ranks may no longer be in step: every later call answers [`Error::Device`] with that first
/// [`NcclFailure`](crate::NcclFailure). A rank that does not come is no failure to NCCL: the others wait.
///
/// # Order of additions
/// [`all_to_all`](rmsnorm_dist::Collective::all_to_all) and [`all_gather`](rmsnorm_dist::Collective::all_gather) move bytes, as they are.
/// [`all_reduce_sum`](Self::all_reduce_sum) adds in an order of NCCL's.
///
/// # CUDA graphs
/// Calls may be captured, under the conditions of [`CudaBackend`]'s. NCCL connects at the first call of a kind: make one before the
/// capture. The graph is dropped before the communicator.
///
/// # Dropping
/// Waits until what was enqueued is done, and for NCCL's other ranks on this machine: let each thread drop its own. After a failure, and
/// where the thread panics, it is [aborted](Self::abort), so that a rank that is lost does not keep the others.
///
/// [`CudaBackend`]: crate::CudaBackend
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::dist::{Collective, Shares};
/// use rmsnorm_cuda::spec::bf16;
/// use rmsnorm_cuda::{CudaBackend, NcclComm, NcclId};
///
/// /// One of two processes; `id` was made by `NcclComm::unique_id` in one of them.
/// fn run(rank: usize, id: NcclId) -> Result<(), Box<dyn std::error::Error>> {
///     let backend = CudaBackend::new(rank)?;
///     let comm = NcclComm::from_rank(backend.stream().clone(), rank, 2, id)?;
///     let shares = Shares { units: 4096, unit: 8192, ranks: 2 };
///     let mut rows = backend.stream().alloc_zeros::<bf16>(shares.len())?;
///     // ... this rank writes its share, `rows.slice_mut(shares.elements(rank))`, and has them all:
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
    /// The NCCL that is used: major, minor, patch.
    ///
    /// # Errors
    /// `Unavailable`, with what was looked for, if there is none, or it is too old or broken.
    pub fn version() -> Result<(u32, u32, u32), Error> {
        Ok(nccl()?.version())
    }

    /// What the ranks of a new communicator have in common: one of them makes it, and sends it to the others.
    ///
    /// # Errors
    /// `Unavailable` if there is no NCCL; `Device` if it fails, as where it finds no network interface.
    pub fn unique_id() -> Result<NcclId, Error> {
        NcclId::new(nccl()?)
    }

    /// A rank of a new communicator, on the stream's device. Waits until every rank has called it, each on another device. Processes of
    /// one machine may have a part of its devices each (`CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such rank, more than an `i32` counts, or the stream is of no primary context, in which NCCL works;
    /// `Unavailable` if there is no NCCL; `Device` if the driver or NCCL fails.
    pub fn from_rank(stream: Arc<CudaStream>, rank: usize, ranks: usize, id: NcclId) -> Result<Self, Error> {
        let (number, count) = check_rank(rank, ranks)?;
        let nccl = nccl()?;
        // NCCL takes the device of the thread's current context.
        prepare(&stream)?;
        let handle = Handle::init(nccl, number, count, id)?;
        Ok(NcclComm { handle, stream, rank, ranks })
    }

    /// The communicator of another library or of the caller, who destroys it. What it is, is read from it.
    ///
    /// # Safety
    /// - Library: it was made by the NCCL that is used here: the one that the process has loaded, unless `RMSNORM_NCCL` names another.
    /// - Life: it lives, and is neither finalized nor aborted, until this is dropped.
    /// - Sharing: nothing else uses it during a call here. What else is enqueued with it comes in the same order on every rank.
    ///
    /// # Errors
    /// As [`from_rank`](Self::from_rank), and `InvalidArgument` if the stream is of another device.
    pub unsafe fn from_raw(comm: ncclComm_t, stream: Arc<CudaStream>) -> Result<Self, Error> {
        let nccl = nccl()?;
        prepare(&stream)?;
        // SAFETY:
        // - library, life, sharing: the caller's promises.
        let handle = unsafe { Handle::borrowed(nccl, comm) };
        // One that does not block may not be there yet.
        handle.check()?;
        let (rank, ranks, device) = (handle.rank()?, handle.ranks()?, handle.device()?);
        let ordinal = stream.context().ordinal();
        if device != ordinal {
            let rule =
                format!("a communicator on device {device} has a stream of that device, got one of device {ordinal}");
            return Err(Error::InvalidArgument { arg: "stream", rule });
        }
        Ok(NcclComm { handle, stream, rank, ranks })
    }

    /// NCCL's own, for calls that are not here. It is not to be destroyed, and what is enqueued with it comes in the same order on every
    /// rank.
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

    /// How many there are, at least 1.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Gives it up without waiting: what is under way ends, its outputs hold anything. For a rank whose peers will not come. A communicator
    /// that came in by [`from_raw`](Self::from_raw) stays as it is.
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

/// Both as NCCL has them.
fn check_rank(rank: usize, ranks: usize) -> Result<(c_int, c_int), Error> {
    let count = c_int::try_from(ranks).ok().filter(|count| *count > 0);
    let Some(count) = count else {
        let rule = format!("a communicator has 1 to {} ranks, got {ranks}", c_int::MAX);
        return Err(Error::InvalidArgument { arg: "ranks", rule });
    };
    match c_int::try_from(rank) {
        Ok(number) if number < count => Ok((number, count)),
        Ok(_) | Err(_) => {
            let rule = format!("the last of {ranks} ranks is {}, got {rank}", ranks - 1);
            Err(Error::InvalidArgument { arg: "rank", rule })
        }
    }
}

/// Makes the stream's context current on this thread, if it is one that NCCL takes.
fn prepare(stream: &CudaStream) -> Result<(), Error> {
    let context = stream.context();
    if !context.is_primary() {
        // NCCL would change to the primary one, where the stream's handle is nothing, or that of another stream.
        let rule = format!("NCCL works in the primary context of a device, got a stream of {}", place(context));
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
            (1, 1, "rank: the last of 1 ranks is 0, got 1"),
            (8, 2, "rank: the last of 2 ranks is 1, got 8"),
            (usize::MAX, 2, "rank: the last of 2 ranks is 1, got 18446744073709551615"),
            (0, 0, "ranks: a communicator has 1 to 2147483647 ranks, got 0"),
            (0, 1 << 31, "ranks: a communicator has 1 to 2147483647 ranks, got 2147483648"),
            (0, 1 << 32, "ranks: a communicator has 1 to 2147483647 ranks, got 4294967296"),
        ] {
            assert_eq!(check_rank(rank, ranks).map_err(|error| error.to_string()), Err(message.to_owned()));
        }
    }
}
