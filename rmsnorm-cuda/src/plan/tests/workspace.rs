//! The layout of partial sums, locks and row sums.

use rmsnorm_gpu::testing::plans::partials_len;

use super::*;

const REDUCTIONS: [GradReduction; 5] = [
    GradReduction::Partials,
    GradReduction::Locks { groups: 1 },
    GradReduction::Locks { groups: 64 },
    GradReduction::Locks { groups: u32::MAX },
    GradReduction::Atomics,
];

/// The parts of the workspace, as the kernels index them.
pub(super) fn parts(plan: &Plan, call: Call, rows: usize, cols: usize) -> Parts {
    // A lock for each block that shares a row of partial sums.
    let blocks = launches(plan).find_map(|Launch { key: KernelKey { program, tile, .. }, .. }| match program {
        Program::Backward => Some(tile.cluster as usize),
        Program::BackwardColumns | Program::BackwardWithStatistics => Some(cols.div_ceil(columns(&tile))),
        Program::BackwardSplit | Program::BackwardRowSums | Program::ReducePartials => None,
        Program::Forward | Program::ForwardCluster | Program::ForwardLong | Program::ForwardStreaming => None,
        Program::QuantizedForward | Program::QuantizedForwardStreaming | Program::QuantizedForwardTransposed => None,
        Program::TransposeCodes | Program::Columnwise | Program::Clear => None,
        Program::PartialStatistics | Program::ForwardWithStatistics | Program::PartialBackwardStatistics => None,
        #[cfg(feature = "peers")]
        Program::ReduceForward
        | Program::ReduceForwardPacks
        | Program::ReduceForwardRows
        | Program::GatherNumbers
        | Program::ForwardExchange => None,
    });
    let is_shared = (1..plan.chunks).contains(&plan.partial_rows) && call.gradients() > 0;
    let has_locks = matches!(call.grad_reduction, GradReduction::Locks { .. }) && is_shared;
    let locks = if has_locks { plan.partial_rows as usize * blocks.unwrap_or(0) } else { 0 };
    let has_row_sums = launches(plan).any(|launch| launch.key.program == Program::BackwardRowSums);
    let row_sums = if has_row_sums { 2 * rows } else { 0 };
    let from = |first: usize, len: usize| first as u64..(first + len) as u64;
    Parts {
        is_shared,
        partials: 0..partials_len(call, plan.partial_rows, cols),
        locks: from(plan.workspace.locks, locks),
        row_sums: from(plan.workspace.row_sums, row_sums),
        len: plan.workspace.len as u64,
    }
}

/// Every backward call with every `GradReduction`, for some lengths of each program.
/// Each group of columns has the kernels and the workspace of a call of its own, on a share of the
/// device.
#[test]
fn a_group_of_columns_is_a_problem_of_its_own() {
    const GROUPS: usize = 6;
    let caps = Caps::h200();
    let share = Caps { sms: caps.sms / GROUPS as u32, ..caps };
    for (call, rows, cols) in sizes().into_iter().step_by(101) {
        let (problem, one) = (call.problem(rows, GROUPS * cols), call.problem(rows, cols));
        let (planned, one) = (plan(&Problem { groups: GROUPS, ..problem }, 16, &caps), plan(&one, 16, &share));
        let text = || format!("{rows}x{cols} {call:?}: {planned:?}");
        let of_key = |key: &KernelKey| match key.program == Program::Clear {
            true => ColumnGroups::None,
            false => ColumnGroups::Blocks,
        };
        let keys = one.keys().map(|key| KernelKey { column_groups: of_key(&key), ..key });
        assert!(planned.keys().eq(keys), "{}", text());
        assert_eq!(
            (planned.groups, planned.chunks, planned.partial_rows),
            (6, one.chunks, one.partial_rows),
            "{}",
            text()
        );
        let Workspace { of_group, len, .. } = planned.workspace;
        assert!(of_group >= one.workspace.len && of_group.is_multiple_of(4) && len == GROUPS * of_group, "{}", text());
        let groups = Problem { groups: GROUPS, ..problem };
        assert!(len <= workspace_len(&groups, &caps) && len <= workspace_len_bound(&groups), "{}", text());
        for (step, of_one) in planned.steps.iter().zip(one.steps) {
            if let (Some(Step::Clear { first, bytes, .. }), Some(Step::Clear { first: start, bytes: each, .. })) =
                (*step, of_one)
            {
                assert_eq!((first, bytes), (start, each + 4 * (GROUPS - 1) * of_group), "{}", text());
                assert!(first + bytes <= 4 * len, "{}", text());
            }
        }
    }
}

