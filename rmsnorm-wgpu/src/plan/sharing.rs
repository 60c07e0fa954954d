//! Tensors that share the workspace's binding, where a device has fewer storage buffers than a
//! program has tensors: a kernel copies vectors and statistics to the workspace before the program,
//! and computed statistics from there after it.

use std::ops::Range;

use rmsnorm_gpu::reduction;
use rmsnorm_spec::{DType, Problem, Storage, Tensor, TensorShape};

use super::uses::uses;
use super::{Access, Layout, Moved, Plan, PlanError, Step, Workspace, copy, tensors};
use crate::caps::Caps;

/// f32 from the start of a shared tensor to the start of the next, as a multiple: 32 bytes.
const UNIT: u64 = 8;

/// Maximum rows of a dispatch whose shared tensors take half of a binding; `None` if no program of
/// the call shares one.
pub(super) fn most_rows(problem: &Problem, caps: &Caps) -> Option<u64> {
    // Programs bind tensors of the call, and the workspace.
    if problem.tensors.intersection(tensors(problem.direction)).len() < caps.storage_buffers as usize {
        return None;
    }
    let statistics = problem.tensors.iter().filter(|tensor| tensor.shape() == TensorShape::Rows).count().max(1) as u64;
    let most = (caps.available_bytes() / 8).saturating_sub(len(problem, 0)) / (statistics * problem.groups as u64);
    Some(most.saturating_sub(UNIT))
}

/// f32 of the workspace that suffice for shared tensors in every layout.
pub(super) fn most_len(problem: &Problem, caps: &Caps) -> u64 {
    most_rows(problem, caps).map_or(0, |most| UNIT + len(problem, most.max(1).min(problem.rows as u64)))
}

/// f32 that the tensors of the call take if they share a binding.
fn len(problem: &Problem, rows: u64) -> u64 {
    let of = |tensor| elements(problem, tensor, 0..rows);
    problem.tensors.iter().map(of).map(|elements| (elements.end - elements.start).next_multiple_of(UNIT)).sum()
}

/// The elements of a tensor that a dispatch on these rows shares.
fn elements(problem: &Problem, tensor: Tensor, rows: Range<u64>) -> Range<u64> {
    let groups = problem.groups as u64;
    match tensor.shape() {
        TensorShape::Rows => groups * rows.start..groups * rows.end,
        TensorShape::Cols => 0..problem.cols as u64,
        TensorShape::One => 0..1,
        TensorShape::Matrix | TensorShape::Transposed | TensorShape::Workspace => 0..0,
        TensorShape::Scales | TensorShape::ScalesColumnwise => 0..0,
    }
}

/// Adds the copies of shared tensors to a plan, and their places to its workspace.
///
/// # Errors
/// [`PlanError::Workspace`], and errors of the copies.
pub(super) fn with_copies(plan: Plan, problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, PlanError> {
    let first = plan.workspace.len.saturating_sub(reduction::ALIGNMENT_SLACK).next_multiple_of(UNIT);
    let (mut steps, mut end) = (Vec::with_capacity(plan.steps.len()), first);
    for step in plan.steps {
        let mut dispatch = match step {
            Step::Dispatch(dispatch) if dispatch.key.shares_binding => dispatch,
            Step::Dispatch(_) | Step::Zero { .. } => {
                steps.push(step);
                continue;
            }
        };
        let (mut before, mut after, mut at) = (Vec::new(), Vec::new(), first);
        for used in uses(&dispatch.key).into_iter().filter(|used| used.is_shared(&dispatch.key)) {
            let (tensor, is_input) = (used.tensor, used.is_loaded);
            let elements = elements(problem, tensor, dispatch.rows.clone());
            let len = elements.end - elements.start;
            let moved = Moved { tensor, first: elements.start, at, is_input };
            let dtype = match problem.storage(tensor) {
                Some(Storage::Float(dtype)) => dtype,
                Some(Storage::Code(_) | Storage::E8m0) | None => DType::F32,
            };
            // A copy has a layout of its own: its packs may be larger than the program's.
            let copies = copy(dtype, len, layout.access.max(Access::Words), layout.is_aliased, caps)?;
            let copies = copies.into_iter().map(|step| step.moving(moved));
            if is_input {
                before.extend(copies)
            } else {
                after.extend(copies)
            }
            dispatch.shared.push((tensor, at));
            at += len.next_multiple_of(UNIT);
        }
        end = end.max(at);
        steps.extend(before.into_iter().chain([Step::Dispatch(dispatch)]).chain(after));
    }
    if end == first {
        return Ok(Plan { steps, ..plan });
    }
    let (bytes, most) = (4 * end + reduction::ALIGNMENT, caps.available_bytes());
    if bytes > most {
        return Err(PlanError::Workspace { bytes, most });
    }
    let workspace = Workspace { len: end + reduction::ALIGNMENT_SLACK, ..plan.workspace };
    Ok(Plan { steps, workspace, ..plan })
}
