//! Where partial sums and row sums lie.

use std::collections::BTreeSet;

use rmsnorm_gpu::reduction::ALIGNMENT_SLACK;

use super::super::workspace_len;
use super::*;

const REDUCTIONS: [GradReduction; 2] = [GradReduction::Partials, GradReduction::Atomics];

/// A device whose bindings hold few rows: calls take several ranges, which share partial rows.
const SHORT: Caps = Caps { binding_bytes: 1 << 20, ..Caps::lavapipe() };

/// Calls `check` for every backward call with every way of summing, for some lengths of each regime.
fn for_all_reductions(mut check: impl FnMut(&Caps, &Plan, Call, usize, usize)) {
    for caps in DEVICES.into_iter().chain([SHORT]) {
        // Norms have equal workspaces.
        for call in calls().into_iter().filter(|call| call.direction == Direction::Backward && call.norm == Norm::Rms) {
            for grad_reduction in REDUCTIONS {
                let call = Call { grad_reduction, ..call };
                for cols in all_cols().into_iter().filter(|cols| *cols > 300 && cols % 2 == 1 || cols % 100 == 1) {
                    for rows in [0, 1, 9, 529, 4096, 1 << 20].into_iter().filter(|rows| rows * cols <= 1 << 29) {
                        for access in ACCESSES {
                            let layout = call.layout(rows, cols, access);
                            if let Ok(plan) = plan(&call.problem(rows, cols), &layout, &caps) {
                                check(&caps, &plan, call, rows, cols);
                            }
                        }
                    }
                }
            }
        }
    }
}

fn partials(plan: &Plan, call: Call, cols: usize) -> u64 {
    // Each partial row begins on 32 bytes.
    call.gradients() as u64 * u64::from(plan.partial_rows) * cols.next_multiple_of(8) as u64
}

/// Two sums of each row of the longest range.
fn row_sums(plan: &Plan) -> u64 {
    let sums = dispatches(plan).filter(|dispatch| dispatch.key.program == Program::BackwardRowSums);
    sums.map(|dispatch| 2 * (dispatch.rows.end - dispatch.rows.start)).max().unwrap_or(0)
}

#[test]
fn parts_do_not_overlap_and_end_within() {
    for_all_reductions(|caps, plan, call, rows, cols| {
        let (partials, row_sums) = (partials(plan, call, cols), row_sums(plan));
        assert!(plan.workspace.row_sums >= partials, "{rows}x{cols} {call:?} {plan:?}");
        assert!(plan.workspace.row_sums.is_multiple_of(4), "{rows}x{cols} {call:?} {plan:?}");
        let end = if row_sums > 0 { plan.workspace.row_sums + row_sums } else { partials };
        // Whatever the caller's address, the parts still fit, in whole packs, when they begin on 16 bytes.
        let end = end.next_multiple_of(4);
        assert!(end == 0 || end + ALIGNMENT_SLACK <= plan.workspace.len, "{rows}x{cols} {call:?} {plan:?}");
        assert!(4 * plan.workspace.len <= caps.binding_bytes, "{rows}x{cols} {call:?} {plan:?}");
    });
}

#[test]
fn callers_are_told_enough_for_any_layout() {
    for_all_reductions(|caps, plan, call, rows, cols| {
        let told = workspace_len(&call.problem(rows, cols), caps) as u64;
        assert!(plan.workspace.len <= told, "{rows}x{cols} {call:?}: told {told}, {plan:?}");
        // Rows that are apart, in as few as one a range.
        let problem = call.problem(rows, cols);
        for row_stride in [cols + 1, 3 * cols, 50 * cols] {
            let placed = |dtype| Placed { dtype, offset: 6, row_stride: row_stride as u64, group_stride: 0 };
            let layout =
                Layout::new(&problem, [placed(call.dtypes.activation), placed(call.dtypes.residual)], [], false, false);
            if rows <= 529
                && let Ok(apart) = super::plan(&problem, &layout, caps)
            {
                assert!(apart.workspace.len <= told, "{rows}x{cols} {call:?}: told {told}, {apart:?}");
            }
        }
    });
}

#[test]
fn every_partial_row_is_written_before_it_is_read() {
    for_all_reductions(|_, plan, call, rows, cols| {
        let context = || format!("{rows}x{cols} {call:?} {plan:?}");
        if call.gradients() == 0 {
            return assert_eq!(plan.partial_rows, 0, "{}", context());
        }
        if call.grad_reduction == GradReduction::Atomics {
            return assert_eq!(plan.partial_rows, rows.min(1) as u32, "{}", context());
        }
        let mut written = BTreeSet::new();
        for dispatch in dispatches(plan).filter(|dispatch| dispatch.chunks > 0) {
            let chunks = dispatch.first_chunk..dispatch.first_chunk + dispatch.chunks;
            assert!(chunks.end <= plan.partial_rows, "{}", context());
            for chunk in [chunks.start, chunks.end - 1] {
                assert_eq!(written.contains(&chunk), dispatch.accumulates, "{}", context());
            }
            written.extend(chunks);
        }
        assert_eq!(written.len(), plan.partial_rows as usize, "{}", context());
    });
}

#[test]
fn what_is_added_to_is_zeroed_first() {
    for_all_reductions(|_, plan, call, rows, cols| {
        let len = partials(plan, call, cols);
        let adds_up = call.grad_reduction == GradReduction::Atomics && len > 0;
        let zeros: Vec<_> = plan.steps.iter().filter(|step| matches!(step, Step::Zero { .. })).collect();
        let expected = Step::Zero { first: 0, len };
        assert_eq!(zeros, if adds_up { vec![&expected] } else { vec![] }, "{rows}x{cols} {call:?}");
        assert!(!adds_up || plan.steps.first() == Some(&expected), "{rows}x{cols} {call:?}");
    });
}

#[test]
fn a_call_that_keeps_nothing_needs_no_workspace() {
    for_all_reductions(|_, plan, call, rows, cols| {
        let is_bound = call.gradients() > 0 || row_sums(plan) > 0;
        assert_eq!(plan.workspace.len > 0, is_bound, "{rows}x{cols} {call:?} {plan:?}");
    });
    for call in calls().into_iter().filter(|call| call.direction == Direction::Forward) {
        assert_eq!(workspace_len(&call.problem(4096, 4096), &Caps::h200()), 0, "{call:?}");
    }
}
