//! Layouts of tensors, and rows that exceed a binding or grid.

use rmsnorm_spec::{GradStore, RowGroups, Rows};

use super::super::PlanError;
use super::*;

fn placed(dtype: DType, offset: u64, row_stride: u64) -> Placed {
    Placed { storage: dtype.into(), offset, row_stride, group_stride: 0 }
}

/// The access to a call of 4 rows with this layout of x and weight, and an aligned y.
fn access(cols: usize, x: Placed, weight: Placed) -> Access {
    let dtype = |tensor: Placed| tensor.storage.float().expect("matrices and weights are floats");
    let dtypes = DTypes { weight: dtype(weight), ..DTypes::uniform(dtype(x)) };
    let call = Call::new(Direction::Forward, Norm::Rms, dtypes, WEIGHT);
    let y = placed(dtype(x), 0, cols as u64);
    Layout::new(&call.problem(4, cols), [x, y, weight], [], false, false).access
}

#[test]
fn access_is_that_of_the_worst_tensor() {
    let (bf16, f32) = (DType::Bf16, DType::F32);
    let vector = placed(bf16, 0, 0);
    // Offset in bytes, stride in elements.
    assert_eq!(access(64, placed(bf16, 32, 64), vector), Access::Aligned);
    assert_eq!(access(64, placed(bf16, 32, 72), vector), Access::Aligned);
    assert_eq!(access(64, placed(bf16, 8, 64), vector), Access::Words);
    assert_eq!(access(64, placed(bf16, 32, 68), vector), Access::Words);
    assert_eq!(access(68, placed(bf16, 0, 72), vector), Access::Words);
    assert_eq!(access(64, placed(bf16, 2, 64), vector), Access::Parts);
    assert_eq!(access(64, placed(bf16, 0, 65), vector), Access::Parts);
    assert_eq!(access(63, placed(bf16, 0, 64), vector), Access::Parts);
    assert_eq!(access(64, placed(bf16, 0, 64), placed(bf16, 2, 0)), Access::Parts);
    assert_eq!(access(64, placed(bf16, 0, 64), placed(f32, 4, 0)), Access::Words);
    // f32 is never accessed in halves, and a row of four is a quad.
    assert_eq!(access(4, placed(f32, 16, 4), placed(f32, 0, 0)), Access::Aligned);
    assert_eq!(access(3, placed(f32, 4, 5), placed(f32, 0, 0)), Access::Words);
    // In calls with f32 matrices, 16-bit elements move by the quad.
    assert_eq!(access(4, placed(f32, 0, 4), placed(bf16, 8, 0)), Access::Aligned);
}

#[test]
fn one_row_has_no_stride() {
    let call = Call::new(Direction::Forward, Norm::Rms, BF16, NONE);
    let x = placed(DType::Bf16, 0, 65);
    assert_eq!(Layout::new(&call.problem(1, 64), [x], [], false, false).access, Access::Aligned);
    assert_eq!(Layout::new(&call.problem(2, 64), [x], [], false, false).access, Access::Parts);
}

#[test]
fn the_second_stage_has_an_access_of_its_own() {
    let call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
    let problem = call.problem(64, 64);
    let matrix = placed(DType::Bf16, 0, 64);
    for (offset, expected) in [(8, Access::Aligned), (4, Access::Words), (2, Access::Parts)] {
        let layout = Layout::new(&problem, [matrix; 3], [placed(DType::Bf16, offset, 0)], false, true);
        let plan = plan(&problem, &layout, &Caps::h200()).expect("a plan");
        for Dispatch { key, .. } in dispatches(&plan) {
            let is_reduction = key.program == Program::ReducePartials;
            assert_eq!(key.access, if is_reduction { expected } else { Access::Aligned });
            assert_eq!(key.aliased, is_reduction);
        }
    }
}

