//! [`PeerGroup`]: a rank of a group of devices that access each other's memory.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use rmsnorm_spec::Error;

use super::access;
use super::params::{MOST_RANKS, Peers};
use super::workspace::{Layout, Parts};
use crate::backend::CudaBackend;
use crate::error::BACKEND;
use crate::plan::ranks::{Group, Round};

/// The default time that a kernel waits for another rank's data.
const DEADLINE: Duration = Duration::from_secs(10);

/// A rank of a group on devices that can access each other's memory (NVLink, PCIe with peer access,
/// or one device). Its [`forward_reduced`](rmsnorm_dist::ShardedNorm::forward_reduced) is one kernel: each rank
/// writes its x into the memory of the others, and normalizes the sum row by row.
///
/// # Order
/// Every rank makes the same calls in the same order, on its backend's stream. A group is neither
/// `Sync` nor `Clone`. Calls that differ between ranks, for example in dtype or length, are not
/// detected: these and later results are wrong. A call enqueues its kernels and returns. One thread
/// may drive all ranks in turn, or each rank has its own thread. For one rank per process use
/// [`PeerSeat`](crate::PeerSeat).
///
/// Kernels of a group wait on their device for other ranks. Work on other streams, such as the calls of
/// a second group, must not fill a device meanwhile: a rank whose kernel finds no room keeps the others
/// waiting until the deadline.
///
/// # Bits
/// The sum is made in the order of the ranks, in f32, and rounded once to the dtype of the residual
/// stream, with or without a residual: [math](rmsnorm_spec::math), equation (1'). All ranks get the
/// same bits, and the bits of a row do not depend on the number of rows. NaN inputs give NaN
/// outputs; NaN payloads are not kept.
///
/// # Missing ranks
/// A kernel that waits for another rank gives up after the [`deadline`](Self::deadline). The
/// outputs of that call are invalid, and every later call of the group returns [`Error::Device`]
/// with a [`MissingRank`] as its source, before anything is enqueued; [`check`](Self::check)
/// returns the same error. A group cannot recover: make a new one. For calls with owners, the rank
/// named in the error may itself have been waiting for another one.
///
/// # Limits
/// A group has 1 to 8 ranks. A row must fit the shared memory of a block; longer rows give
/// [`Error::Unsupported`], as do rows that do not fit the group's memory. A call with more rows
/// than fit that memory is split into several launches.
///
/// | most columns on an H200 | x and `residual_out` |
/// |---|---|
/// | 106,496 | both 16-bit |
/// | 49,152 | 16-bit x, f32 `residual_out` |
/// | 53,248 | both f32 |
///
/// # Owners
/// With more than two ranks, the columns of a large call have owners. The ranks send their x to the
/// owners, which add and send the sum to all ranks, through the same slots. In
/// [`forward_reduced_rows`](rmsnorm_dist::ShardedNorm::forward_reduced_rows) the rows have owners, which send
/// y, or nothing. Its group's memory needs room for two rows; one launch suffices if it has room for
/// twice the rows of an owner. Bits do not depend on the way.
///
/// # Divided columns
/// [`forward_columns`](rmsnorm_dist::ShardedNorm::forward_columns) is one kernel if this rank has at most 16,384
/// columns of 16 bits, or 8,192 if x or the residual is f32. It exchanges the statistics through
/// the same memory, 16 bytes per row. Longer rows, and
/// [`backward_columns`](rmsnorm_dist::ShardedNorm::backward_columns), use the backend's two phases with an
/// exchange between them.
///
/// # CUDA graphs
/// Calls may be captured and replayed, under the conditions of [`CudaBackend`], by all ranks alike.
/// Drop the graph before the group: a later replay would write to freed memory. Call
/// [`prepare`](Self::prepare) before the capture, or before the first call.
///
/// # Several ranks on one device
/// They share the device: each has its own stream, and a part of the resident blocks. The kernels
/// of all ranks must be able to run at once. Otherwise they wait for each other until the deadline.
/// To ensure this:
/// - set `CUDA_DEVICE_MAX_CONNECTIONS` to more than the number of streams before CUDA starts;
/// - call [`prepare`](Self::prepare) (or [`prepare_columns`](Self::prepare_columns)) on all ranks
///   before any rank makes a call;
/// - upload a graph before it is launched;
/// - divide columns evenly, because different kernels may keep each other from starting;
/// - let no other work fill the device meanwhile.
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::spec::{NormSpec, bf16};
/// use rmsnorm_cuda::{CudaBackend, Forward, PeerGroup};
/// use rmsnorm_dist::ShardedNorm;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backends = [CudaBackend::new(0)?, CudaBackend::new(1)?];
/// let (rows, cols) = (64, 4096);
/// let groups = PeerGroup::in_process(&backends, rows * cols * size_of::<bf16>())?;
/// std::thread::scope(|scope| {
///     for (group, backend) in groups.into_iter().zip(&backends) {
///         scope.spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///             let stream = backend.stream();
///             let x = stream.alloc_zeros::<bf16>(rows * cols)?; // this rank's partial sum
///             let mut y = stream.alloc_zeros::<bf16>(rows * cols)?;
///             let args = Forward::new(x.as_view(), y.as_view_mut());
///             group.forward_reduced(&NormSpec::rms(rows, cols, 1e-6), args)?;
///             stream.synchronize()?;
///             Ok(group.check()?)
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
pub struct PeerGroup {
    pub(super) backend: CudaBackend,
    rank: usize,
    pub(super) group: Group,
    deadline: Duration,
    /// The argument without the rows of a launch.
    peers: Peers,
    /// The memory that this process uses; this rank's is number `part`.
    parts: Arc<Parts>,
    part: usize,
    /// A group has one stream and one call at a time.
    not_sync: PhantomData<Cell<()>>,
}

