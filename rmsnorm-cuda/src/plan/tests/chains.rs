//! The longest chain of additions, as the kernels add, against what the policy allows (math.md, section 4).
//!
//! Additions of zeros are exact and do not count: the first of a sum, and those of columns or rows that are not there.
//! So no chain is longer than the terms less one, however the rest is counted.

use std::collections::BTreeMap;

use rmsnorm_gpu::chain::{serial, shared, tree};
use rmsnorm_spec::depth::{policy_depth_cols, policy_depth_rows};

use super::super::{Program, TREE_SENDERS};
use super::*;

/// `RowSums` of reduce.cuh: the lanes of a warp, then what the warps of all blocks have sent.
fn exchange(tile: &Tile) -> u64 {
    let senders = u64::from(tile.threads_per_row.div_ceil(32) * tile.cluster);
    let received = if senders <= TREE_SENDERS.into() {
        tree(senders)
    } else {
        serial(senders.div_ceil(32)) + tree(senders.min(32))
    };
    tree(tile.threads_per_row.min(32).into()) + received
}

/// The longest chain in a sum over a row; `None` if the program has no such sum.
fn row_chain(key: &KernelKey, cols: usize) -> Option<u64> {
    let tile = &key.tile;
    let (pack, packs, cols) = (u64::from(tile.pack), u64::from(tile.packs), cols as u64);
    let turns = cols.div_ceil(columns(tile) as u64);
    let thread = match key.program {
        // A sum for each element of a pack; a tree joins them.
        Program::Forward | Program::ForwardCluster | Program::ForwardLong => serial(packs) + tree(pack),
        // A sum for each pack.
        Program::Backward => serial(packs) + serial(pack),
        Program::ForwardStreaming => serial(turns) + tree(pack),
        Program::BackwardRowSums => serial(turns * pack),
        Program::BackwardColumns | Program::ReducePartials => return None,
    };
    Some((thread + exchange(tile)).min(serial(cols)))
}

/// The longest chain in `dweight` and `dbias` with `GradReduction::Partials`.
fn gradient_chain(plan: &Plan, rows: usize) -> u64 {
    let rows = rows as u64;
    let additions = launches(plan).map(|Launch { key: KernelKey { program, tile, .. }, .. }| {
        let groups = u64::from(tile.groups);
        match program {
            Program::Backward | Program::BackwardColumns => shared(rows.div_ceil(plan.chunks), groups),
            Program::ReducePartials => shared(plan.partial_rows, groups),
            Program::Forward
            | Program::ForwardCluster
            | Program::ForwardLong
            | Program::ForwardStreaming
            | Program::BackwardRowSums => 0,
        }
    });
    additions.sum::<u64>().min(serial(rows))
}

#[test]
fn sums_over_a_row_keep_to_the_policy() {
    // The first for every tile.
    let mut too_long = BTreeMap::new();
    for_all(|caps, call, cols| {
        for Launch { key, .. } in launches(&call.plan(1, cols, caps)) {
            let (Some(got), allowed) = (row_chain(&key, cols), policy_depth_cols(cols) as u64) else { continue };
            if got > allowed {
                let tile = Tile { is_ragged: false, ..key.tile };
                let first = || format!("{cols} cols: {got} additions, allowed {allowed}");
                too_long.entry(format!("{:?} {tile:?}", key.program)).or_insert_with(first);
            }
        }
    });
    assert!(too_long.is_empty(), "{too_long:#?}");
}

#[test]
fn sums_over_the_rows_keep_to_the_policy() {
    let around_powers = (0..=33).flat_map(|bits| [(1usize << bits) - 1, 1 << bits, (1 << bits) + 1]);
    let many_rows: Vec<usize> = around_powers.chain([300, 1000, 3_000_000]).filter(|rows| *rows > 0).collect();
    for_all(|caps, call, cols| {
        // Neighbouring lengths have equal tiles.
        let is_sampled = cols > 300 || cols % 30 == 1;
        for &rows in many_rows.iter().filter(|_| call.gradients() > 0 && is_sampled) {
            let (got, allowed) = (gradient_chain(&call.plan(rows, cols, caps), rows), policy_depth_rows(rows) as u64);
            assert!(got <= allowed, "{rows}x{cols}: {got} additions, allowed {allowed}: {call:?}");
        }
    });
}

#[test]
fn chains_are_counted_as_the_kernels_add() {
    let tile = Tile { pack: 8, packs: 4, threads_per_row: 256, ..Tile::NONE };
    let key = |program, tile| KernelKey {
        tile,
        program,
        ..launches(&calls()[0].plan(1, 1, &Caps::t4())).next().expect("a kernel").key
    };
    // 3 additions of packs, 3 within a pack, 5 over lanes, 3 over 8 warps.
    assert_eq!(row_chain(&key(Program::Forward, tile), 8192), Some(14));
    // 3 additions of packs, 7 within a pack, 5 over lanes; 32 warps of 4 blocks: 3 of 32 at a time, 5 over lanes.
    let cluster = Tile { threads_per_row: 1024, cluster: 4, ..tile };
    assert_eq!(row_chain(&key(Program::Backward, cluster), 131072), Some(23));
    // 2 visits, which is one addition, 3 within a pack, and 8 as above.
    assert_eq!(row_chain(&key(Program::ForwardStreaming, Tile { packs: 1, ..tile }), 2049), Some(12));
    // 2 visits of 8 elements: 15, and 8 as above.
    assert_eq!(row_chain(&key(Program::BackwardRowSums, Tile { packs: 1, ..tile }), 2049), Some(23));
    // Three terms have two additions, wherever they are.
    assert_eq!(row_chain(&key(Program::Backward, tile), 3), Some(2));
}
