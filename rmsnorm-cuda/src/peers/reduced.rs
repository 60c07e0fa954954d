//! Sums over ranks: `reduce_forward`, or `reduce_forward_packs` if that is faster.

use rmsnorm_spec::{AnyForward, Checked, Error, Problem};

use super::group::PeerGroup;
use super::launch::{check, enqueue, load};
use crate::backend::CudaBackend;
use crate::launch::{self, Tensors};
use crate::plan::reduce_forward_packs::{plan, plans};

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
    let plan = plan(&problem, access_bytes, &group.group, group.backend.kernels().caps())?;
    launch::set_call(&mut params, &spec, &problem)?;
    // SAFETY:
    // - arguments: the kernel has no others;
    // - tensors: addresses, lengths and strides come from a `Checked` call, and the plan has its
    //   `access_bytes`;
    // - slots: the plan is of `group.group`;
    // - order: `tensors` holds the events.
    unsafe { enqueue(group, &plan, problem.rows, &params, []) }
}

/// Compiles and loads the kernels of calls like this problem with any number of rows.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    let access_bytes = launch::access_of(alignment as u64);
    let plans = plans(problem, access_bytes, &group.group, group.backend.kernels().caps())?;
    plans.iter().try_for_each(|plan| load(group, &plan.key).map(|_| ()))
}
