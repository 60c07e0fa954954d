//! Where partial sums, locks and row sums lie.

use std::ops::Range;

use rmsnorm_gpu::reduction::ALIGNMENT_SLACK;

use super::super::Program;
use super::*;

const REDUCTIONS: [GradReduction; 5] = [
    GradReduction::Partials,
    GradReduction::Locks { groups: 1 },
    GradReduction::Locks { groups: 64 },
    GradReduction::Locks { groups: u32::MAX },
    GradReduction::Atomics,
];

/// The parts of a workspace, as the kernels index it. Empty where there is none.
struct Parts {
    partials: Range<usize>,
    locks: Range<usize>,
    row_sums: Range<usize>,
}

fn parts(plan: &Plan, call: Call, rows: usize, cols: usize) -> Parts {
    // Each partial row begins on 32 bytes.
    let partials = call.gradients() * plan.partial_rows as usize * cols.next_multiple_of(8);
    // A lock for each block that shares a partial row.
    let blocks = launches(plan).find_map(|Launch { key: KernelKey { program, tile, .. }, .. }| match program {
        Program::Backward => Some(tile.cluster as usize),
        Program::BackwardColumns => Some(cols.div_ceil(columns(&tile))),
        Program::BackwardRowSums | Program::ReducePartials => None,
        Program::Forward | Program::ForwardCluster | Program::ForwardLong | Program::ForwardStreaming => None,
    });
    let has_locks = matches!(call.grad_reduction, GradReduction::Locks { .. }) && call.gradients() > 0;
    let locks = if has_locks { plan.partial_rows as usize * blocks.unwrap_or(0) } else { 0 };
    let has_row_sums = launches(plan).any(|launch| launch.key.program == Program::BackwardRowSums);
    let row_sums = if has_row_sums { 2 * rows } else { 0 };
    let from = |first: usize, len: usize| first..first + len;
    Parts {
        partials: from(0, partials),
        locks: from(plan.workspace.locks, locks),
        row_sums: from(plan.workspace.row_sums, row_sums),
    }
}

/// Calls `check` for every backward call with every way of summing, for some lengths of each regime.
fn for_all_reductions(mut check: impl FnMut(&Plan, Call, usize, usize)) {
    for caps in DEVICES {
        for call in calls().into_iter().filter(|call| call.direction == Direction::Backward) {
            for grad_reduction in REDUCTIONS {
                let call = Call { grad_reduction, ..call };
                for cols in all_cols().into_iter().filter(|cols| *cols > 300 || cols % 30 == 1) {
                    for rows in ROWS {
                        check(&call.plan(rows, cols, &caps), call, rows, cols);
                    }
                }
            }
        }
    }
}

#[test]
fn parts_do_not_overlap_and_end_within() {
    for_all_reductions(|plan, call, rows, cols| {
        let Parts { partials, locks, row_sums } = parts(plan, call, rows, cols);
        let mut end = 0;
        for part in [partials, locks, row_sums].into_iter().filter(|part| !part.is_empty()) {
            assert!(part.start >= end && part.start.is_multiple_of(4), "{rows}x{cols} {call:?} {plan:?}");
            end = part.end;
        }
        // Whatever the caller's address, the parts still fit when they begin on 16 bytes.
        assert!(end == 0 || end + ALIGNMENT_SLACK as usize <= plan.workspace.len, "{rows}x{cols} {call:?} {plan:?}");
    });
}

#[test]
fn partial_rows_are_as_many_as_the_reduction_says() {
    for_all_reductions(|plan, call, rows, cols| {
        let expected = match call.grad_reduction {
            GradReduction::Partials => plan.chunks,
            GradReduction::Locks { groups } => plan.chunks.min(groups.into()),
            GradReduction::Atomics => plan.chunks.min(1),
        };
        assert_eq!(plan.partial_rows, expected, "{rows}x{cols} {call:?}");
    });
}

#[test]
fn what_is_added_to_is_zeroed_first() {
    for_all_reductions(|plan, call, rows, cols| {
        let Parts { partials, locks, .. } = parts(plan, call, rows, cols);
        let adds_up = call.grad_reduction != GradReduction::Partials && !partials.is_empty();
        let len = partials.len() + locks.len();
        let zeroed = adds_up.then_some(Step::Zero { first: 0, len });
        assert_eq!(plan.steps[0].filter(|step| matches!(step, Step::Zero { .. })), zeroed, "{rows}x{cols} {call:?}");
        assert!(locks.is_empty() || locks.start == partials.end, "{rows}x{cols} {call:?}");
    });
}

#[test]
fn a_call_that_keeps_nothing_needs_no_workspace() {
    for_all_reductions(|plan, call, rows, cols| {
        let Parts { row_sums, .. } = parts(plan, call, rows, cols);
        let is_streaming = launches(plan).any(|launch| launch.key.program == Program::BackwardColumns);
        if call.gradients() == 0 && !is_streaming && rows > 0 {
            assert_eq!(plan.workspace.len, 0, "{rows}x{cols} {call:?}");
        }
        assert_eq!(row_sums.is_empty(), !is_streaming, "{rows}x{cols} {call:?}");
    });
}