impl PeerGroup {
    /// A rank for each backend, in their order, all in this process. Drive each rank with its own
    /// thread, or all with one thread in turn.
    ///
    /// `bytes` is the size of one rank's x in one call, with each row rounded up to 16 bytes;
    /// larger calls are split by rows. Every rank uses `2 * (ranks - 1) * bytes` of its device's
    /// memory until the last group is dropped, which waits for the streams of all ranks.
    ///
    /// # Errors
    /// `InvalidArgument` if there are no backends or more than 8, if two share a stream, if two on
    /// one device have different contexts, if devices differ, or if `bytes` is more than a memory
    /// can have; `Unavailable` if a device cannot access the memory of another; `Device` if the
    /// driver fails.
    pub fn in_process(backends: &[CudaBackend], bytes: usize) -> Result<Vec<PeerGroup>, Error> {
        access::check_ranks("backends", backends.len())?;
        access::check_streams(backends)?;
        let layout = layout(backends.len(), bytes)?;
        access::enable(backends)?;
        let mut parts = Parts::default();
        for backend in backends {
            parts.allocate(backend, &layout)?;
        }
        let (addresses, parts) = (parts.addresses(), Arc::new(parts));
        let group = |(rank, backend): (usize, &CudaBackend)| {
            let sharers = access::sharers(backends, backend);
            PeerGroup::new(backend, (rank, rank), &addresses, layout, sharers, parts.clone())
        };
        backends.iter().enumerate().map(group).collect()
    }

