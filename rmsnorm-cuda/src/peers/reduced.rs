//! Sums over ranks: `reduce_forward`, or `reduce_forward_rows` if that is faster.

use rmsnorm_spec::{AnyForward, Checked, Error, Problem};

use super::group::PeerGroup;
use super::launch::{check, enqueue, load};
use super::rows::{self, Owned};
use crate::backend::CudaBackend;
use crate::launch::{self, Tensors};
use crate::plan::ranks::Plan;
use crate::plan::{reduce_forward, reduce_forward_rows};

pub(super) fn forward(group: &PeerGroup, call: Checked<AnyForward<'_, CudaBackend>>) -> Result<(), Error> {
    let (spec, problem) = (*call.spec(), *call.problem());
    group.check()?;
    let mut tensors = Tensors::new(group.backend.stream(), problem);
    call.visit(&mut tensors)?;
    if problem.rows == 0 {
        return Ok(());
    }
    let mut params = tensors.params();
    let access_bytes = launch::access_bytes(&problem, &params);
    let plan = plan(group, &problem, access_bytes)?;
    launch::set_call(&mut params, &spec, &problem)?;
    if let Some(plan) = by_owners(group, &problem, access_bytes) {
        return rows::enqueue_owned(group, &params, &plan, Owned::of_whole(group, &problem));
    }
    // SAFETY:
    // - arguments: the kernel has no others;
    // - tensors: addresses, lengths and strides come from a `Checked` call, and the plan has its
    //   `access_bytes`;
    // - slots: the plan is of `group.group`;
    // - order: `tensors` holds the events.
    unsafe { enqueue(group, &plan, problem.rows, &params, []) }
}

/// Compiles and loads the kernels of calls with this problem.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    let access_bytes = launch::access_of(alignment as u64);
    load(group, &plan(group, problem, access_bytes)?.key)?;
    // Calls with more rows may use the kernel with row owners.
    let by_owners = rows::plan(group, problem, access_bytes);
    let by_owners = by_owners.ok().filter(|_| reduce_forward_rows::may_be_sooner(problem, &group.group));
    by_owners.map_or(Ok(()), |plan| load(group, &plan.key).map(|_| ()))
}

fn plan(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Result<Plan, Error> {
    reduce_forward::plan(problem, access_bytes, &group.group, group.backend.kernels().caps())
}

/// The plan with row owners, if it is faster and fits the group's memory. All ranks decide alike,
/// because the decision depends only on properties that their calls share.
fn by_owners(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Option<Plan> {
    let is_sooner = reduce_forward_rows::is_sooner(problem, &group.group);
    is_sooner.then(|| rows::plan(group, problem, access_bytes).ok()).flatten()
}
