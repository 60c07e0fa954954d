//! Plans of the two phases of calls on column-divided rows.

use rmsnorm_gpu::testing::{DWEIGHT_DBIAS, NONE};
use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};

use super::super::Reads;
use super::super::columns::{given, statistics};
use super::*;

/// Checks both phases of every kind of call that has phases.
fn of_calls(mut check: impl FnMut(&Problem, &Caps, [Plan; 2])) {
    let has_halves = |call: &Call| {
        call.parts == 1
            && call.residual_placement == rmsnorm_spec::ResidualPlacement::Before
            && call.grad_reduction == GradReduction::Partials
    };
    for caps in DEVICES {
        for call in Plans::calls().into_iter().filter(has_halves) {
            for cols in Plans::cols() {
                let problem = call.problem(4096, cols);
                check(&problem, &caps, halves(&problem, 16, &caps));
            }
        }
    }
}

fn halves(problem: &Problem, access_bytes: u32, caps: &Caps) -> [Plan; 2] {
    [statistics(problem, access_bytes, caps), given(problem, access_bytes, caps)]
}

/// The programs of a plan.
fn programs(plan: &Plan) -> Vec<Program> {
    plan.keys().map(|key| key.program).collect()
}

#[test]
fn each_half_is_one_program_and_gradients_have_a_second_stage() {
    of_calls(|problem, _, [first, second]| match problem.direction {
        Direction::Forward | Direction::QuantizedForward => {
            assert_eq!(programs(&first), [Program::PartialStatistics]);
            assert_eq!(programs(&second), [Program::ForwardWithStatistics]);
        }
        Direction::Backward => {
            assert_eq!(programs(&first), [Program::PartialBackwardStatistics]);
            let both = [Program::BackwardWithStatistics, Program::ReducePartials];
            let stages = 1 + usize::from(problem.tensors.sums_over_rows() > 0);
            assert_eq!(programs(&second), both[..stages]);
        }
    });
}

/// Threads of a row, rows of a block, blocks of a multiprocessor and of a cluster, and whether a
/// row stays in registers.
#[test]
fn tiles_follow_the_length_of_a_row() {
    for (norm, dtypes, cols, expected) in [
        (Norm::Rms, BF16, 1, (32, 8, 4, 1, false)),
        (Norm::Layer, BF16, 256, (32, 8, 4, 1, true)),
        (Norm::Layer, BF16, 1024, (32, 8, 4, 1, true)),
        (Norm::Layer, BF16, 1025, (64, 4, 4, 1, true)),
        (Norm::Rms, BF16, 4096, (128, 2, 4, 1, false)),
        (Norm::Layer, F32, 4096, (256, 1, 4, 1, true)),
        (Norm::Rms, BF16, 16_384, (512, 1, 2, 1, false)),
        (Norm::Layer, BF16, 32_768, (1024, 1, 1, 1, true)),
        (Norm::Layer, BF16, 32_769, (1024, 1, 1, 1, false)),
        (Norm::Layer, BF16, 131_072, (1024, 1, 1, 1, false)),
        (Norm::Layer, BF16, 131_073, (1024, 1, 1, 8, false)),
    ] {
        let problem = Problem { dtypes, ..Problem::forward(norm, 7, cols, dtypes.activation, WEIGHT) };
        let key = statistics(&problem, 16, &Caps::h200()).keys().next().expect("a kernel");
        let Tile { threads_per_row, groups, blocks_per_sm, cluster, reads, .. } = key.tile;
        let got = (threads_per_row, groups, blocks_per_sm, cluster, reads.keeps_row);
        assert_eq!(got, expected, "{norm:?} {dtypes} {cols}");
    }
}

#[test]
fn blocks_are_what_a_device_takes() {
    of_calls(|problem, caps, plans| {
        for launch in plans.iter().flat_map(launches) {
            let Launch { key: KernelKey { program, tile, .. }, grid, cluster, threads, shared_bytes } = launch;
            assert_eq!((threads, cluster, shared_bytes), (tile.threads(), tile.cluster, 0), "{problem:?} {launch:?}");
            assert!(grid > 0 && grid <= i32::MAX as u32 && grid.is_multiple_of(cluster), "{problem:?} {launch:?}");
            assert!(threads <= 1024 && threads * tile.blocks_per_sm <= caps.threads_per_sm, "{problem:?} {launch:?}");
            // A group of several warps needs its own barrier; there are 15 besides __syncthreads.
            let has_barriers = program.is_half() && tile.threads_per_row > 32;
            assert!(!has_barriers || tile.groups <= 8, "{problem:?} {launch:?}");
            assert!(tile.cluster <= caps.max_cluster && (tile.cluster == 1 || tile.groups == 1), "{launch:?}");
            // A row is held only if the threads hold all of it.
            let is_whole = columns(&tile) * tile.reads.batch as usize >= problem.cols;
            assert!(!tile.reads.keeps_row || is_whole, "{problem:?} {launch:?}");
        }
    });
}

