//! Which backends can be ranks of one group, and peer access between their devices.

use cudarc::driver::{CudaContext, DriverError, sys};
use rmsnorm_spec::Error;

use super::params::MOST_RANKS;
use crate::backend::{CudaBackend, place};
use crate::error::{device_error, unavailable};

/// The number of ranks is one that a group can have.
pub(super) fn check_ranks(arg: &'static str, ranks: usize) -> Result<(), Error> {
    if (1..=MOST_RANKS).contains(&ranks) {
        return Ok(());
    }
    Err(Error::InvalidArgument { arg, rule: format!("a group has 1 to {MOST_RANKS} ranks, got {ranks}") })
}

/// There is such a rank.
pub(super) fn check_rank(rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        arg: "rank",
        rule: format!("a rank is less than the number of ranks, {ranks}, got {rank}"),
    })
}

/// Each rank has a stream of its own, and those on one device have one context.
pub(super) fn check_streams(backends: &[CudaBackend]) -> Result<(), Error> {
    let refuse = |rule: String| Err(Error::InvalidArgument { arg: "backends", rule });
    for (rank, other, one, two) in pairs(backends) {
        let (first, second) = (one.stream().context(), two.stream().context());
        if first == second && one.stream().cu_stream() == two.stream().cu_stream() {
            return refuse(format!("each rank has a stream of its own, ranks {rank} and {other} have one for both"));
        }
        if first != second && first.cu_device() == second.cu_device() {
            return refuse(format!(
                "ranks on one device have one context, ranks {rank} and {other} have {} and another",
                place(first)
            ));
        }
        // They would have other programs, and other limits.
        let kind = |backend: &CudaBackend| {
            let caps = backend.kernels().caps();
            (caps.arch, caps.shared_per_block_optin)
        };
        if kind(one) != kind(two) {
            return refuse(format!("the devices of a group are alike, rank {rank} has {one}, rank {other} {two}"));
        }
    }
    Ok(())
}

/// How many of the backends are on the device of that one.
pub(super) fn sharers(backends: &[CudaBackend], one: &CudaBackend) -> u32 {
    let is_there = |backend: &&CudaBackend| backend.stream().context() == one.stream().context();
    backends.iter().filter(is_there).count() as u32
}

/// Lets every device of a group reach the memory of every other.
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

/// Lets kernels of a context reach the memory of a peer.
fn enable_one(context: &CudaContext, peer: &CudaContext) -> Result<(), Error> {
    if !can_access(context, peer).map_err(device_error("cuDeviceCanAccessPeer"))? {
        return Err(unavailable(format!(
            "device {} cannot reach the memory of device {}: a group needs NVLink, or PCIe with peer access",
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
        // By an earlier group, or by the caller.
        Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
        enabled => enabled.map_err(device_error("cuCtxEnablePeerAccess")),
    }
}

fn can_access(context: &CudaContext, peer: &CudaContext) -> Result<bool, DriverError> {
    let mut can = 0;
    // SAFETY:
    // - pointer: to a local of the type that the call writes;
    // - devices: those of contexts that are there.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, context.cu_device(), peer.cu_device()) }.result()?;
    Ok(can != 0)
}

/// Of addresses in the memory of ranks, how many are on the backend's device, its own among them.
pub(super) fn sharers_of_memory(backend: &CudaBackend, workspaces: &[sys::CUdeviceptr]) -> Result<u32, Error> {
    let ours = backend.stream().context().cu_device();
    let mut count = 0;
    for address in workspaces {
        let mut device = 0;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY:
        // - pointer: to a local int, as this attribute has;
        // - address: asked about, not read.
        unsafe { sys::cuPointerGetAttribute((&raw mut device).cast(), attribute, *address) }
            .result()
            .map_err(device_error("cuPointerGetAttribute"))?;
        count += u32::from(device == ours);
    }
    Ok(count.max(1))
}

/// Each two of them, with their ranks.
fn pairs(backends: &[CudaBackend]) -> impl Iterator<Item = (usize, usize, &CudaBackend, &CudaBackend)> {
    let numbered = || backends.iter().enumerate();
    numbered().flat_map(move |(rank, one)| numbered().skip(rank + 1).map(move |(other, two)| (rank, other, one, two)))
}
