//! Properties of every plan, for all calls.

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_gpu::tuning::{rises, up_to};

use super::super::ranges::grid;
use super::super::{COLUMNWISE_TILE, PlanError, SIDE, Tuning, copy};
use super::*;
use crate::source;

#[test]
fn every_column_has_one_thread() {
    for_all::<Plans>(|caps, call, cols| {
        for Dispatch { key, .. } in dispatches(&call.plan(SOME_ROWS, cols, caps)) {
            let KernelKey { program, tile, .. } = key;
            if program.is_on_chip() {
                assert!(tile.columns() >= cols, "{cols} {tile:?}");
                // Every pack has a thread with a column in it.
                assert!(tile.columns() - tile.threads_per_row as usize * PAIR < cols, "{cols} {tile:?}");
                let most_packs = if *program == Program::Forward { 8 } else { 5 };
                assert!((1..=most_packs).contains(&tile.packs), "{cols} {tile:?}");
            } else {
                assert_eq!(tile.rows_at_once, 1, "{cols} {key:?}");
                // The packs of an iteration.
                let is_streaming = *program == Program::ForwardStreaming;
                assert!(tile.packs == 1 || (is_streaming && tile.packs == 4), "{cols} {key:?}");
            }
        }
    });
}

#[test]
fn keys_have_the_tensors_of_the_call() {
    for_all::<Plans>(|caps, call, cols| {
        use Tensor::{
            Bias, Dbias, Dgate, Dresidual, DresidualOut, Dweight, Dx, Dy, Gate, Mean, NextBias, NextMean, NextRstd,
            NextWeight, Residual, ResidualOut, Rstd, Weight, X, Y,
        };
        let problem = call.problem(SOME_ROWS, cols);
        let with_offset = Problem { has_weight_offset: true, ..problem };
        let planned = plan(&with_offset, &layout(&with_offset, Access::Aligned), caps).expect("a plan");
        for Dispatch { key, .. } in dispatches(&planned) {
            // The offset is added only to a weight that the program reads.
            assert_eq!(key.has_weight_offset, key.call.tensors.has(Weight), "{cols} {call:?}");
        }
        for Dispatch { key, .. } in dispatches(&call.plan(SOME_ROWS, cols, caps)) {
            let code: &[Tensor] = match key.program {
                Program::Forward | Program::ForwardStreaming => &[
                    X,
                    Residual,
                    Weight,
                    Bias,
                    Y,
                    ResidualOut,
                    Mean,
                    Rstd,
                    NextWeight,
                    NextBias,
                    NextMean,
                    NextRstd,
                    Gate,
                ],
                Program::Backward | Program::BackwardColumns => {
                    &[X, Dy, Weight, Bias, Mean, Rstd, DresidualOut, Dx, Dweight, Dbias, Dresidual, Gate, Dgate]
                }
                Program::BackwardRowSums => &[X, Dy, Weight, Mean, Rstd, Gate],
                Program::ReducePartials => &[Dweight, Dbias],
                Program::QuantizedForward
                | Program::QuantizedForwardStreaming
                | Program::TransposeCodes
                | Program::Columnwise
                | Program::TensorScale
                | Program::Clear
                | Program::Copy => &[],
            };
            let expected: TensorSet = code.iter().copied().filter(|tensor| problem.has(*tensor)).collect();
            assert_eq!((key.call.tensors, key.has_weight_offset), (expected, false), "{cols} {call:?}");
            // The plan ensures the properties that the text of the program relies on.
            let matrices = [key.call.dtypes.activation, key.call.dtypes.residual];
            let is_f32 = matrices.contains(&DType::F32);
            assert_eq!(source::is_split(key), is_f32, "{cols} {key:?} of {call:?}");
            // The code then has no bounds checks.
            let is_whole = key.program.is_on_chip() && key.tile.columns() == cols;
            assert_eq!(key.is_whole, is_whole, "{cols} {key:?}");
            // A thread adds the sums of subgroups sequentially.
            if let Reduction::Subgroup(lanes) = key.tile.reduction {
                let sums = key.tile.threads_per_row.div_ceil(lanes);
                assert!(sums <= lanes.max(128 / lanes), "{cols} {key:?}");
            }
        }
    });
}