/// The bits of a row depend neither on other rows nor on alignment, and gradients are the same for
/// unaligned tensors.
#[test]
fn threads_of_a_row_depend_on_neither_the_rows_nor_the_alignment() {
    let mapping = |plans: &[Plan; 2]| {
        let tiles = plans.iter().flat_map(Plan::keys).filter(|key| key.program.is_half()).map(|key| key.tile);
        // Ignores the access width, and the number of threads that registers suffice for.
        let alike = |tile: Tile| {
            let reads = Reads { batch: 1, ..tile.reads };
            Tile { access_bytes: 16, blocks_per_sm: 1, reads, ..tile }
        };
        tiles.map(alike).collect::<Vec<_>>()
    };
    of_calls(|problem, caps, plans| {
        let expected = mapping(&plans);
        for rows in [1, 133, 1 << 20] {
            let [aligned, odd] = [16, 2].map(|access| halves(&Problem { rows, ..*problem }, access, caps));
            assert_eq!([mapping(&aligned), mapping(&odd)], [expected.clone(), expected.clone()], "{problem:?}");
            let chunks = |[_, second]: &[Plan; 2]| (second.chunks, second.workspace);
            assert_eq!(chunks(&aligned), chunks(&odd), "{problem:?}");
        }
    });
}

/// math.md, section 5.5: a rank makes so few additions that the sum over twelve ranks, or over any
/// number of ranks with 32 columns each, stays within the bound. Threads without columns add
/// nothing.
#[test]
fn sums_of_a_rank_leave_room_for_those_over_ranks() {
    of_calls(|problem, _, [first, _]| {
        let key = first.keys().next().expect("a kernel");
        let cols = problem.cols;
        // The threads with a pack, and the lanes of a warp among them.
        let packs = cols.div_ceil(key.tile.pack as usize) as u32;
        let threads = packs.next_power_of_two().min(key.tile.threads_per_row);
        let tile = Tile { threads_per_row: threads, pack: key.tile.pack.min(cols as u32), ..key.tile };
        let chain = super::super::chain::of_row(key.program, &tile, cols).expect("a sum");
        let most = (cols.div_ceil(32) + 4).min(cols - 1) as u64;
        assert!(chain <= most && chain <= sum_depth(cols) as u64, "{cols} {key:?}: {chain}, {most} allowed");
    });
}

#[test]
fn sums_over_the_rows_keep_to_the_policy() {
    for caps in DEVICES {
        for cols in Plans::cols().into_iter().filter(|cols| *cols > 300 || cols % 30 == 1) {
            for rows in ROWS.into_iter().filter(|rows| rows * cols <= Plans::MOST_ELEMENTS) {
                let call = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);
                let plan = given(&call.problem(rows, cols), 16, &caps);
                let chain = chains::of_gradients(&plan, rows);
                assert!(chain <= policy_depth_rows(rows) as u64, "{rows}x{cols}: {chain}");
                // Partial sums fit the workspace, with room for their alignment, and have no more
                // rows than the call.
                let parts = workspace::parts(&plan, call, rows, cols);
                assert!(parts.partials.end + 3 <= parts.len && plan.chunks <= rows as u64, "{rows}x{cols}: {parts:?}");
                assert!(parts.locks.is_empty() && parts.row_sums.is_empty());
            }
        }
    }
}

/// Without rows, no kernel of rows is launched; the reduction of partial sums writes zeros to
/// gradients.
#[test]
fn without_rows_only_gradients_are_written() {
    let caps = Caps::h200();
    for (direction, tensors, expected) in [
        (Direction::Forward, WEIGHT_BIAS_RESIDUAL, vec![]),
        (Direction::Backward, NONE, vec![]),
        (Direction::Backward, DWEIGHT_DBIAS, vec![Program::ReducePartials]),
    ] {
        let problem = Call::new(direction, Norm::Layer, BF16, tensors).problem(0, 4096);
        assert_eq!(halves(&problem, 16, &caps).map(|plan| programs(&plan)), [vec![], expected]);
    }
}
