//! [`PeerSeat`]: groups with one rank per process, where each process maps the memory of the
//! others.

use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{DriverError, sys};
use rmsnorm_spec::Error;

use super::access;
use super::card::{Facts, PeerCard};
use super::group::{PeerGroup, layout};
use super::users::{Id, User, Users, random_id};
use super::workspace::{Layout, Mapped, Parts};
use crate::backend::CudaBackend;
use crate::error::{DriverFailure, device_error, unavailable};

/// A rank of a group in several processes, with its memory allocated, before it joins the group.
///
/// Each process makes a seat, sends its [`card`](Self::card) to all others, and calls
/// [`join`](Self::join) with the cards of all ranks. With NCCL,
/// [`PeerGroup::over`](PeerGroup::over) does all of this.
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::spec::bf16;
/// use rmsnorm_cuda::{CudaBackend, PeerCard, PeerGroup, PeerSeat};
///
/// /// In each of two processes; `exchange` sends a card to all ranks and returns all cards, by rank.
/// fn start(
///     rank: usize,
///     exchange: impl Fn(PeerCard) -> Vec<PeerCard>,
/// ) -> Result<PeerGroup, Box<dyn std::error::Error>> {
///     let backend = CudaBackend::new(rank)?;
///     let seat = PeerSeat::new(&backend, rank, 2, 4096 * 8192 * size_of::<bf16>())?;
///     let cards = exchange(*seat.card());
///     Ok(seat.join(&cards)?)
/// }
/// ```
pub struct PeerSeat {
    backend: CudaBackend,
    facts: Facts,
    card: PeerCard,
    layout: Layout,
    parts: Parts,
}

impl PeerSeat {
    /// Allocates this rank's memory, [`PeerGroup::workspace_bytes`] on the backend's device, and
    /// waits until it is cleared. `bytes` is as for [`PeerGroup::in_process`].
    ///
    /// # Errors
    /// `InvalidArgument` if `ranks` is not 1 to 8, `rank` is not less than `ranks`, or `bytes` is
    /// more than a memory can have; `Unavailable` if the system does not let processes share
    /// memory; `Device` if the driver fails.
    pub fn new(backend: &CudaBackend, rank: usize, ranks: usize, bytes: usize) -> Result<Self, Error> {
        access::check_ranks("ranks", ranks)?;
        access::check_rank(rank, ranks)?;
        let layout = layout(ranks, bytes)?;
        let memory = random_id();
        let users = Users::new(memory).map_err(|error| {
            unavailable(format!("cannot create a lock file in {}: {error}", std::env::temp_dir().display()))
        })?;
        let mut parts = Parts::default();
        parts.allocate(backend, &layout)?;
        let address = parts.get(0).map_or(0, |part| part.address);
        let handle = export(address)
            .map_err(|error| refused("cannot share memory with other processes", "cuIpcGetMemHandle", error))?;
        parts.has_users(users);
        let context = backend.stream().context();
        let uuid = context.uuid().map_err(device_error("cuDeviceGetUuid"))?;
        let caps = backend.kernels().caps();
        let facts = Facts {
            version: version(),
            kernels: rmsnorm_kernels::REVISION,
            rank: rank as u64,
            ranks: ranks as u64,
            bytes: layout.bytes as u64,
            arch: caps.arch.0,
            shared_per_block: caps.shared_per_block_optin,
            process: process(),
            device: uuid.bytes.map(|byte| byte as u8),
            memory,
            handle,
        };
        Ok(PeerSeat { backend: backend.clone(), facts, card: facts.card(), layout, parts })
    }

    /// The data that the other ranks need.
    pub fn card(&self) -> &PeerCard {
        &self.card
    }

    /// Joins the group; `cards` has the cards of all ranks, by rank. It does not wait: a rank's
    /// card implies that its memory is ready.
    ///
    /// A dropped group unmaps the memory of the others, then waits up to 10 seconds until the
    /// others have unmapped this rank's memory. Memory that is still mapped then stays allocated
    /// until the process ends. A process that ended counts as having unmapped it.
    ///
    /// # Errors
    /// `InvalidArgument`, with the rank, if a rank does not fit this one: another version, `bytes`
    /// or kind of device, or the same process; `Unavailable` if this process or its device cannot
    /// map the memory of a rank, or if that rank's process has ended; `Device` if the driver fails.
    pub fn join(mut self, cards: &[PeerCard]) -> Result<PeerGroup, Error> {
        let (addresses, sharers) = self.map_all(cards)?;
        self.into_group(&addresses, sharers)
    }

    /// Maps the memory of the others. Returns the address of each rank's memory, by rank, and the
    /// number of ranks on this device.
    fn map_all(&mut self, cards: &[PeerCard]) -> Result<(Vec<sys::CUdeviceptr>, u32), Error> {
        let group = self.facts.of_group(cards)?;
        let context = self.backend.stream().context();
        context.bind_to_thread().map_err(device_error("before a group is made"))?;
        let own = self.parts.get(0).map_or(0, |part| part.address);
        let mut addresses = Vec::with_capacity(group.len());
        for peer in &group {
            if peer.rank == self.facts.rank {
                addresses.push(own);
            } else {
                let mapped = map(&self.backend, peer, &self.layout)?;
                addresses.push(mapped.address);
                self.parts.has_mapped(mapped);
            }
        }
        let sharers = group.iter().filter(|peer| peer.device == self.facts.device).count() as u32;
        Ok((addresses, sharers))
    }