/// A group of columns has the programs and threads of a row of its length, and so its bits.
#[test]
fn groups_of_columns_are_planned_as_rows_of_their_length() {
    let calls = || Plans::calls().into_iter().filter(|call| call.residual_placement == ResidualPlacement::Before);
    for (caps, call) in DEVICES.into_iter().flat_map(|caps| calls().map(move |call| (caps, call))) {
        for (groups, cols) in [(2, 8), (5, 33), (8, 512), (3, 9000)] {
            let row = call.problem(SOME_ROWS, cols);
            let problem = Problem { cols: groups * cols, groups, ..row };
            for access in ACCESSES {
                let planned = |problem: &Problem| plan(problem, &layout(problem, access), &caps).expect("a plan");
                let (plan, of_row) = (planned(&problem), planned(&row));
                assert!(
                    plan.workspace.len <= workspace_len(&problem, &caps) as u64 || call.direction == Direction::Forward
                );
                let keys = |plan: &Plan, has_groups| -> Vec<_> {
                    let mut keys: Vec<_> = plan.keys().map(|key| KernelKey { has_groups, ..key }).collect();
                    keys.dedup();
                    keys
                };
                assert!(plan.keys().all(|key| key.has_groups));
                assert_eq!(keys(&plan, false).len(), keys(&of_row, false).len());
                for (key, of_row) in keys(&plan, false).iter().zip(keys(&of_row, false)) {
                    // More partial rows have more threads, in the second stage.
                    let is_reduction = key.program == Program::ReducePartials;
                    assert!(is_reduction || *key == of_row, "{groups} {key:?} {of_row:?}");
                }
            }
        }
    }
    let problem = Problem { cols: 70_000, groups: 70_000, ..Plans::calls()[0].problem(1, 1) };
    let refused = plan(&problem, &layout(&problem, Access::Aligned), &Caps::h200());
    assert_eq!(refused, Err(PlanError::Grid { groups: 70_000, most: 65_535 }));
}

#[test]
fn workgroups_are_what_a_device_takes() {
    for_all::<Plans>(|caps, call, cols| {
        for access in ACCESSES {
            for dispatch in dispatches(&call.plan_by(access, SOME_ROWS, cols, caps)) {
                let KernelKey { tile, .. } = dispatch.key;
                assert!((32..=caps.max_threads).contains(&tile.threads()), "{cols} {dispatch:?}");
                let threads = tile.threads_per_row;
                assert!(threads.is_power_of_two() || threads.is_multiple_of(32), "{cols} {dispatch:?}");
                // A subgroup has threads of one row, or all threads of several rows.
                let is_whole = |lanes| threads.is_multiple_of(lanes) || lanes % threads == 0;
                assert!(
                    !matches!(tile.reduction, Reduction::Subgroup(lanes) if !is_whole(lanes)),
                    "{cols} {dispatch:?}"
                );
                // With sums in workgroup memory, all segments are full.
                assert!(threads.is_multiple_of(tile.segment().min(threads)), "{cols} {dispatch:?}");
                // Sums over row groups and over partial rows are trees.
                assert!(tile.groups.is_power_of_two(), "{cols} {dispatch:?}");
                assert!(source::workgroup_bytes(&dispatch.key) <= caps.workgroup_bytes, "{cols} {dispatch:?}");
                if let Reduction::Subgroup(lanes) = tile.reduction {
                    assert_eq!(Some(lanes), caps.subgroup);
                    assert!(tile.threads().is_multiple_of(lanes), "{cols} {dispatch:?}");
                }
            }
        }
    });
}

