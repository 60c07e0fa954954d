//! Positions of partial sums and row sums.

use std::collections::BTreeSet;

use rmsnorm_gpu::reduction;
use rmsnorm_gpu::testing::plans::{Planned, for_all_backward, partials_len};

use super::super::PlanError;
use super::*;

const REDUCTIONS: [GradReduction; 2] = [GradReduction::Partials, GradReduction::Atomics];

/// A device whose bindings hold few rows: calls take several ranges, which share partial rows.
const SHORT: Caps = Caps { binding_bytes: 1 << 20, ..Caps::lavapipe() };

/// The devices of the other tests, and this one.
pub(super) fn devices() -> Vec<Caps> {
    DEVICES.into_iter().chain([SHORT]).collect()
}

/// Every backward call with every gradient reduction, for some lengths of each kind of program. All
/// norms have equal workspaces.
pub(super) fn sizes() -> Vec<(Call, usize, usize)> {
    let mut sizes = Vec::new();
    for call in
        Plans::calls().into_iter().filter(|call| call.direction == Direction::Backward && call.norm == Norm::Rms)
    {
        for grad_reduction in REDUCTIONS {
            for cols in Plans::cols().into_iter().filter(|cols| *cols > 300 && cols % 2 == 1 || cols % 100 == 1) {
                let rows = [0, 1, 9, 529, 4096, 1 << 20].into_iter().filter(|rows| rows * cols <= 1 << 29);
                sizes.extend(rows.map(|rows| (Call { grad_reduction, ..call }, rows, cols)));
            }
        }
    }
    sizes
}

/// The positions of the parts, as the programs index them.
pub(super) fn parts(plan: &Plan, call: Call, cols: usize) -> Parts {
    let partials = partials_len(call, plan.partial_rows.into(), cols);
    // Two sums for each row of the longest range, moved in whole packs.
    let sums = dispatches(plan).filter(|dispatch| dispatch.key.program == Program::BackwardRowSums);
    let row_sums = sums.map(|dispatch| 2 * (dispatch.rows.end - dispatch.rows.start)).max().unwrap_or(0);
    let first = plan.workspace.row_sums;
    Parts {
        is_shared: call.grad_reduction == GradReduction::Atomics && call.gradients() > 0 && plan.partial_rows > 0,
        partials: 0..partials,
        locks: 0..0,
        row_sums: first..first + row_sums.next_multiple_of(4),
        len: plan.workspace.len,
    }
}

#[test]
fn a_workspace_fits_a_binding() {
    for_all_backward::<Plans>(|planned| {
        let (caps, plan, call) = (planned.caps, &planned.plan, planned.call);
        assert!(4 * plan.workspace.len <= caps.binding_bytes, "{planned}");
        assert!(plan.workspace.row_sums.is_multiple_of(4), "{planned}");
        // A bound workspace is not empty, even for gradients of no rows.
        let has_sums = dispatches(plan).any(|dispatch| dispatch.key.program == Program::BackwardRowSums);
        assert_eq!(plan.workspace.len > 0, call.gradients() > 0 || has_sums, "{planned}");
    });
}

/// Partial rows and row sums do not overlap, for every length of the workspace.
#[test]
fn a_binding_of_any_size_is_not_exceeded() {
    let call = |tensors| Call::new(Direction::Backward, Norm::Rms, BF16, tensors);
    for (tensors, cols, access) in [
        (DWEIGHT, 1000, Access::Aligned),
        (DWEIGHT_DBIAS, 1000, Access::Aligned),
        (DWEIGHT, 300, Access::Parts),
        (DWEIGHT, 2200, Access::Parts),
        (DWEIGHT_DBIAS, 2200, Access::Parts),
    ] {
        let problem = call(tensors).problem(60, cols);
        for binding_bytes in (64 << 10..80 << 10).step_by(16) {
            let caps = Caps { binding_bytes, workgroups: 4096, ..Caps::lavapipe() };
            let plan = plan(&problem, &layout(&problem, access), &caps).expect("a plan");
            assert!(4 * plan.workspace.len <= caps.available_bytes(), "{binding_bytes} {plan:?}");
        }
    }
    // One partial row and the sums of the two rows that fit, exactly.
    let (problem, bytes) = (call(DWEIGHT).problem(3, 8192), 4 * 8192);
    let caps = |bytes| Caps { binding_bytes: bytes, ..Caps::lavapipe() };
    let planned = |bytes| plan(&problem, &layout(&problem, Access::Aligned), &caps(bytes));
    let just = bytes + 4 * 4 + reduction::ALIGNMENT + u64::from(caps(0).offset_alignment);
    assert_eq!(planned(just).expect("a plan").partial_rows, 1);
    assert_eq!(planned(just - 4), Err(PlanError::Workspace { bytes, most: bytes - 4 }));
}

#[test]
fn callers_are_told_enough_for_any_layout() {
    for_all_backward::<Plans>(|planned| {
        let &Planned { caps, ref plan, call, rows, cols, .. } = planned;
        let told = workspace_len(&call.problem(rows, cols), caps) as u64;
        assert!(plan.workspace.len <= told, "told {told}, {planned}");
        // Strided rows, with as few as one row per range.
        let problem = call.problem(rows, cols);
        for row_stride in [cols + 1, 3 * cols, 50 * cols] {
            let placed = |dtype: DType| Placed {
                storage: dtype.into(),
                offset: 6,
                row_stride: row_stride as u64,
                group_stride: 0,
            };
            let layout =
                Layout::new(&problem, [placed(call.dtypes.activation), placed(call.dtypes.residual)], [], false, false);
            if rows <= 529
                && let Ok(apart) = super::plan(&problem, &layout, caps)
            {
                assert!(apart.workspace.len <= told, "told {told}, {apart:?}, {planned}");
            }
        }
    });
}

#[test]
fn every_partial_row_is_written_before_it_is_read() {
    for_all_backward::<Plans>(|planned| {
        let (plan, call) = (&planned.plan, planned.call);
        if call.gradients() == 0 {
            return assert_eq!(plan.partial_rows, 0, "{planned}");
        }
        if call.grad_reduction == GradReduction::Atomics {
            return assert_eq!(plan.partial_rows, planned.rows.min(1) as u32, "{planned}");
        }
        let mut written = BTreeSet::new();
        for dispatch in dispatches(plan).filter(|dispatch| dispatch.chunks > 0) {
            let chunks = dispatch.first_chunk..dispatch.first_chunk + dispatch.chunks;
            assert!(chunks.end <= plan.partial_rows, "{planned}");
            for chunk in [chunks.start, chunks.end - 1] {
                assert_eq!(written.contains(&chunk), dispatch.accumulates, "{planned}");
            }
            written.extend(chunks);
        }
        assert_eq!(written.len(), plan.partial_rows as usize, "{planned}");
    });
}

#[test]
fn forward_needs_no_workspace() {
    for call in Plans::calls().into_iter().filter(|call| call.direction == Direction::Forward) {
        assert_eq!(workspace_len(&call.problem(4096, 4096), &Caps::h200()), 0, "{call:?}");
    }
}
