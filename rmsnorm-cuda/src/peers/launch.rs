//! Launches of kernels that exchange data with other ranks.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use rmsnorm_spec::{Error, Problem, ResidualPlacement};

use super::group::PeerGroup;
use crate::caps::Arch;
use crate::error::device_error;
use crate::launch::{Launch, argument};
use crate::params::Params;
use crate::plan::KernelKey;
use crate::plan::ranks::Plan;

/// Refuses calls that have no kernel across ranks.
pub(super) fn check(problem: &Problem) -> Result<(), Error> {
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    if problem.gate.is_some() || problem.groups > 1 || problem.cast_order.is_weight_first() {
        return unsupported("calls over ranks have no gate, no groups of columns and no weight before the norm");
    }
    match (problem.parts, problem.residual_placement) {
        (1, ResidualPlacement::Before) => Ok(()),
        (_, ResidualPlacement::After) => unsupported("a sum over ranks supports ResidualPlacement::Before only"),
        (_, ResidualPlacement::Before) => {
            unsupported("in a sum over ranks, the x of each rank must be one matrix, not a sum of parts")
        }
    }
}

/// Loads the kernel, one thread at a time. Ranks on one device need the same kernel at once: if one
/// of them ran it and waited there for another rank, that rank might wait for the device to load a
/// second copy. Makes the context current on this thread.
pub(super) fn load(group: &PeerGroup, key: &KernelKey) -> Result<sys::CUfunction, Error> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // Reports an earlier error that cudarc could not return, for example in its waits for events.
    group.backend.stream().context().bind_to_thread().map_err(device_error("before the launch"))?;
    // The mutex guards no data, so a panic leaves nothing inconsistent.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    group.backend.kernels().find_or_load(key)
}

/// Enqueues the rounds of a plan, which together have `rows` rows. `others` follow `Params` and
/// `Peers` among the kernel's arguments.
///
/// # Safety
/// - Arguments: `others` are the addresses of the other arguments of the kernel.
/// - Tensors: with `params` and `others`, every access of the kernel to rows of the rounds lies in a
///   live tensor or workspace, and no output overlaps another tensor; the key's `access_bytes` divide
///   all addresses and strides. In place, the thread that stores an element has read it before.
/// - Slots: the plan is for this group's memory, so that a round has no more rows than its slots
///   have room for, and every rank has divided its memory alike.
/// - Order: cudarc's events, held by the caller, order the accesses to tensors with those on other
///   streams.
pub(super) unsafe fn enqueue<const N: usize>(
    group: &PeerGroup,
    plan: &Plan,
    rows: usize,
    params: &Params,
    others: [*mut c_void; N],
) -> Result<(), Error> {
    const { assert!(N <= 4, "no kernel has more arguments") };
    let kernel = load(group, &plan.key)?;
    let params = params.pack(&plan.key);
    let overlap = group.backend.kernels().caps().arch >= Arch::HOPPER;
    let (threads, shared_bytes, cluster) = (plan.threads(), plan.shared_bytes, plan.key.tile.cluster);
    plan.rounds(rows).try_for_each(|round| {
        let grid = round.grid;
        let launch = Launch { kernel, grid, groups: 1, threads, shared_bytes, cluster, is_cooperative: false };
        let peers = group.peers(&round);
        let mut arguments = [std::ptr::null_mut(); 6];
        arguments[..2].copy_from_slice(&[params.address(), argument(&peers)]);
        arguments[2..2 + N].copy_from_slice(&others);
        // SAFETY:
        // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process
        //   ends;
        // - arguments: its parameters are the struct that its key has packed, a `Peers`, whose size
        //   was checked where it was compiled, and `others`, as promised; the driver reads no more;
        // - tensors: the caller's promise;
        // - slots: the memory of this rank and of its peers stays allocated while a group of them
        //   exists (`Parts`), or as promised to `from_pointers`; the rest is the caller's promise;
        // - order: the kernel waits for earlier kernels on the stream (`wait_for_earlier_kernels`);
        //   accesses to slots are ordered by the protocol (`peers.cuh`), and those of a rank's own
        //   launches by its one stream: a group is neither cloned nor shared.
        unsafe { launch.call(group.backend.stream(), &mut arguments, overlap) }
    })
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm, Tensor};

    use super::*;

    #[test]
    fn what_has_no_form_over_ranks_is_refused() {
        let problem = Problem::forward(Norm::Rms, 2, 64, DType::Bf16, &[Tensor::Residual]);
        assert!(check(&problem).is_ok());
        let refused = |problem: Problem| match check(&problem) {
            Err(Error::Unsupported { rule }) => rule,
            other => panic!("{other:?}"),
        };
        assert!(refused(Problem { parts: 2, ..problem }).contains("not a sum of parts"));
        let after = Problem { residual_placement: ResidualPlacement::After, ..problem };
        assert!(refused(after).contains("ResidualPlacement::Before"));
        assert!(refused(Problem { groups: 2, ..problem }).contains("groups of columns"));
    }
}