#[test]
fn a_copy_takes_what_both_ends_have() {
    let of = |from, to, len| Access::of_copy(from, to, DType::Bf16, len);
    assert_eq!(of(0, 16, 64), Access::Aligned);
    assert_eq!(of(0, 4, 64), Access::Words);
    assert_eq!(of(6, 0, 64), Access::Parts);
    assert_eq!(of(0, 0, 63), Access::Parts);
    // By two quads, if nothing wider is copied with them.
    assert_eq!((of(0, 8, 64), of(8, 0, 64)), (Access::Words, Access::Words));
    assert_eq!(Access::of_copy(0, 8, DType::F32, 64), Access::Words);
}

/// Preparing a call with contiguous rows compiles the kernels that the call runs.
#[test]
fn the_densest_layout_has_the_access_of_its_gradients() {
    let reduce_access = |call: Call, cols| Layout::dense(&call.problem(64, cols)).reduce_access;
    let call = |tensors| Call::new(Direction::Backward, Norm::Rms, BF16, tensors);
    for (cols, expected) in [(64, Access::Aligned), (66, Access::Words), (63, Access::Parts)] {
        assert_eq!(reduce_access(call(DWEIGHT), cols), expected, "{cols}");
        assert_eq!(reduce_access(call(DWEIGHT_DBIAS), cols), expected, "{cols}");
    }
    // A gradient sum is f32 for every weight dtype.
    for (cols, expected) in [(64, Access::Aligned), (66, Access::Words), (63, Access::Words)] {
        for grad_store in [GradStore::Sum, GradStore::Accumulated] {
            let problem = Problem { grad_store, ..call(DWEIGHT).problem(64, cols) };
            assert_eq!(Layout::dense(&problem).reduce_access, expected, "{cols}");
        }
    }
}

