//! [`PeerGroup`]: a rank of a group whose devices reach each other's memory.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use rmsnorm_dist::{GroupCall, ShardedNorm, check_reduced};
use rmsnorm_spec::{Error, NormSpec, Problem};

use super::params::{MOST_RANKS, Peers};
use super::workspace::{Layout, Parts};
use super::{access, columns, launch, rows};
use crate::backend::CudaBackend;
use crate::error::BACKEND;
use crate::plan::ranks::Group;

/// How long a kernel waits for another rank's data unless it is told.
const DEADLINE: Duration = Duration::from_secs(10);

/// A rank of a group on devices that reach each other's memory (NVLink, PCIe with peer access, or one device): its
/// [`forward_reduced`](ShardedNorm::forward_reduced) is one kernel. Each rank writes its part of the sum into the memory of the others,
/// and normalizes what has come, row by row.
///
/// # Order
/// Every rank makes the same calls in the same order, on its backend's stream, and nothing else has the group: it is not `Sync`, and cannot
/// be cloned. Different calls, of other dtypes or lengths on one rank than on another, are not found out: results are wrong then, also those
/// of later calls. A call enqueues its kernels and returns. Ranks may be driven by as many threads, or by one in turn; of
/// processes each has one, by [`PeerSeat`](crate::PeerSeat).
///
/// # Bits
/// The sum is made in the order of the ranks, in f32, and rounded once to the dtype of the residual stream, with a residual or without:
/// [math](rmsnorm_spec::math), equation (1'). All ranks have the same bits of everything, and a row the same whatever the number of rows.
/// That a part of x is NaN reaches the result; which NaN it was does not.
///
/// # When a rank does not come
/// A kernel that waits in vain gives up after the [`deadline`](Self::deadline). Its outputs then hold nothing of use, and every later call of
/// the group is [`Error::Device`] with a [`MissingRank`] as its source, before anything is enqueued; [`check`](Self::check) asks for it.
/// There is no way back: make another group. Where rows have owners, a rank that owns none may name the owner that it has waited for, who
/// waited in vain itself.
///
/// # Limits
/// 1 to 8 ranks. A row has at most 106,496 columns with a sum of 16 bits on an H200, 53,248 of f32 (49,152 with x of 16 bits): what lies in
/// the shared memory of a block. Longer ones are [`Error::Unsupported`], as is a row for which the group's memory has no room. Calls with more
/// rows than fit that memory go in several launches.
///
/// # Owners of rows
/// With more than two ranks a large call goes by the owners of its rows, in the same slots: a rank writes its part of a row to the one that
/// owns it, which adds and writes the sum to all. So does [`forward_reduced_rows`](ShardedNorm::forward_reduced_rows), whose owners write y, or nothing;
/// it needs room for two rows, and goes in one launch where there is room for twice the rows that a rank owns. Bits do not depend on the way.
///
/// # Divided columns
/// [`forward_columns`](ShardedNorm::forward_columns) is one kernel too where this rank has up to 16,384 columns of 16 bits, 8,192 of f32 or with a
/// residual in f32: what is found of a row is sent through the same memory, 16 bytes a row. Longer rows, and
/// [`backward_columns`](ShardedNorm::backward_columns), are the backend's two halves with an exchange between them.
///
/// # CUDA graphs
/// Calls may be captured and replayed, under the conditions of [`CudaBackend`], by all ranks alike. A graph that is replayed after the
/// group was dropped writes to memory that is no longer there. [`prepare`](Self::prepare) before the capture, or before the first call.
///
/// # Several ranks on one device
/// They share it: each has a part of the blocks that fit at once, and a stream of its own. A kernel that waits for another must not keep it
/// from starting: let `CUDA_DEVICE_MAX_CONNECTIONS` be larger than the number of streams when CUDA starts, [`prepare`](Self::prepare) (or
/// [`prepare_columns`](Self::prepare_columns)) on all ranks before any makes a call, upload a graph before it is launched, divide columns evenly (of
/// unlike kernels one may keep another out), and let nothing else fill the device meanwhile.
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
///             let x = stream.alloc_zeros::<bf16>(rows * cols)?; // what this rank's part of a layer gave
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
    /// Without the rows of a launch.
    peers: Peers,
    /// In it this rank's part is the `part`th.
    parts: Arc<Parts>,
    part: usize,
    /// One group, one stream, one call at a time.
    not_sync: PhantomData<Cell<()>>,
}

impl PeerGroup {
    /// A rank for each backend, in their order: the streams of one process, to be driven by a thread each or by one in turn.
    ///
    /// `bytes` is the room for one call's x of one rank, each row of which takes a multiple of 16 bytes there; larger calls go in pieces
    /// of rows. Every rank has `2 * (ranks - 1) * bytes` of its device's memory for it, until the last group is dropped, which waits for the
    /// streams of all.
    ///
    /// # Errors
    /// `InvalidArgument` for more ranks than 8 or none, for two with one stream, for two contexts of one device, for unlike devices, and for
    /// more bytes than any memory has; `Unavailable` if a device cannot reach the memory of another; `Device` if the driver fails.
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