    fn into_group(self, addresses: &[sys::CUdeviceptr], sharers: u32) -> Result<PeerGroup, Error> {
        let PeerSeat { backend, facts, layout, parts, .. } = self;
        PeerGroup::new(&backend, (facts.rank as usize, 0), addresses, layout, sharers, Arc::new(parts))
    }
}

#[cfg(feature = "nccl")]
impl PeerGroup {
    /// This process's rank of a group of all ranks of a communicator, which are processes on one
    /// machine. A collective call: each rank waits for all. `bytes` is as for
    /// [`in_process`](Self::in_process). The communicator is used only here.
    ///
    /// # Errors As [`PeerSeat::new`] and [`PeerSeat::join`]; a failure on one rank is an error on
    /// all. `Device` if NCCL fails, or if there is no memory for the exchange; the other ranks then
    /// go on waiting.
    #[cfg_attr(docsrs, doc(cfg(feature = "nccl")))]
    pub fn over(backend: &CudaBackend, comm: &crate::NcclComm, bytes: usize) -> Result<Self, Error> {
        let mut seat = PeerSeat::new(backend, comm.rank(), comm.ranks(), bytes);
        // A rank without a seat sends zeros instead of a card; otherwise the others would wait.
        let own = seat.as_ref().map_or([0; PeerCard::BYTES], |seat| *seat.card.as_bytes());
        let cards: Vec<PeerCard> = comm.gather_bytes(&own)?.into_iter().map(PeerCard::from_bytes).collect();
        let mapped = match &mut seat {
            Ok(seat) => seat.map_all(&cards),
            // The error of the seat is returned below.
            Err(_) => Ok((Vec::new(), 0)),
        };
        // A group needs all ranks. Every seat is kept until all ranks know the outcome, because
        // others may have mapped its memory.
        let is_there = comm.gather_bytes(&[u8::from(seat.is_ok() && mapped.is_ok())])?;
        let (seat, (addresses, sharers)) = (seat?, mapped?);
        match is_there.iter().position(|is_there| *is_there == [0]) {
            None => seat.into_group(&addresses, sharers),
            Some(rank) => Err(unavailable(format!("rank {rank} cannot map the memory of the others"))),
        }
    }
}

/// Shows the rank, and the device of its memory.
impl fmt::Debug for PeerSeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerSeat").field("card", &self.card).field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// An identifier of this process.
fn process() -> Id {
    static PROCESS: OnceLock<Id> = OnceLock::new();
    *PROCESS.get_or_init(random_id)
}

/// The version of this crate, padded with zeros or cut.
fn version() -> [u8; 16] {
    let text = env!("CARGO_PKG_VERSION").as_bytes();
    std::array::from_fn(|byte| text.get(byte).copied().unwrap_or(0))
}

/// CUDA's handle of an allocation, for other processes.
fn export(address: sys::CUdeviceptr) -> Result<[u8; 64], DriverError> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - address: of a live allocation; the context is current on this thread, as `Parts::allocate`
    //   has made it.
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }.result()?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps a peer's memory into this process.
fn map(backend: &CudaBackend, peer: &Facts, layout: &Layout) -> Result<Mapped, Error> {
    let rank = peer.rank;
    let user = User::new(peer.memory).map_err(|error| {
        unavailable(format!("rank {rank} has ended, is on another machine or has another TMPDIR: {error}"))
    })?;
    let handle = sys::CUipcMemHandle { reserved: peer.handle.map(|byte| byte as std::ffi::c_char) };
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut address = 0;
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - context: current on this thread;
    // - handle: 64 bytes, which the driver looks up.
    unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }.result().map_err(|error| {
        let what = format!("device {} cannot map the memory of rank {rank}", backend.stream().context().ordinal());
        refused(&what, "cuIpcOpenMemHandle", error)
    })?;
    let mapped = Mapped { address, context: backend.stream().context().clone(), _user: user };
    let (mut base, mut len) = (0, 0);
    // SAFETY:
    // - pointers: to locals of the types that the call writes.
    unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut len, address) }
        .result()
        .map_err(device_error("cuMemGetAddressRange"))?;
    let has_room = address.checked_sub(base).is_some_and(|before| len.saturating_sub(before as usize) >= layout.len());
    if !has_room {
        let rule = format!("the memory of rank {rank} must have {} bytes, as all ranks', got {len}", layout.len());
        return Err(Error::InvalidArgument { arg: "cards", rule });
    }
    Ok(mapped)
}

/// An error for memory that the system does not let processes share.
fn refused(what: &str, operation: &'static str, error: DriverError) -> Error {
    unavailable(format!("{what}: {}", DriverFailure::new(operation, error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_stays_what_it_is() {
        assert_eq!(process(), process());
        assert!(version().starts_with(env!("CARGO_PKG_VERSION").as_bytes()));
    }
}
