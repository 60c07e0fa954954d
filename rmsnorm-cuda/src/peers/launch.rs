//! Launches of `reduce_forward`, or of `reduce_forward_rows` if that is faster.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use rmsnorm_spec::{AnyForward, Checked, Error, NormSpec, Problem, ResidualPlacement};

use super::group::PeerGroup;
use super::rows::{self, Owned};
use crate::backend::CudaBackend;
use crate::caps::Arch;
use crate::error::device_error;
use crate::kernel::Kernels;
use crate::launch::{self, Launch, Tensors};
use crate::params::Packed;
use crate::plan::KernelKey;
use crate::plan::ranks::{Plan, Round};
use crate::plan::{reduce_forward, reduce_forward_rows};

pub(super) fn forward_reduced(group: &PeerGroup, call: Checked<AnyForward<'_, CudaBackend>>) -> Result<(), Error> {
    let (spec, problem) = (*call.spec(), *call.problem());
    group.check()?;
    let mut tensors = Tensors::new(group.backend.stream(), problem);
    call.visit(&mut tensors)?;
    enqueue(group, &spec, &problem, &tensors)
}

/// Compiles and loads the kernels of calls with this problem.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    let (kernels, access_bytes) = (group.backend.kernels(), launch::access_of(alignment as u64));
    let plan = reduce_forward::plan(problem, access_bytes, &group.group, kernels.caps())?;
    group.backend.stream().context().bind_to_thread().map_err(device_error("before a kernel is loaded"))?;
    load(kernels, &plan.key)?;
    // Calls with more rows may use the kernel with row owners.
    let by_owners = rows::plan(group, problem, access_bytes);
    let by_owners = by_owners.ok().filter(|_| reduce_forward_rows::may_be_sooner(problem, &group.group));
    by_owners.map_or(Ok(()), |plan| load(kernels, &plan.key).map(|_| ()))
}

/// Refuses calls that have no kernel across ranks.
pub(super) fn check(problem: &Problem) -> Result<(), Error> {
    let unsupported = |rule: &str| Err(Error::Unsupported { rule: rule.into() });
    match (problem.parts, problem.residual_placement) {
        (1, ResidualPlacement::Before) => Ok(()),
        (_, ResidualPlacement::After) => unsupported("a sum over ranks supports ResidualPlacement::Before only"),
        (_, ResidualPlacement::Before) => {
            unsupported("in a sum over ranks, the x of each rank must be one matrix, not a sum of parts")
        }
    }
}

fn enqueue(group: &PeerGroup, spec: &NormSpec, problem: &Problem, tensors: &Tensors<'_>) -> Result<(), Error> {
    if problem.rows == 0 {
        return Ok(());
    }
    let (stream, kernels) = (group.backend.stream(), group.backend.kernels());
    let mut params = tensors.params();
    // Reports an earlier error that cudarc could not return, for example in its waits for events.
    stream.context().bind_to_thread().map_err(device_error("before the launch"))?;
    let access_bytes = launch::access_bytes(problem, &params);
    let plan = reduce_forward::plan(problem, access_bytes, &group.group, kernels.caps())?;
    launch::set_call(&mut params, spec, problem)?;
    if let Some(plan) = by_owners(group, problem, access_bytes) {
        return rows::enqueue(group, &params, &plan, Owned::of_whole(group, problem));
    }
    let kernel = load(kernels, &plan.key)?;
    let params = params.pack(&plan.key);
    plan.rounds(problem.rows).try_for_each(|round| launch_one(group, kernel, &params, &plan, round))
}

/// The plan with row owners, if it is faster and fits the group's memory. All ranks decide alike,
/// because the decision depends only on properties that their calls share.
fn by_owners(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Option<Plan> {
    let is_sooner = reduce_forward_rows::is_sooner(problem, &group.group);
    is_sooner.then(|| rows::plan(group, problem, access_bytes).ok()).flatten()
}

/// Loads the kernel, one thread at a time. Ranks on one device need the same kernel at once: if one
/// of them ran it and waited there for another rank, that rank might wait for the device to load a
/// second copy.
pub(super) fn load(kernels: &Kernels, key: &KernelKey) -> Result<sys::CUfunction, Error> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // The mutex guards no data, so a panic leaves nothing inconsistent.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    kernels.find_or_load(key)
}

fn launch_one(
    group: &PeerGroup,
    kernel: sys::CUfunction,
    params: &Packed,
    plan: &Plan,
    round: Round,
) -> Result<(), Error> {
    let Round { first_row, rows, grid } = round;
    let launch = Launch { kernel, grid, threads: plan.threads(), shared_bytes: plan.shared_bytes, cluster: 1 };
    let peers = group.peers(first_row, rows);
    let mut arguments = [params.address(), std::ptr::from_ref(&peers).cast_mut().cast()];
    let overlap = group.backend.kernels().caps().arch >= Arch::HOPPER;
    // SAFETY:
    // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process ends;
    // - arguments: its parameters are the struct that its key has packed, and a `Peers`, whose sizes
    //   were checked where it was compiled;
    // - tensors: addresses, lengths and strides come from a `Checked` call, so every access of the
    //   kernel for (rows, cols) lies in a live tensor, and no output overlaps another tensor; the
    //   round has rows of the call; the key's access_bytes divide all addresses and strides;
    // - slots: the memory of this rank and of its peers stays allocated while a group of them
    //   exists (`Parts`), or as promised to `from_pointers`; the round has no more rows than its
    //   slots have room for, and every rank has divided its memory alike;
    // - order: the kernel waits for earlier kernels on the stream (`wait_for_earlier_kernels`);
    //   cudarc's events, held in `Tensors`, order the accesses to tensors with those on other
    //   streams; accesses to slots are ordered by the protocol (`peers.cuh`), and those of a rank's
    //   own launches by its one stream: a group is neither cloned nor shared.
    unsafe { launch.call(group.backend.stream(), &mut arguments, overlap) }
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
    }
}