    /// One rank of a group whose memory somebody else has allocated and mapped, such as an engine's own symmetric memory. (Ranks that are
    /// processes can do without: [`PeerSeat`](crate::PeerSeat).) `workspaces` has the address of each rank's, as this device sees it, by rank; this rank's is emptied, which is waited for.
    ///
    /// `bytes` is that of [`in_process`](Self::in_process). The deadline of this rank is of its own.
    ///
    /// # Safety
    /// - Memory: at each address there are [`workspace_bytes`](Self::workspace_bytes) that the backend's device can read and write, at a
    ///   multiple of 16, and so it stays until the group and its graphs are dropped and the work of all ranks is done. Nobody else uses them.
    /// - Same memory: the address that a rank has for itself and those that the others have for it are of one memory, which lies on a
    ///   device.
    /// - Same arguments: all ranks pass the same `bytes` and number of `workspaces`, and each a rank of its own.
    /// - Order: all ranks have returned from here before one makes its first call, and the memory of a rank has not been used by a group before
    ///   that: this empties it.
    /// - Same calls: all ranks make the same calls in the same order, with the same shapes, dtypes and set of tensors. (A rank that makes
    ///   none is found out; one that makes another reads what is not meant for it.)
    ///
    /// # Errors
    /// `InvalidArgument` for a number of ranks that is none of 1 to 8, a rank that is none of them, an address that is no multiple of 16, and more
    /// bytes than any memory has; `Device` if the driver fails.
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
            let rule = format!("the memory of a rank begins at a multiple of 16, got {address:#x}");
            return Err(Error::InvalidArgument { arg: "workspaces", rule });
        }
        let mut parts = Parts::default();
        // SAFETY:
        // - memory: the caller's promise.
        unsafe { parts.borrow(backend, workspaces[rank], &layout) }?;
        let sharers = access::sharers_of_memory(backend, workspaces)?;
        PeerGroup::new(backend, (rank, 0), workspaces, layout, sharers, Arc::new(parts))
    }

    /// Bytes that [`from_pointers`](Self::from_pointers) needs of each rank's memory; `None` for a number of ranks that is none of 1 to 8, or for
    /// more than any memory has.
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
            unused: 0,
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

    /// How long a kernel of this rank waits for another rank's data before it gives up: 10 seconds unless it is said here. It counts from
    /// when data is missed, for each row anew, and must be longer than ranks may be apart. For the result of a row that another rank owns, which
    /// that one waits for itself, it is twice as long. A graph keeps what held when it was captured.
    #[must_use]
    pub fn deadline(self, limit: Duration) -> Self {
        PeerGroup { deadline: limit, ..self }
    }

    /// Compiles and loads the kernels of calls of that problem on tensors whose addresses and strides, in bytes, are multiples of `alignment`,
    /// as [`CudaBackend::prepare_aligned`] does.
    ///
    /// # Errors
    /// `Unsupported` where such calls are; `Device` if the kernel cannot be compiled or loaded.
    pub fn prepare(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        launch::prepare(self, problem, alignment)
    }

    /// The same of calls whose residual stream is divided by rows; `problem` has all rows.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_rows(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        rows::prepare(self, problem, alignment)
    }

    /// The same of calls whose columns are divided among the ranks: `problem` is that of this rank's columns, as
    /// [`Problem::forward`] or [`Problem::backward`] describe it.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_columns(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        columns::prepare(self, problem, alignment)
    }

    /// Whether all ranks have come so far, as far as this rank's kernels have found out: those that were enqueued may still be waiting.
    ///
    /// # Errors
    /// `Device` with a [`MissingRank`] as its source.
    pub fn check(&self) -> Result<(), Error> {
        let Some(missing) = self.parts.get(self.part).and_then(|part| part.report.missing()) else { return Ok(()) };
        let error = MissingRank { missing, rank: self.rank, ranks: self.ranks() };
        Err(Error::Device { backend: BACKEND, source: Box::new(error) })
    }

    /// This rank, and how many there are.
    pub(super) fn place(&self) -> (usize, usize) {
        (self.rank, self.group.ranks as usize)
    }

    /// What a launch for those rows tells the kernel.
    pub(super) fn peers(&self, first_row: usize, rows: usize) -> Peers {
        let deadline = u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX);
        Peers { deadline, first_row: first_row as u64, rows: rows as u64, ..self.peers }
    }
}

impl ShardedNorm for PeerGroup {
    type Backend = CudaBackend;

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.group.ranks as usize
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CudaBackend>) -> Result<(), Error> {
        match call {
            GroupCall::Reduced(args) => launch::forward_reduced(self, check_reduced(spec, args)?),
            GroupCall::ReducedRows(y_rows, args) => rows::forward(self, spec, y_rows, args),
            GroupCall::ForwardColumns(columns, args) => columns::forward(self, spec, columns, args),
            GroupCall::BackwardColumns(columns, args) => columns::backward(self, spec, columns, args),
        }
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

/// A rank whose data did not come within the deadline: the source of [`Error::Device`]. The group is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {missing} of {ranks} did not come: rank {rank} has waited for its data until the deadline. What that call was to write holds \
     nothing, and the group takes no more calls"
)]
pub struct MissingRank {
    missing: usize,
    rank: usize,
    ranks: usize,
}

impl MissingRank {
    /// The rank that did not come; of a row that it owns, it may have waited for another itself.
    pub fn missing(&self) -> usize {
        self.missing
    }
}

/// The memory of a rank.
pub(super) fn layout(ranks: usize, bytes: usize) -> Result<Layout, Error> {
    Layout::new(ranks, bytes).ok_or_else(|| {
        let rule = format!("slots for {ranks} ranks are more than any memory has, got {bytes} for each");
        Error::InvalidArgument { arg: "bytes", rule }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread may take it along; two may not use it at once.
    #[test]
    fn a_group_is_sent_and_not_shared() {
        fn is_send<T: Send>() {}
        is_send::<PeerGroup>();
        trait IsNotSync<Marker> {
            fn it() {}
        }
        impl<T> IsNotSync<()> for T {}
        impl<T: Sync> IsNotSync<u8> for T {}
        // Of a type that is Sync both apply, and this does not compile.
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
        assert!(text.starts_with("rank 2 of 4 did not come: rank 0 has waited"), "{text}");
    }
}
