//! The longest chain of additions, as the programs add (math.md, section 4).
//!
//! Additions of zeros are exact and do not count: the first of a sum, and missing columns or rows.
//! So no chain is longer than the number of terms minus one.

use std::collections::BTreeMap;

use rmsnorm_gpu::chain::{serial, shared, tree};
use rmsnorm_spec::depth::policy_depth_rows;

use super::super::MOST_PACKS;
use super::super::backward::most_additions;
use super::*;

/// `sum_threads` of `reduce_workgroup.wgsl` and `reduce_subgroup.wgsl`.
fn exchange(tile: &Tile) -> u64 {
    let threads = u64::from(tile.threads_per_row);
    match tile.reduction {
        Reduction::Workgroup => {
            let segment = u64::from(tile.segment()).min(threads);
            serial(segment) + serial(threads / segment)
        }
        Reduction::Subgroup(lanes) => {
            let lanes = u64::from(lanes);
            let senders = threads.div_ceil(lanes);
            let over_senders = if tile.shuffles_twice(lanes as u32) { tree(senders) } else { serial(senders) };
            tree(threads.min(lanes)) + over_senders
        }
    }
}

/// The longest chain in a sum over a row; `None` if the program has no such sum. A pair is
/// `total(lo + hi)`, a tree of its eight terms; a thread adds its pairs sequentially.
pub(super) fn of_row(key: &KernelKey, cols: usize) -> Option<u64> {
    // Within a thread, sequentially: pairs of a block, then blocks.
    let packs = match key.program {
        Program::Forward | Program::QuantizedForward | Program::Backward => u64::from(key.tile.packs),
        Program::ForwardStreaming | Program::QuantizedForwardStreaming | Program::BackwardRowSums => {
            let pairs = cols.div_ceil(Tile { packs: 1, ..key.tile }.columns()) as u64;
            let block = (1 << pairs.ilog2().div_ceil(2)).max(MOST_PACKS.into());
            pairs.min(block) + serial(pairs.div_ceil(block))
        }
        Program::BackwardColumns
        | Program::ReducePartials
        | Program::TransposeCodes
        | Program::Columnwise
        | Program::TensorScale
        | Program::Clear
        | Program::Copy => return None,
    };
    // In one pass the error is that of this many additions: math.md, section 9.
    let of_thread = if key.visits_once { 4 * packs + 8 } else { serial(packs) };
    Some((tree(8) + of_thread + exchange(&key.tile)).min(serial(cols as u64)))
}

/// The longest chain in `dweight` and `dbias` with `GradReduction::Partials`: within a chunk, over
/// the ranges that share its partial row, and in the second phase.
pub(super) fn of_gradients(plan: &Plan, rows: usize) -> u64 {
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
            Program::Forward
            | Program::ForwardStreaming
            | Program::QuantizedForward
            | Program::QuantizedForwardStreaming
            | Program::BackwardRowSums
            | Program::TransposeCodes
            | Program::Columnwise
            | Program::TensorScale
            | Program::Clear
            | Program::Copy => {}
        }
    }
    (partial_rows.into_values().max().unwrap_or(0) + second_stage).min(serial(rows as u64))
}

#[test]
fn the_plan_knows_the_policy() {
    for rows in (0..5000).chain([1 << 20, (1 << 33) + 1, 3_000_000]) {
        assert_eq!(most_additions(rows as u64), policy_depth_rows(rows) as u64, "{rows} rows");
    }
}

#[test]
fn chains_are_counted_as_the_programs_add() {
    let tile = Tile::new(256, 1, 4, Reduction::Workgroup);
    let key = |program, tile| KernelKey {
        tile,
        program,
        ..dispatches(&Plans::calls()[0].plan(1, 1, &Caps::phone())).next().expect("a kernel").key
    };
    // 3 within a pair, 3 of pairs, 15 of a segment, 15 of segments.
    assert_eq!(of_row(&key(Program::Forward, tile), 8192), Some(36));
    // 31 of a segment and 31 of segments.
    assert_eq!(of_row(&key(Program::Forward, Tile { threads_per_row: 1024, ..tile }), 32768), Some(68));
    // 5 over lanes, 3 over 4 subgroups.
    let subgroups = Tile { threads_per_row: 128, reduction: Reduction::Subgroup(32), ..tile };
    assert_eq!(of_row(&key(Program::Backward, subgroups), 4096), Some(14));
    // 2 iterations, which is one addition, 3 within a pair, and 30 as above.
    assert_eq!(of_row(&key(Program::ForwardStreaming, Tile { packs: 1, ..tile }), 2049), Some(34));
    // Three terms have two additions, wherever they are.
    assert_eq!(of_row(&key(Program::Backward, tile), 3), Some(2));
}