/// Only the program of the second phase depends on the storage of gradients.
#[test]
fn sums_are_made_as_what_is_rounded_is() {
    for caps in DEVICES {
        for call in Plans::calls().into_iter().filter(|call| call.direction == Direction::Backward) {
            let planned = |grad_store| {
                let problem = Problem { grad_store, ..call.problem(529, 264) };
                plan(&problem, &Layout::dense(&problem), &caps).expect("a plan")
            };
            let rounded = planned(GradStore::Rounded);
            for (grad_store, adds_to_gradients) in [(GradStore::Sum, false), (GradStore::Accumulated, true)] {
                let planned = planned(grad_store);
                let places = |plan: &Plan| (plan.workspace, plan.partial_rows, plan.steps.len());
                assert_eq!(places(&planned), places(&rounded), "{call:?}");
                for (sum, rounded) in dispatches(&planned).zip(dispatches(&rounded)) {
                    if sum.key.program == Program::ReducePartials {
                        let call = sum.key.call;
                        assert_eq!((call.gradient, call.dtypes), (DType::F32, DTypes::uniform(DType::F32)));
                        assert_eq!(call.adds_to_gradients, adds_to_gradients);
                        assert_eq!((sum.key.tile, sum.grid), (rounded.key.tile, rounded.grid));
                    } else {
                        assert_eq!(sum, rounded, "{call:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn ranges_have_every_row_once_and_fit_bindings() {
    let short = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    let narrow = Caps { groups_per_dimension: 4, ..Caps::lavapipe() };
    for caps in DEVICES.into_iter().chain([short, narrow]) {
        for call in Plans::calls() {
            for (rows, cols, row_stride) in [
                (1000, 256, 256),
                (1000, 256, 300),
                (300, 264, 4000),
                (70_000, 2, 2),
                (1 << 20, 1, 1),
                (3, 8000, 8000),
                (2_000_000, 1024, 1024),
            ] {
                let problem = call.problem(rows, cols);
                let has_stream = call.direction == Direction::Backward || call.tensors.has(Tensor::Residual);
                let dtypes = [Some(call.dtypes.activation), has_stream.then_some(call.dtypes.residual)];
                let tensors = dtypes.into_iter().flatten().map(|dtype| placed(dtype, 0, row_stride));
                let Ok(plan) = plan(&problem, &Layout::new(&problem, tensors, [], false, false), &caps) else {
                    continue;
                };
                for program in Program::ALL.into_iter().filter(|program| *program != Program::ReducePartials) {
                    let ranges = dispatches(&plan).filter(|dispatch| dispatch.key.program == program);
                    let mut next = 0;
                    for Dispatch { rows, .. } in ranges {
                        assert_eq!(rows.start, next);
                        assert!(rows.start < rows.end);
                        next = rows.end;
                        let count = rows.end - rows.start;
                        let widest = call.dtypes.activation.size().max(call.dtypes.residual.size()) as u64;
                        let used = if has_stream { widest } else { call.dtypes.activation.size() as u64 };
                        // The binding begins at most one alignment before the first row.
                        let bytes = ((count - 1) * row_stride + cols as u64) * used + u64::from(caps.offset_alignment);
                        assert!(bytes <= caps.binding_bytes.min(i32::MAX as u64), "{rows:?} {call:?}");
                    }
                    assert!(next == 0 || next == rows as u64, "{program:?} {rows}x{cols} {call:?}");
                }
            }
        }
    }
}

/// A range fits a binding wherever it begins and ends within a group, and one more group would not
/// fit: the limit follows from the group stride, not from the widest gap between rows.
#[test]
fn ranges_of_rows_in_groups_fit_bindings() {
    let short = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    for caps in [short, Caps::lavapipe(), Caps::h200()] {
        for call in Plans::calls() {
            for (rows, cols, rows_per_group, row_stride, group_stride) in [
                (1000, 64, 8, 64, 3 * 8 * 64),
                (1000, 64, 3, 80, 5000),
                (1000, 256, 100, 260, 100 * 260 + 7),
                (70_000, 2, 2, 4, 100),
                (2_000_000, 128, 32, 128, 3 * 32 * 128),
                (9, 2000, 4, 2000, 9000),
            ] {
                let problem = Problem { rows_per_group: Some(rows_per_group), ..call.problem(rows, cols) };
                let has_stream = call.direction == Direction::Backward || call.tensors.has(Tensor::Residual);
                let dtypes = [Some(call.dtypes.activation), has_stream.then_some(call.dtypes.residual)];
                let place = |dtype: DType| Placed {
                    storage: dtype.into(),
                    offset: 0,
                    row_stride: row_stride as u64,
                    group_stride,
                };
                let tensors = dtypes.into_iter().flatten().map(place);
                let Ok(plan) = plan(&problem, &Layout::new(&problem, tensors, [], false, false), &caps) else {
                    continue;
                };
                let widest = call.dtypes.activation.size().max(call.dtypes.residual.size()) as u64;
                let used = if has_stream { widest } else { call.dtypes.activation.size() as u64 };
                let groups = RowGroups { rows: rows_per_group, stride: group_stride as usize };
                let there = Rows::grouped((), row_stride, groups).layout(rows, cols);
                for program in Program::ALL.into_iter().filter(|program| *program != Program::ReducePartials) {
                    let mut next = 0;
                    for Dispatch { rows, .. } in dispatches(&plan).filter(|dispatch| dispatch.key.program == program) {
                        assert!(rows.start == next && rows.start < rows.end);
                        next = rows.end;
                        let reach = there.start(rows.end as usize - 1) - there.start(rows.start as usize) + cols;
                        let bytes = reach as u64 * used + u64::from(caps.offset_alignment);
                        assert!(bytes <= caps.binding_bytes.min(i32::MAX as u64), "{rows:?} {call:?}");
                    }
                    assert!(next == 0 || next == rows as u64, "{program:?} {rows}x{cols} {call:?}");
                }
            }
        }
    }
    // A binding of 64 KiB has 20 or 21 whole groups. Limited by the widest gap it would have about
    // 30 rows.
    let call = Call::new(Direction::Forward, Norm::Rms, BF16, NONE);
    let problem = Problem { rows_per_group: Some(8), ..call.problem(10_000, 64) };
    let x = Placed { row_stride: 64, group_stride: 3 * 8 * 64, ..placed(DType::Bf16, 0, 64) };
    let plan = plan(&problem, &Layout::new(&problem, [x, x], [], false, false), &short).expect("a plan");
    let longest = dispatches(&plan).map(|dispatch| dispatch.rows.end - dispatch.rows.start).max();
    assert!(longest.is_some_and(|rows| (140..=169).contains(&rows)), "{longest:?}");
}

/// The group stride counts like the row stride.
#[test]
fn groups_have_a_part_in_access() {
    let problem =
        Problem { rows_per_group: Some(2), ..Call::new(Direction::Forward, Norm::Rms, BF16, NONE).problem(5, 64) };
    for (group_stride, expected) in [(192, Access::Aligned), (196, Access::Words), (193, Access::Parts)] {
        let x = Placed { group_stride, ..placed(DType::Bf16, 0, 64) };
        assert_eq!(Layout::new(&problem, [x], [], false, false).access, expected);
    }
}

/// One more row, or one more f32 of a statistic, gives two ranges.
#[test]
fn a_range_has_all_rows_that_fit() {
    let caps = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    let available = caps.available_bytes();
    let ranges = |call: Call, rows: u64, cols: usize, row_stride: u64| {
        let problem = call.problem(rows as usize, cols);
        let tensors = [placed(DType::Bf16, 0, row_stride); 2];
        let plan = plan(&problem, &Layout::new(&problem, tensors, [], false, false), &caps).expect("a plan");
        dispatches(&plan).filter(|dispatch| dispatch.key.program != Program::ReducePartials).count()
    };
    let call = Call::new(Direction::Forward, Norm::Rms, BF16, NONE);
    for (cols, row_stride) in [(1000, 1000), (1000, 1001), (1000, 3000), (7, 8), (300, 301)] {
        let most = (available - 2 * cols as u64) / (2 * row_stride) + 1;
        assert_eq!([most, most + 1].map(|rows| ranges(call, rows, cols, row_stride)), [1, 2], "{cols} {row_stride}");
    }
    // Rows of two bytes, with four of rstd.
    assert_eq!([available / 4, available / 4 + 1].map(|rows| ranges(call, rows, 1, 1)), [1, 2]);
    // Sixteen workgroups of eight rows.
    let narrow = Caps { groups_per_dimension: 4, ..Caps::h200() };
    let texts = [128, 129].map(|rows| call.plan(rows, 512, &narrow).to_string());
    let forward = "forward threads=16 packs=4x8 rows=8 subgroups=32";
    assert_eq!(texts, [format!("{forward} grid=4x4"), format!("{forward} grid=3x3; {forward} grid=4x2")]);
}

/// Widely spaced rows take so many ranges that these do not share partial rows: the chain of
/// additions would be too long.
#[test]
fn ranges_of_rows_far_apart_have_partial_rows_of_their_own() {
    let caps = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    let problem = Call::new(Direction::Backward, Norm::Layer, F32, DWEIGHT_DBIAS).problem(200, 64);
    let layout = Layout::new(&problem, [placed(DType::F32, 0, 50 * 64)], [], false, false);
    let plan = plan(&problem, &layout, &caps).expect("a plan");
    let main: Vec<_> = dispatches(&plan).filter(|dispatch| dispatch.chunks > 0).collect();
    assert_eq!((main.len(), plan.partial_rows), (34, 12), "{plan:?}");
    for (index, dispatch) in main.into_iter().enumerate() {
        let first_chunk = if index % 2 == 0 { 0 } else { 6 };
        assert_eq!(
            (dispatch.first_chunk, dispatch.chunks, dispatch.accumulates),
            (first_chunk, 6, index >= 2),
            "{index}"
        );
    }
}

#[test]
fn few_calls_are_split() {
    // 2 GiB minus a row: the H200 binds them at once.
    let call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
    let count = |rows, caps| dispatches(&call.plan(rows, 4096, &caps)).count();
    assert_eq!(count((1 << 18) - 1, Caps::h200()), 1);
    assert_eq!(count(1 << 18, Caps::h200()), 2);
    assert_eq!(count(1 << 14, Caps::laptop()), 2);
    assert_eq!(count((1 << 14) - 1, Caps::laptop()), 1);
}

#[test]
fn indexes_fit_32_bits() {
    // Exceeds every index: a device that binds 64 GiB at once.
    let huge = Caps { binding_bytes: 64 << 30, ..Caps::h200() };
    for caps in DEVICES.into_iter().chain([huge]) {
        for call in Plans::calls() {
            for (rows, cols) in [(1 << 33, 1), (1 << 31, 3), (1 << 24, 256), (1 << 20, 4096), (9, 1 << 28)] {
                let layout = call.layout(rows, cols, Access::Parts);
                let Ok(plan) = plan(&call.problem(rows, cols), &layout, &caps) else { continue };
                for dispatch in dispatches(&plan) {
                    let (tile, rows) = (dispatch.key.tile, dispatch.rows.end - dispatch.rows.start);
                    // Elements, with the maximum shift of the first; rows of the last step;
                    // workgroups.
                    assert!(rows * cols as u64 + 256 <= i32::MAX as u64, "{dispatch:?}");
                    let surplus = u64::from(dispatch.chunks.max(65_535)) * u64::from(tile.groups);
                    assert!(rows + surplus <= u32::MAX.into(), "{dispatch:?}");
                }
                assert!(plan.workspace.len <= i32::MAX as u64);
            }
        }
    }
}

#[test]
fn rows_longer_than_a_binding_are_refused_by_rule() {
    let caps = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    let call = Call::new(Direction::Forward, Norm::Rms, BF16, WEIGHT);
    let planned = |cols| plan(&call.problem(1, cols), &call.layout(1, cols, Access::Aligned), &caps);
    assert!(planned(32_760).is_ok());
    let unfit = planned(32_768).expect_err("a row of 64 KiB");
    assert_eq!(unfit, PlanError::Row { bytes: 65_536, most: 65_520 });
    let text = unfit.to_string();
    assert!(text.contains("at most 65520 bytes, got 65536"), "{text}");
    // The widest tensor of the call counts: a weight of f32, but not an absent one.
    let mixed = |tensors| {
        let call = Call::new(Direction::Forward, Norm::Rms, BF16.widened(true, false), tensors);
        plan(&call.problem(1, 20_000), &call.layout(1, 20_000, Access::Aligned), &caps)
    };
    assert_eq!(mixed(WEIGHT), Err(PlanError::Row { bytes: 80_000, most: 65_520 }));
    assert!(mixed(NONE).is_ok());
    // Two f32 gradients of bf16 rows.
    let backward = Call::new(Direction::Backward, Norm::Layer, BF16, DWEIGHT_DBIAS);
    let planned = plan(&backward.problem(2, 16_384), &backward.layout(2, 16_384, Access::Aligned), &caps);
    let unfit = planned.expect_err("a partial row of 128 KiB");
    assert!(matches!(unfit, PlanError::Workspace { bytes: 131_072, .. }), "{unfit}");
}

#[test]
fn sums_too_long_for_the_partial_rows_are_refused_by_rule() {
    let caps = Caps { binding_bytes: 64 << 10, ..Caps::lavapipe() };
    let call = Call::new(Direction::Backward, Norm::Rms, BF16, DWEIGHT);
    let planned = plan(&call.problem(1000, 4096), &call.layout(1000, 4096, Access::Aligned), &caps);
    let unfit = planned.expect_err("three partial rows for 1000");
    assert!(matches!(unfit, PlanError::Partials { rows: 1000, most: 128, .. }), "{unfit}");
}
