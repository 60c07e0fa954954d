//! The longest chain of additions, as the programs add, against what the policy allows (math.md, section 4).
//!
//! Additions of zeros are exact and do not count: the first of a sum, and those of columns or rows that are not there.
//! So no chain is longer than the terms less one, however the rest is counted.

use std::collections::BTreeMap;

use rmsnorm_gpu::chain::{serial, shared, tree};
use rmsnorm_spec::depth::{policy_depth_cols, policy_depth_rows};

use super::super::backward::most_additions;
use super::super::{Flavour, KernelKey};
use super::*;

/// `sum_threads` of `reduce_workgroup.wgsl` and `reduce_subgroup.wgsl`.
fn exchange(tile: &Tile) -> u64 {
    let threads = u64::from(tile.threads_per_row);
    match tile.flavour {
        Flavour::Workgroup => {
            let segment = u64::from(tile.segment()).min(threads);
            serial(segment) + serial(threads / segment)
        }
        Flavour::Subgroup(lanes) => {
            let lanes = u64::from(lanes);
            let senders = threads.div_ceil(lanes);
            let over_senders = if tile.shuffles_twice(lanes as u32) { tree(senders) } else { serial(senders) };
            tree(threads.min(lanes)) + over_senders
        }
    }
}

/// The longest chain in a sum over a row; `None` if the program has no such sum. A pair is `total(lo + hi)`, a tree of
/// its eight terms; a thread adds its pairs one after the other.
fn row_chain(key: &KernelKey, cols: usize) -> Option<u64> {
    let packs = match key.program {
        Program::Forward | Program::Backward => u64::from(key.tile.packs),
        Program::ForwardStreaming | Program::BackwardRowSums => {
            cols.div_ceil(Tile { packs: 1, ..key.tile }.columns()) as u64
        }
        Program::BackwardColumns | Program::ReducePartials | Program::Copy => return None,
    };
    Some((tree(8) + serial(packs) + exchange(&key.tile)).min(serial(cols as u64)))
}

/// The longest chain in `dweight` and `dbias` with `GradReduction::Partials`: in every chunk, then over the ranges that
/// share its partial row, then in the second stage.
fn gradient_chain(plan: &Plan, rows: usize) -> u64 {
    let mut partial_rows = BTreeMap::new();
    let mut second_stage = 0;
    for Dispatch { key, rows, first_chunk, chunks, accumulates, .. } in dispatches(plan) {
        match key.program {
            Program::Backward | Program::BackwardColumns => {
                let chunk = shared((rows.end - rows.start).div_ceil((*chunks).into()), key.tile.groups.into());
                let so_far = partial_rows.insert(*first_chunk, 0);
                assert_eq!(so_far.is_some(), *accumulates);
                partial_rows.insert(*first_chunk, so_far.map_or(chunk, |so_far| so_far + 1 + chunk));
            }
            Program::ReducePartials => {
                second_stage = shared(plan.partial_rows.into(), key.tile.groups.into());
            }
            Program::Forward | Program::ForwardStreaming | Program::BackwardRowSums | Program::Copy => {}
        }
    }
    (partial_rows.into_values().max().unwrap_or(0) + second_stage).min(serial(rows as u64))
}

#[test]
fn sums_over_a_row_keep_to_the_policy() {
    let every_size = [8, 16, 32, 64, 128].map(Some);
    // The first for every tile.
    let mut too_long = BTreeMap::new();
    for_all(|device, call, cols| {
        for subgroup in every_size.into_iter().chain([None]) {
            let caps = Caps { subgroup, ..*device };
            for access in ACCESSES {
                for Dispatch { key, .. } in dispatches(&call.plan_by(access, 1, cols, &caps)) {
                    let (Some(got), allowed) = (row_chain(key, cols), policy_depth_cols(cols) as u64) else { continue };
                    if got > allowed {
                        let first = || format!("{cols} cols: {got} additions, allowed {allowed}");
                        too_long.entry(format!("{:?} {:?}", key.program, key.tile)).or_insert_with(first);
                    }
                }
            }
        }
    });
    assert!(too_long.is_empty(), "{too_long:#?}");
}

#[test]
fn sums_over_the_rows_keep_to_the_policy() {
    let around_powers = (0..=33).flat_map(|bits| [1 << bits, (1 << bits) + 1]);
    let many_rows: Vec<usize> = around_powers.chain([300, 1000, 3_000_000]).collect();
    for_all(|caps, call, cols| {
        // Neighbouring lengths have equal tiles, and norms equal sums over the rows.
        let is_sampled = (cols > 300 && cols % 2 == 0 || cols % 60 == 1) && call.norm == Norm::Rms;
        let is_sampled = is_sampled && (call.dtypes == MIXES[0] || call.dtypes == MIXES[1]) && call.gradients() > 0;
        // Matrices of more bindings take so many ranges, each added to the one before, that some of long rows are refused.
        let most_bytes = (16 * caps.binding_bytes).min(1 << 38) as usize;
        let fits = |rows: usize| rows * cols * call.dtypes.activation.size() <= most_bytes;
        for &rows in many_rows.iter().filter(|rows| is_sampled && fits(**rows)) {
            for access in ACCESSES {
                let layout = call.layout(rows, cols, access);
                let plan = plan(&call.problem(rows, cols), &layout, caps);
                let plan = plan.unwrap_or_else(|unfit| panic!("{rows}x{cols} {call:?} {caps:?}: {unfit}"));
                let (got, allowed) = (gradient_chain(&plan, rows), policy_depth_rows(rows) as u64);
                assert!(got <= allowed, "{rows}x{cols}: {got} additions, allowed {allowed}: {call:?}");
            }
        }
    });
}

#[test]
fn the_plan_knows_the_policy() {
    for rows in (0..5000).chain([1 << 20, (1 << 33) + 1, 3_000_000]) {
        assert_eq!(most_additions(rows as u64), policy_depth_rows(rows) as u64, "{rows} rows");
    }
}

#[test]
fn chains_are_counted_as_the_programs_add() {
    let tile = Tile::new(256, 1, 4, Flavour::Workgroup);
    let key = |program, tile| KernelKey {
        tile,
        program,
        ..dispatches(&calls()[0].plan(1, 1, &Caps::phone())).next().expect("a kernel").key
    };
    // 3 within a pair, 3 of pairs, 15 of a segment, 15 of segments.
    assert_eq!(row_chain(&key(Program::Forward, tile), 8192), Some(36));
    // 31 of a segment and 31 of segments.
    assert_eq!(row_chain(&key(Program::Forward, Tile { threads_per_row: 1024, ..tile }), 32768), Some(68));
    // 5 over lanes, 3 over 4 subgroups.
    let subgroups = Tile { threads_per_row: 128, flavour: Flavour::Subgroup(32), ..tile };
    assert_eq!(row_chain(&key(Program::Backward, subgroups), 4096), Some(14));
    // 2 visits, which is one addition, 3 within a pair, and 30 as above.
    assert_eq!(row_chain(&key(Program::ForwardStreaming, Tile { packs: 1, ..tile }), 2049), Some(34));
    // Three terms have two additions, wherever they are.
    assert_eq!(row_chain(&key(Program::Backward, tile), 3), Some(2));
}
