//! Where partial sums, locks and row sums lie.

use rmsnorm_gpu::testing::plans::partials_len;

use super::*;

const REDUCTIONS: [GradReduction; 5] = [
    GradReduction::Partials,
    GradReduction::Locks { groups: 1 },
    GradReduction::Locks { groups: 64 },
    GradReduction::Locks { groups: u32::MAX },
    GradReduction::Atomics,
];

/// Where the parts lie, as the kernels index them.
pub(super) fn parts(plan: &Plan, call: Call, rows: usize, cols: usize) -> Parts {
    // A lock for each block that shares a partial row.
    let blocks = launches(plan).find_map(|Launch { key: KernelKey { program, tile, .. }, .. }| match program {
        Program::Backward => Some(tile.cluster as usize),
        Program::BackwardColumns => Some(cols.div_ceil(columns(&tile))),
        Program::BackwardRowSums | Program::ReducePartials => None,
        Program::Forward | Program::ForwardCluster | Program::ForwardLong | Program::ForwardStreaming => None,
        Program::QuantizedForward | Program::QuantizedForwardStreaming => None,
        Program::TransposeCodes | Program::Columnwise | Program::ClearAmax => None,
    });
    let has_locks = matches!(call.grad_reduction, GradReduction::Locks { .. }) && call.gradients() > 0;
    let locks = if has_locks { plan.partial_rows as usize * blocks.unwrap_or(0) } else { 0 };
    let has_row_sums = launches(plan).any(|launch| launch.key.program == Program::BackwardRowSums);
    let row_sums = if has_row_sums { 2 * rows } else { 0 };
    let from = |first: usize, len: usize| first as u64..(first + len) as u64;
    Parts {
        partials: 0..partials_len(call, plan.partial_rows, cols),
        locks: from(plan.workspace.locks, locks),
        row_sums: from(plan.workspace.row_sums, row_sums),
        len: plan.workspace.len as u64,
    }
}

/// Every backward call with every way of summing, for some lengths of each regime.
pub(super) fn sizes() -> Vec<(Call, usize, usize)> {
    let mut sizes = Vec::new();
    for call in Plans::calls().into_iter().filter(|call| call.direction == Direction::Backward) {
        for grad_reduction in REDUCTIONS {
            for cols in Plans::cols().into_iter().filter(|cols| *cols > 300 || cols % 30 == 1) {
                sizes.extend(ROWS.map(|rows| (Call { grad_reduction, ..call }, rows, cols)));
            }
        }
    }
    sizes
}

#[test]
fn partial_rows_are_as_many_as_the_reduction_says() {
    for caps in DEVICES {
        for (call, rows, cols) in sizes() {
            let plan = call.plan(rows, cols, &caps);
            let expected = match call.grad_reduction {
                GradReduction::Partials => plan.chunks,
                GradReduction::Locks { groups } => plan.chunks.min(groups.into()),
                GradReduction::Atomics => plan.chunks.min(1),
            };
            assert_eq!(plan.partial_rows, expected, "{rows}x{cols} {call:?}");
        }
    }
}

#[test]
fn callers_are_told_what_a_plan_needs() {
    for caps in DEVICES {
        for (call, rows, cols) in sizes() {
            let told = workspace_len(&call.problem(rows, cols), &caps);
            assert_eq!(told, call.plan(rows, cols, &caps).workspace.len, "{rows}x{cols} {call:?}");
        }
    }
}
