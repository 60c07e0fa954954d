//! Plans of forward: the tile of a row, or streaming.

use rmsnorm_spec::{CastOrder, DTypes, Norm, Problem, Slot, Storage};

use super::tuning::{LONG_WITHOUT_CLUSTERS, Ladders};
use super::{
    Plan, Program, REGISTERS_PER_SM, RESERVED_BYTES, Reads, Step, Tile, found, inputs_of, key, pack, reads_more,
};
use crate::caps::Caps;

/// The plan of a forward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    if problem.rows == 0 {
        return Plan::default();
    }
    let pack = pack(problem);
    let Ladders { cluster, block, long } = caps.tuning.ladders(problem, pack);
    let find = |ladder| found(ladder, problem.cols, pack, caps);
    // A cluster has one row, and a grid at most 2^31 - 1 blocks. A matrix with more rows of this
    // length does not fit memory.
    let is_one_grid = |tile: &Tile| problem.rows <= i32::MAX as usize / tile.cluster as usize;
    let (program, tile) = if let Some(tile) = find(cluster).filter(is_one_grid) {
        (Program::ForwardCluster, tile)
    } else if let Some(tile) = weighed(problem, pack, caps).or_else(|| find(block)) {
        (Program::Forward, gated(problem, held(problem, tile, caps)))
    } else if let Some(tile) = find(long)
        .or_else(|| find(&LONG_WITHOUT_CLUSTERS).filter(|_| !reads_more(problem)))
        .filter(|tile| fits(problem, tile, caps))
    {
        (Program::ForwardLong, tile)
    } else {
        (Program::ForwardStreaming, Tile { pack, ..streaming_tile(caps) })
    };
    let tile = if problem.parts > 1 { with_registers_for_parts(program, problem.norm, tile) } else { tile };
    let tile = Tile { access_bytes, ..tile };
    let grid = if program == Program::ForwardStreaming {
        problem.rows.min((caps.sms / tile.cluster).max(1) as usize) as u32 * tile.cluster
    } else {
        blocks(problem, &tile)
    };
    let shared_bytes = if program == Program::ForwardLong { shared_bytes(problem, &tile) as u32 } else { 0 };
    let launch = Step::launch(key(problem, program, tile), grid, shared_bytes);
    Plan { steps: [Some(launch), None, None, None], ..Plan::default() }
}

/// The tile of RMS norm with the weight before it, if it differs from that of a residual: the tile of a
/// row alone, with as many blocks as leave registers for h, if two or more do. A third more threads
/// share a row of four packs a thread, without which 3072 columns take 39.1 us. On an H200, RMS norm
/// of 64 MiB of bf16, in us:
///
/// | columns | tile of a row alone | of a residual | this tile |
/// |---|---|---|---|
/// | 1024 | 38.6 | 39.1 | 34.9 |
/// | 3072 | 35.9 | 41.1 | 33.9 |
/// | 6144 | 90.4 | 39.2 | 35.6 |
/// | 8192 | 35.2 | 37.2 | 33.4 |
/// | 11008 | 41.7 | 38.9 | 33.4 |
fn weighed(problem: &Problem, pack: u32, caps: &Caps) -> Option<Tile> {
    // Tiles with several rows at a time lost. Layer norm was not measured.
    if !problem.cast_order.is_weight_first() || problem.norm == Norm::Layer {
        return None;
    }
    let alone = Problem { cast_order: CastOrder::AtStore, ..*problem };
    let tile = found(&caps.tuning.ladders(&alone, pack).block, problem.cols, pack, caps)?;
    let is_shared = tile.packs == 4 && tile.threads_per_row.is_multiple_of(96);
    let tile = if is_shared { Tile { threads_per_row: tile.threads_per_row / 3 * 4, packs: 3, ..tile } } else { tile };
    with_most_blocks(tile, 2, |tile| tile.unroll == 1 && tile.holds_gated(problem.norm))
}

/// The tile with the most blocks per multiprocessor, at least `least`, that leave enough registers. The
/// threads of a row, and so its bits, do not change.
fn with_most_blocks(tile: Tile, least: u32, holds: impl Fn(&Tile) -> bool) -> Option<Tile> {
    (least..=tile.blocks_per_sm).rev().map(|blocks_per_sm| Tile { blocks_per_sm, ..tile }).find(holds)
}

/// The blocks of a kernel whose rows are not streamed. A grid has at most 2^31 - 1 blocks, which loop
/// over further rows.
pub(super) fn blocks(problem: &Problem, tile: &Tile) -> u32 {
    let clusters = problem.rows.div_ceil((tile.groups * tile.unroll) as usize);
    clusters.min(i32::MAX as usize / tile.cluster as usize) as u32 * tile.cluster
}

/// The most packs in flight of a thread that are kept in registers whatever the number of rows.
pub(super) const MOST_KEPT: u32 = 3;