/// In forward, groups of columns are rows wherever a block has whole rows. All rows of a thread have
/// the weights of one group, and the threads of a row are those of a call whose rows they are.
#[test]
fn groups_of_columns_are_rows_of_forward() {
    let caps = Caps::h200();
    let problem = |rows, cols| Problem::forward(Norm::Rms, rows, cols, DType::Bf16, &[Tensor::Weight]);
    for (rows, groups, cols) in [(4096, 8, 16), (4096, 3, 16), (4096, 16, 64), (300, 2, 1024), (1 << 20, 12, 8192)] {
        let planned = plan(&Problem { groups, ..problem(rows, groups * cols) }, 16, &caps);
        let of_rows = plan(&problem(rows * groups, cols), 16, &caps);
        let ([Some(Step::Launch { key, grid, .. }), ..], [Some(Step::Launch { key: of_row, .. }), ..]) =
            (planned.steps, of_rows.steps)
        else {
            panic!("{planned:?}")
        };
        assert_eq!((key.column_groups, planned.groups), (ColumnGroups::Rows, 1), "{planned:?}");
        let (Tile { groups: at_once, unroll, .. }, threads) =
            (key.tile, |tile: Tile| (tile.threads_per_row, tile.packs));
        assert!(unroll == 1 || at_once.is_multiple_of(groups as u32), "{planned:?}");
        assert!((grid * at_once * unroll) as usize >= rows * groups, "{planned:?}");
        assert_eq!(threads(key.tile), threads(of_row.tile), "{planned:?}");
    }
    // Rows in groups, rows of several blocks, and more rows than 32 bits count.
    let grouped = Problem { rows_per_group: Some(4), groups: 8, ..problem(4096, 1024) };
    for problem in
        [grouped, Problem { groups: 2, ..problem(64, 1 << 18) }, Problem { groups: 4, ..problem(1 << 30, 64) }]
    {
        let planned = plan(&problem, 16, &caps);
        assert!(planned.keys().all(|key| key.column_groups == ColumnGroups::Blocks), "{planned:?}");
        assert_eq!(planned.groups as usize, problem.groups, "{planned:?}");
    }
}

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

fn is_split(plan: &Plan) -> bool {
    launches(plan).any(|launch| launch.key.program == Program::BackwardSplit)
}

#[test]
fn partial_rows_are_as_many_as_the_reduction_says() {
    for caps in DEVICES {
        for (call, rows, cols) in sizes() {
            let plan = call.plan(rows, cols, &caps);
            let expected = match call.grad_reduction {
                _ if is_split(&plan) => 0,
                GradReduction::Partials => plan.chunks,
                GradReduction::Locks { groups } => plan.chunks.min(groups.into()),
                GradReduction::Atomics => plan.chunks.min(4),
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

/// The bound suffices on every device.
#[test]
fn the_bound_is_enough_on_every_device() {
    // Devices with 256 multiprocessors, one of them with clusters and less shared memory (sm_120).
    let small =
        Caps { shared_per_block_optin: 99 << 10, shared_per_sm: 100 << 10, threads_per_sm: 1536, ..Caps::h200() };
    let largest = [DEVICES[0], DEVICES[1], DEVICES[2], small].map(|caps| Caps { sms: 256, ..caps });
    for caps in DEVICES.into_iter().chain(largest) {
        for (call, rows, cols) in sizes() {
            let problem = call.problem(rows, cols);
            let (need, bound) = (workspace_len(&problem, &caps), workspace_len_bound(&problem));
            assert!(need <= bound, "{rows}x{cols} {call:?} on {caps:?}: {need} > {bound}");
        }
    }
}

/// The bound is not much more than an H200 needs: its 132 multiprocessors have one block each, the
/// bound counts two on each of 256.
#[test]
fn the_bound_is_of_the_size_of_what_is_needed() {
    let problem = Problem::backward(Norm::Rms, 8192, 4096, DType::Bf16, &[Tensor::Weight, Tensor::Dweight]);
    let (need, bound) = (workspace_len(&problem, &Caps::h200()), workspace_len_bound(&problem));
    assert!(bound <= 5 * need, "{bound} for {need}");
    assert_eq!(workspace_len_bound(&Problem::forward(Norm::Rms, 8192, 4096, DType::Bf16, &[Tensor::Weight])), 0);
}

/// Checks both sides of the limit: if plans change elsewhere, this fails.
#[test]
fn the_suite_is_told_where_partial_rows_begin() {
    let at = |dtype, caps: &Caps| super::super::unsplit_from(dtype, caps);
    assert_eq!([DType::Bf16, DType::F32].map(|dtype| at(dtype, &Caps::h200())), [Some((1025, 1021)); 2]);
    let large = Caps { tuning: crate::plan::Tuning::H200.with_large_plans(), ..Caps::h200() };
    assert_eq!(at(DType::Bf16, &large), Some((1, 1021)));
}