#[test]
fn subgroups_are_full_whatever_their_size() {
    for lanes in [8, 16, 32, 64, 128] {
        for device in DEVICES {
            let caps = Caps { subgroup: Some(lanes), ..device };
            for call in Plans::calls() {
                for cols in Plans::cols() {
                    for Dispatch { key, .. } in dispatches(&call.plan(SOME_ROWS, cols, &caps)) {
                        let is_full = key.tile.threads().is_multiple_of(lanes);
                        assert!(is_full || key.tile.reduction == Reduction::Workgroup, "{cols} {key:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_grid_has_every_workgroup_in_two_dimensions() {
    let narrow = Caps { groups_per_dimension: 300, ..Caps::laptop() };
    for caps in DEVICES.into_iter().chain([narrow]) {
        for call in Plans::calls() {
            for cols in [1, 100, 264, 4096, 70_000] {
                for rows in ROWS.into_iter().filter(|rows| rows * cols <= 1 << 34) {
                    // More partial rows than fit.
                    let layout = call.layout(rows, cols, Access::Parts);
                    let Ok(plan) = plan(&call.problem(rows, cols), &layout, &caps) else { continue };
                    for dispatch in dispatches(&plan) {
                        let side = caps.groups_per_dimension;
                        assert!(dispatch.grid.iter().all(|n| (1..=side).contains(n)), "{rows}x{cols} {dispatch:?}");
                        let groups: u64 = dispatch.grid.iter().map(|n| u64::from(*n)).product();
                        assert!(groups >= work(dispatch, call, cols), "{rows}x{cols} {dispatch:?}");
                        // No dimension has more workgroups than needed.
                        assert!(groups < work(dispatch, call, cols) + u64::from(side), "{rows}x{cols} {dispatch:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_grid_has_as_many_workgroups_as_two_dimensions_and_no_more() {
    let caps = Caps { groups_per_dimension: 4, ..Caps::laptop() };
    assert_eq!([1, 4, 5, 15, 16].map(|groups| grid(groups, &caps)), [[1, 1], [4, 1], [3, 2], [4, 4], [4, 4]].map(Ok));
    assert_eq!(grid(17, &caps), Err(PlanError::Grid { groups: 17, most: 16 }));
}

/// Chunks have any number of rows, and so does a grid of sixteen workgroups.
#[test]
fn a_small_grid_does_not_split_a_backward_call() {
    let caps = Caps { groups_per_dimension: 4, ..Caps::lavapipe() };
    let plan = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT).plan(1000, 256, &caps);
    assert_eq!(dispatches(&plan).filter(|dispatch| dispatch.chunks > 0).count(), 1, "{plan}");
    // Sixteen workgroups on the columns of a chunk leave fewer chunks.
    let caps = Caps { groups_per_dimension: 32, ..Caps::h200() };
    let plan = Call::new(Direction::Backward, Norm::Rms, F32, DWEIGHT).plan(4096, 32_768, &caps);
    assert_eq!(dispatches(&plan).map(|dispatch| dispatch.chunks).max(), Some(1024 / 16), "{plan}");
}

/// Workgroups that do any work.
fn work(dispatch: &Dispatch, call: Call, cols: usize) -> u64 {
    let KernelKey { program, tile, .. } = dispatch.key;
    let rows = dispatch.rows.end - dispatch.rows.start;
    match program {
        Program::Forward
        | Program::ForwardStreaming
        | Program::QuantizedForward
        | Program::QuantizedForwardStreaming
        | Program::BackwardRowSums => rows.div_ceil(tile.groups.into()),
        Program::TransposeCodes => rows.div_ceil(SIDE) * (cols as u64).div_ceil(SIDE),
        Program::Columnwise => {
            let (height, width) = COLUMNWISE_TILE;
            rows.div_ceil(height) * (cols as u64).div_ceil(width)
        }
        Program::TensorScale => 1,
        Program::Clear => rows.div_ceil(4 * u64::from(tile.threads())),
        Program::Backward => dispatch.chunks.into(),
        Program::BackwardColumns => u64::from(dispatch.chunks) * cols.div_ceil(tile.columns()) as u64,
        Program::ReducePartials => (cols.div_ceil(4 * tile.threads_per_row as usize) * call.gradients()) as u64,
        Program::Copy => rows.div_ceil(tile.columns() as u64),
    }
}

#[test]
fn a_row_is_summed_alike_whatever_a_binding_reaches() {
    let short = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    for call in Plans::calls() {
        for cols in Plans::cols().into_iter().filter(|cols| *cols <= 1025) {
            let split = call.plan(100, cols, &short);
            assert_eq!(
                Plans::mapping(&split),
                Plans::mapping(&call.plan(100, cols, &Caps::lavapipe())),
                "{cols} {call:?}"
            );
        }
    }
}

#[test]
fn what_is_shorter_than_rows_in_registers_is_in_registers() {
    // Except in forward norms beyond 32768 columns, on the largest workgroups: see the times in
    // `plan/tuning.rs`.
    for caps in DEVICES {
        for call in Plans::calls() {
            let is_kept = |cols: usize| {
                let plan = call.plan(SOME_ROWS, cols, &caps);
                dispatches(&plan).any(|dispatch| dispatch.key.program.is_on_chip())
            };
            let kept: Vec<bool> = (1..=4096).map(|packs| is_kept(packs * PAIR)).collect();
            let first = kept.iter().position(|is_kept| !is_kept).unwrap_or(kept.len());
            assert!(
                kept[first..].iter().all(|is_kept| !is_kept),
                "{} columns stream: {call:?}, {caps:?}",
                PAIR * (first + 1)
            );
            // At least four packs per thread.
            assert!(first >= 512.min(4 * caps.max_threads as usize), "{first}: {call:?}, {caps:?}");
        }
    }
}

#[test]
fn what_lies_anywhere_is_read_in_loops_unless_it_is_short() {
    for_all::<Plans>(|caps, call, cols| {
        let aligned = call.plan(SOME_ROWS, cols, caps);
        for access in [Access::Words, Access::Parts] {
            let plan = call.plan_by(access, SOME_ROWS, cols, caps);
            for Dispatch { key, .. } in dispatches(&plan).filter(|dispatch| dispatch.key.program.is_on_chip()) {
                assert!(key.tile.packs <= access.most_packs(), "{cols} {key:?}");
            }
            for Dispatch { key, .. } in dispatches(&plan) {
                let dense = Layout::dense(&call.problem(SOME_ROWS, cols)).reduce_access;
                let own = if key.program == Program::ReducePartials { dense } else { access };
                assert_eq!(key.access, own, "{cols} {key:?}");
                // Packs smaller than an access, or of one iteration, do not cover the columns.
                assert!(!key.is_whole, "{cols} {key:?}");
                let is_on_chip = key.program.is_on_chip();
                assert!(is_on_chip || key.tile.rows_at_once == 1, "{cols} {key:?}");
            }
            let is_short = dispatches(&aligned)
                .any(|Dispatch { key, .. }| key.program.is_on_chip() && key.tile.packs <= access.most_packs());
            let is_kept = dispatches(&plan).any(|dispatch| dispatch.key.program.is_on_chip());
            assert_eq!(is_short, is_kept, "{cols} {call:?}");
        }
    });
}

#[test]
fn equal_code_has_equal_keys() {
    let caps = Caps::h200();
    let key = |call: Call, cast_order| {
        let problem = Problem { cast_order, ..call.problem(4096, 4096) };
        let plan = plan(&problem, &call.layout(4096, 4096, Access::Aligned), &caps).expect("a plan");
        dispatches(&plan).next().expect("a kernel").key
    };
    let (at_store, before) = (CastOrder::AtStore, CastOrder::BeforeWeight);
    let call = |dtypes, tensors| Call::new(Direction::Forward, Norm::Rms, dtypes, tensors);
    // x_hat is rounded before a weight with 16-bit activations only.
    assert_ne!(key(call(BF16, WEIGHT), at_store), key(call(BF16, WEIGHT), before));
    assert_eq!(key(call(BF16, NONE), at_store), key(call(BF16, NONE), before));
    assert_eq!(key(call(F32, WEIGHT), at_store), key(call(F32, WEIGHT), before));
    // Without a weight the rounding of rstd stays.
    assert_ne!(key(call(BF16, NONE), at_store), key(call(BF16, NONE), CastOrder::RstdFirst));
    assert_eq!(key(call(F32, WEIGHT), at_store), key(call(F32, WEIGHT), CastOrder::RstdFirst));
    // The dtypes of absent tensors.
    let mixed = BF16.widened(true, true);
    assert_eq!(key(call(BF16, NONE), at_store), key(call(mixed, NONE), at_store));
    let atomic = |tensors| Call {
        grad_reduction: GradReduction::Atomics,
        ..Call::new(Direction::Backward, Norm::Rms, BF16, tensors)
    };
    assert_eq!(key(atomic(WEIGHT), at_store).call.accumulate, Accumulate::Partials);
    assert_eq!(key(atomic(DWEIGHT), at_store).call.accumulate, Accumulate::Atomics);
}

#[test]
fn spin_locks_are_refused_by_rule() {
    let call = Call {
        grad_reduction: GradReduction::Locks { groups: 4 },
        ..Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT)
    };
    let (problem, layout) = (call.problem(64, 64), call.layout(64, 64, Access::Aligned));
    let unfit = plan(&problem, &layout, &Caps::h200()).expect_err("no locks in WGSL");
    assert_eq!(unfit, PlanError::Locks { groups: 4 });
    let text = unfit.to_string();
    assert!(
        text.contains("the wgpu backend supports GradReduction::Partials and Atomics, got Locks { groups: 4 }"),
        "{text}"
    );
    assert_eq!(workspace_len(&problem, &Caps::h200()), 0);
}

#[test]
fn a_device_with_too_little_is_refused_by_rule() {
    let caps = Caps { max_threads: 0, workgroup_bytes: 0, ..Caps::phone() };
    for call in Plans::calls() {
        let planned = plan(&call.problem(64, 64), &call.layout(64, 64, Access::Aligned), &caps);
        assert_eq!(planned, Err(PlanError::Device { threads: 0, workgroup_bytes: 0 }));
        assert_eq!(workspace_len(&call.problem(64, 64), &caps), 0);
    }
}

#[test]
fn a_copy_has_every_element_once() {
    // Sixteen workgroups, which bind less than the limit.
    let narrow = Caps { groups_per_dimension: 4, ..Caps::laptop() };
    for caps in DEVICES.into_iter().chain([narrow]) {
        for dtype in [DType::F32, DType::Bf16] {
            for len in [0, 1, 17, 4096, 1 << 26, (1 << 31) + 3] {
                let (to, is_aliased) = if len % 2 == 1 { (16, true) } else { (4, false) };
                let access = Access::of_copy(16, to, dtype, len);
                let steps = copy(dtype, len, access, is_aliased, &caps).expect("a plan");
                let plan = Plan { steps, ..Plan::default() };
                // No more than bindings and grids require.
                let grids = caps.most_groups() * u64::from(caps.threads(512)) * PAIR as u64;
                let most = (caps.available_bytes() / dtype.size() as u64).min(grids) / 16 * 16;
                assert_eq!(plan.steps.len() as u64, len.div_ceil(most), "{len} {caps:?}");
                let mut next = 0;
                for dispatch in dispatches(&plan) {
                    let rows = dispatch.rows.clone();
                    assert_eq!(rows.start, next);
                    assert!((rows.start * dtype.size() as u64).is_multiple_of(16));
                    assert!((rows.end - rows.start) * dtype.size() as u64 <= caps.available_bytes());
                    let groups: u64 = dispatch.grid.iter().map(|n| u64::from(*n)).product();
                    let work = work(dispatch, Plans::calls()[0], 1);
                    assert!((work..work + u64::from(dispatch.grid[1])).contains(&groups), "{dispatch:?}");
                    assert_eq!((dispatch.key.access, dispatch.key.aliased), (access, is_aliased), "{dispatch:?}");
                    next = rows.end;
                }
                assert_eq!(next, len, "{len} {dtype:?}");
            }
        }
    }
}

#[test]
fn the_suite_is_told_where_plans_change() {
    let (caps, calls) = (Caps::h200(), Plans::calls());
    let breakpoints = caps.tuning.cols_breakpoints();
    for &cols in &breakpoints {
        let programs = |call: &Call, cols| -> Vec<_> {
            dispatches(&call.plan(1, cols, &caps)).map(|dispatch| (dispatch.key.program, dispatch.key.tile)).collect()
        };
        let changes = |call: &Call| programs(call, cols) != programs(call, cols + 1);
        assert!(calls.iter().any(changes), "no plan changes after {cols} columns");
    }
    // One pack in backward, threads that are not a power of two, fewer packs of f32, the longest
    // rows that stay in registers.
    for cols in [256, 7168, 8192, 16384, 32768, 65536] {
        assert!(breakpoints.contains(&cols), "{cols}: {breakpoints:?}");
    }
}

#[test]
fn limits_of_tables_rise() {
    let Tuning { forward, to_codes, backward } = Tuning::H200;
    assert!(rises(to_codes), "{to_codes:?}");
    assert!(forward.iter().all(|ladder| rises(ladder)), "{forward:?}");
    assert!(backward.iter().all(|ladder| rises(ladder)), "{backward:?}");
}

/// A measured table replaces the built-in one, for the calls that it covers.
#[test]
fn plans_follow_the_table_of_their_device() {
    let mut tuning = Tuning::H200.clone();
    tuning.forward[0] = vec![up_to(512, 8)].into();
    let caps = Caps { tuning: Box::leak(Box::new(tuning)), ..Caps::h200() };
    let packs = |norm, caps: &Caps| {
        let plan = Call::new(Direction::Forward, norm, BF16, WEIGHT).plan(SOME_ROWS, 4096, caps);
        dispatches(&plan).map(|dispatch| dispatch.key.tile.packs).collect::<Vec<_>>()
    };
    assert_eq!([packs(Norm::Rms, &Caps::h200()), packs(Norm::Rms, &caps), packs(Norm::Layer, &caps)], [[4], [8], [4]]);
}