    /// One rank of a group whose memory the caller has allocated and mapped, such as the symmetric
    /// memory of an inference engine. (For ranks in several processes without such memory use
    /// [`PeerSeat`](crate::PeerSeat).) `workspaces` has the address of each rank's memory, as this
    /// device sees it, by rank. This rank's memory is cleared, and the call waits for that.
    ///
    /// `bytes` is as for [`in_process`](Self::in_process). Each rank has its own deadline.
    ///
    /// # Safety
    /// - Memory: at each address there are [`workspace_bytes`](Self::workspace_bytes) that the
    ///   backend's device can read and write, at a multiple of 16, and so it stays until the group
    ///   and its graphs are dropped and the work of all ranks is done. No other code uses this
    ///   memory.
    /// - Same memory: the address that a rank passes for itself and the addresses that the others
    ///   pass for it are of one memory, which lies on a device.
    /// - Same arguments: all ranks pass the same `bytes` and number of `workspaces`, and each
    ///   passes a different `rank`.
    /// - Order: all ranks have returned from here before one makes its first call, and no group has
    ///   used the memory of a rank before that: this call clears it.
    /// - Same calls: all ranks make the same calls in the same order, with the same shapes, dtypes
    ///   and set of tensors. (A rank that makes no call is detected; a rank that makes another call
    ///   reads data that was not meant for it.)
    ///
    /// # Errors
    /// `InvalidArgument` if there are no workspaces or more than 8, `rank` is not less than their
    /// number, an address is not a multiple of 16, or `bytes` is more than a memory can have;
    /// `Device` if the driver fails.
    pub unsafe fn from_pointers(
        backend: &CudaBackend,
        rank: usize,
        workspaces: &[sys::CUdeviceptr],
        bytes: usize,
    ) -> Result<Self, Error> {
        access::check_ranks("workspaces", workspaces.len())?;
        access::check_rank(rank, workspaces.len())?;
        let layout = layout(workspaces.len(), bytes)?;
        if let Some(address) = workspaces.iter().find(|address| !address.is_multiple_of(16)) {
            let rule = format!("the memory of a rank must start at a multiple of 16, got {address:#x}");
            return Err(Error::InvalidArgument { arg: "workspaces", rule });
        }
        let mut parts = Parts::default();
        // SAFETY:
        // - memory: the caller's promise.
        unsafe { parts.borrow(backend, workspaces[rank], &layout) }?;
        let sharers = access::sharers_of_memory(backend, workspaces)?;
        PeerGroup::new(backend, (rank, 0), workspaces, layout, sharers, Arc::new(parts))
    }

    /// Bytes that [`from_pointers`](Self::from_pointers) needs of each rank's memory; `None` if
    /// `ranks` is not 1 to 8, or if the size is more than a memory can have.
    pub fn workspace_bytes(ranks: usize, bytes: usize) -> Option<usize> {
        access::check_ranks("ranks", ranks).ok().and_then(|()| Layout::new(ranks, bytes)).map(|layout| layout.len())
    }

    pub(super) fn new(
        backend: &CudaBackend,
        (rank, part): (usize, usize),
        addresses: &[sys::CUdeviceptr],
        layout: Layout,
        sharers: u32,
        parts: Arc<Parts>,
    ) -> Result<Self, Error> {
        let (Some(own), Some(report)) = (addresses.get(rank), parts.get(part).map(|part| part.report.device)) else {
            let rule = format!("rank {rank} has no memory of its own");
            return Err(Error::InvalidArgument { arg: "rank", rule });
        };
        let (mut send, mut receive) = ([0; MOST_RANKS], [0; MOST_RANKS]);
        for (peer, address) in addresses.iter().enumerate().filter(|(peer, _)| *peer != rank) {
            send[peer] = address + layout.first_slot(peer, rank) as u64;
            receive[peer] = own + layout.first_slot(rank, peer) as u64;
        }
        let peers = Peers {
            send,
            receive,
            set_bytes: layout.set_bytes() as u64,
            state: own + layout.state() as u64,
            report,
            deadline: 0,
            first_row: 0,
            rows: 0,
            rank: rank as u32,
            admits_next: 0,
        };
        Ok(PeerGroup {
            backend: backend.clone(),
            rank,
            group: Group { ranks: layout.ranks as u32, sharers, bytes: layout.bytes },
            deadline: DEADLINE,
            peers,
            parts,
            part,
            not_sync: PhantomData,
        })
    }