/// A tile that keeps its rows in registers, where that is faster than to read them again: with few packs
/// if registers suffice, and with half the blocks per multiprocessor if these handle all rows at once.
/// The threads of a row, and so its bits, do not change. On an H200, RMS norm of bf16 with all blocks,
/// in us:
///
/// | rows x columns | packs in flight | read again | kept |
/// |---|---|---|---|
/// | 10922x384 | 3 | 5.99 | 5.81 |
/// | 4096x1024 | 2 | 5.71 | 5.46 |
/// | 32768x1024 | 2 | 33.4 | 33.2 |
/// | 410x10240 | 6 | 5.84 | 6.68 |
/// | 4681x896 | 14 | 6.07 | 6.33 |
fn held(problem: &Problem, tile: Tile, caps: &Caps) -> Tile {
    if !caps.tuning.keeps_rows || reads_more(problem) {
        return tile;
    }
    let kept = |blocks_per_sm| Tile { blocks_per_sm, reads: Reads { keeps_row: true, ..tile.reads }, ..tile };
    let (all, half) = (kept(tile.blocks_per_sm), kept(tile.blocks_per_sm / 2));
    let rows_at_once = caps.sms * half.blocks_per_sm * tile.groups * tile.unroll;
    if tile.packs * tile.unroll <= MOST_KEPT && all.holds_rows(problem.norm, 1) {
        all
    } else if problem.rows <= rows_at_once as usize && half.holds_rows(problem.norm, 1) {
        half
    } else {
        tile
    }
}

/// A tile of a call with a gate: two rows at a time if what waits for the norm is short, and 64
/// registers for a thread with many packs. With a gate before the norm a row of f32 waits in them, of
/// which more than three packs are shared by twice the threads. On an H200, RMS norm of 64 MiB of
/// bf16, in us:
///
/// | columns | gate after, tile of a residual | this tile | gate before, tile of a residual | this tile |
/// |---|---|---|---|---|
/// | 128 | 53.8 | 49.2 | 50.1 | 50.1 |
/// | 256 | 54.0 | 49.4 | 50.2 | 50.2 |
/// | 4096 | 54.3 | 50.1 | 48.3 | 48.3 |
/// | 8192 | 52.0 | 51.0 | 53.3 | 50.4 |
fn gated(problem: &Problem, tile: Tile) -> Tile {
    let with_registers = |tile: Tile| {
        let most = REGISTERS_PER_SM / (64 * tile.threads());
        Tile { blocks_per_sm: tile.blocks_per_sm.min(most).max(1), ..tile }
    };
    match problem.gate.map(|gate| gate.slot) {
        None => tile,
        Some(Slot::After) if tile.packs <= 2 => Tile { unroll: tile.unroll.max(2), ..tile },
        Some(Slot::Before) if tile.packs > 3 && 2 * tile.threads() <= 1024 => {
            with_registers(Tile { threads_per_row: 2 * tile.threads_per_row, packs: tile.packs.div_ceil(2), ..tile })
        }
        Some(Slot::After | Slot::Before) if tile.packs <= 2 => tile,
        Some(Slot::After | Slot::Before) => with_registers(tile),
    }
}

/// The tile with registers for the sums of several parts, or with one block.
fn with_registers_for_parts(program: Program, norm: Norm, tile: Tile) -> Tile {
    let tile = Tile { unroll: 1, ..tile };
    let held = with_most_blocks(tile, 1, |tile| tile.holds_parts(program, norm));
    held.unwrap_or(Tile { blocks_per_sm: 1, ..tile })
}

/// Whether the row of a block fits its shared memory.
fn fits(problem: &Problem, tile: &Tile, caps: &Caps) -> bool {
    shared_bytes(problem, tile) + RESERVED_BYTES <= caps.shared_per_block_optin as usize
}

/// Dynamic shared memory of a block of `forward_long`: its part of the matrices that the call reads,
/// or of the sum of several parts.
fn shared_bytes(problem: &Problem, tile: &Tile) -> usize {
    let DTypes { activation, residual, .. } = problem.dtypes;
    let inputs = inputs_of(problem).iter().filter_map(|tensor| problem.storage(tensor)).map(Storage::size);
    let of_x = if problem.tensors.is_cast() { residual } else { activation }.size();
    let bytes = if problem.parts > 1 { residual.size() } else { of_x + inputs.sum::<usize>() };
    (tile.pack * tile.packs * tile.threads()) as usize * bytes
}

/// The tile of blocks that visit a row several times.
pub(super) fn streaming_tile(caps: &Caps) -> Tile {
    Tile {
        packs: 1,
        threads_per_row: 1024,
        groups: 1,
        cluster: caps.max_cluster,
        unroll: 1,
        blocks_per_sm: 1,
        ..Tile::NONE
    }
}
