//! Checks that backends can form a group, and enables peer access between their devices.

use cudarc::driver::{CudaContext, DriverError, sys};
use rmsnorm_spec::Error;

use super::params::MOST_RANKS;
use crate::backend::{CudaBackend, place};
use crate::error::{device_error, unavailable};

/// Checks that a group can have this number of ranks.
pub(super) fn check_ranks(arg: &'static str, ranks: usize) -> Result<(), Error> {
    if (1..=MOST_RANKS).contains(&ranks) {
        return Ok(());
    }
    Err(Error::InvalidArgument { arg, rule: format!("a group has 1 to {MOST_RANKS} ranks, got {ranks}") })
}

/// Checks that `rank` is less than `ranks`.
pub(super) fn check_rank(rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        arg: "rank",
        rule: format!("must be less than {ranks}, the number of ranks, got {rank}"),
    })
}

/// Checks that each rank has its own stream, that ranks on one device share a context, and that all
/// devices are alike.
pub(super) fn check_streams(backends: &[CudaBackend]) -> Result<(), Error> {
    let refuse = |rule: String| Err(Error::InvalidArgument { arg: "backends", rule });
    for (rank, other, one, two) in pairs(backends) {
        let (first, second) = (one.stream().context(), two.stream().context());
        if first == second && one.stream().cu_stream() == two.stream().cu_stream() {
            return refuse(format!("each rank needs its own stream, but ranks {rank} and {other} have the same"));
        }
        if first != second && first.cu_device() == second.cu_device() {
            return refuse(format!(
                "ranks on one device must share a context, but ranks {rank} and {other} have {} and another",
                place(first)
            ));
        }
        // Different devices would have different kernels and limits.
        let kind = |backend: &CudaBackend| {
            let caps = backend.kernels().caps();
            (caps.arch, caps.shared_per_block_optin)
        };
        if kind(one) != kind(two) {
            return refuse(format!("all devices must be alike, but rank {rank} has {one}, rank {other} {two}"));
        }
    }
    Ok(())
}

/// The number of backends on the device of `one`.
pub(super) fn sharers(backends: &[CudaBackend], one: &CudaBackend) -> u32 {
    let is_there = |backend: &&CudaBackend| backend.stream().context() == one.stream().context();
    backends.iter().filter(is_there).count() as u32
}

/// Lets every device of a group access the memory of every other.
pub(super) fn enable(backends: &[CudaBackend]) -> Result<(), Error> {
    for (_, _, one, two) in pairs(backends) {
        let (one, two) = (one.stream().context(), two.stream().context());
        if one != two {
            enable_one(one, two)?;
            enable_one(two, one)?;
        }
    }
    Ok(())
}

/// Lets kernels of a context access the memory of a peer.
fn enable_one(context: &CudaContext, peer: &CudaContext) -> Result<(), Error> {
    if !can_access(context, peer).map_err(device_error("cuDeviceCanAccessPeer"))? {
        return Err(unavailable(format!(
            "device {} cannot reach the memory of device {}: a group needs NVLink, or PCIe with peer access; without \
             them use Sharded with NcclComm",
            context.ordinal(),
            peer.ordinal()
        )));
    }
    context.bind_to_thread().map_err(device_error("before peer access"))?;
    // SAFETY:
    // - context: current on this thread;
    // - peer: a context that lives as long as the backend that has it.
    let enabled = unsafe { sys::cuCtxEnablePeerAccess(peer.cu_ctx(), 0) }.result();
    match enabled {
        // An earlier group or the caller has enabled it.
        Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
        enabled => enabled.map_err(device_error("cuCtxEnablePeerAccess")),
    }
}

fn can_access(context: &CudaContext, peer: &CudaContext) -> Result<bool, DriverError> {
    let mut can = 0;
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - devices: of live contexts.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, context.cu_device(), peer.cu_device()) }.result()?;
    Ok(can != 0)
}

/// The number of ranks with memory on the backend's device, this rank included.
pub(super) fn sharers_of_memory(backend: &CudaBackend, workspaces: &[sys::CUdeviceptr]) -> Result<u32, Error> {
    let ours = backend.stream().context().cu_device();
    let mut count = 0;
    for address in workspaces {
        let mut device = 0;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY:
        // - pointer: to a local int, the type of this attribute;
        // - address: asked about, not read.
        unsafe { sys::cuPointerGetAttribute((&raw mut device).cast(), attribute, *address) }
            .result()
            .map_err(device_error("cuPointerGetAttribute"))?;
        count += u32::from(device == ours);
    }
    Ok(count.max(1))
}

/// All pairs of backends, with their ranks.
fn pairs(backends: &[CudaBackend]) -> impl Iterator<Item = (usize, usize, &CudaBackend, &CudaBackend)> {
    let numbered = || backends.iter().enumerate();
    numbered().flat_map(move |(rank, one)| numbered().skip(rank + 1).map(move |(other, two)| (rank, other, one, two)))
}