    /// Sets how long a kernel of this rank waits for another rank's data; the default is 10
    /// seconds. The time starts for each row when its data is missed, and must be longer than the
    /// delay between ranks. For the result of an owner it is doubled, because the owner waits too. A
    /// graph keeps the deadline of its capture.
    #[must_use]
    pub fn deadline(self, limit: Duration) -> Self {
        PeerGroup { deadline: limit, ..self }
    }

    /// Fails if a kernel of this rank has missed another rank so far; enqueued kernels may still be
    /// waiting.
    ///
    /// # Errors
    /// `Device` with a [`MissingRank`] as its source.
    pub fn check(&self) -> Result<(), Error> {
        let Some(missing) = self.parts.get(self.part).and_then(|part| part.report.missing()) else { return Ok(()) };
        let error = MissingRank { missing, rank: self.rank, ranks: self.group.ranks as usize };
        Err(Error::Device { backend: BACKEND, source: Box::new(error) })
    }

    /// This rank, and the number of ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.rank, self.group.ranks as usize)
    }

    /// The second argument of a launch.
    pub(super) fn peers(&self, round: &Round) -> Peers {
        let deadline = u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX);
        let (first_row, rows) = (round.first_row as u64, round.rows as u64);
        Peers { deadline, first_row, rows, admits_next: round.admits_next.into(), ..self.peers }
    }
}

impl fmt::Debug for PeerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerGroup")
            .field("rank", &self.rank)
            .field("ranks", &self.group.ranks)
            .field("bytes", &self.group.bytes)
            .field("deadline", &self.deadline)
            .field("backend", &self.backend)
            .finish_non_exhaustive()
    }
}

/// The data of a rank did not arrive within the deadline: the source of [`Error::Device`]. Make a
/// new group after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {missing} of {ranks} did not come: rank {rank} waited for its data until the deadline. The outputs of that \
     call are invalid, and the group takes no more calls: make a new group"
)]
pub struct MissingRank {
    missing: usize,
    rank: usize,
    ranks: usize,
}

impl MissingRank {
    /// The missing rank. If it is an owner, it may itself have waited for another rank.
    pub fn missing(&self) -> usize {
        self.missing
    }
}

/// The layout of a rank's memory.
pub(super) fn layout(ranks: usize, bytes: usize) -> Result<Layout, Error> {
    Layout::new(ranks, bytes).ok_or_else(|| {
        let rule = format!(
            "{ranks} ranks need more memory than any device has, got {bytes} for each: pass the bytes of one call's x"
        );
        Error::InvalidArgument { arg: "bytes", rule }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread may take a group along; two threads cannot use it at once.
    #[test]
    fn a_group_is_sent_and_not_shared() {
        fn is_send<T: Send>() {}
        is_send::<PeerGroup>();
        trait IsNotSync<Marker> {
            fn it() {}
        }
        impl<T> IsNotSync<()> for T {}
        impl<T: Sync> IsNotSync<u8> for T {}
        // For a type that is Sync both impls apply, and this does not compile.
        <PeerGroup as IsNotSync<_>>::it();
    }

    #[test]
    fn workspaces_have_slots_and_a_state() {
        assert_eq!(PeerGroup::workspace_bytes(2, 1 << 20), Some((2 << 20) + 128));
        assert_eq!(PeerGroup::workspace_bytes(8, 1), Some(2 * 7 * 16 + 128));
        assert_eq!([0, 9].map(|ranks| PeerGroup::workspace_bytes(ranks, 1 << 20)), [None; 2]);
    }

    #[test]
    fn the_message_names_both_ranks() {
        let text = MissingRank { missing: 2, rank: 0, ranks: 4 }.to_string();
        assert!(text.starts_with("rank 2 of 4 did not come: rank 0 waited"), "{text}");
    }
}
