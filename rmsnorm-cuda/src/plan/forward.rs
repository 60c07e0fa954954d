//! Forward: tiles by the length of a row.

use rmsnorm_spec::{Norm, Problem};

use super::{Plan, Program, RESERVED_BYTES, Step, Tile, key, pack, threads_for};
use crate::caps::Caps;

/// The plan of a forward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    if problem.rows == 0 {
        return Plan::default();
    }
    let stream = problem.present.residual.then_some(problem.residual);
    let pack = pack(problem.activation, stream);
    let load = match problem.norm {
        Norm::Layer => Load::Layer,
        Norm::Rms if problem.present.residual => Load::Residual,
        Norm::Rms => Load::Plain,
    };
    let packs = problem.cols.div_ceil(pack as usize);
    let complete = |tile| Tile { pack, access_bytes, ..tile };
    let long_load = if stream.is_some() { Load::Residual } else { load };
    let long = || long_tile(packs, long_load, caps).map(complete).filter(|tile| fits(problem, tile, caps));
    let (program, tile) = if let Some(tile) = tile(packs, load, stream.is_some()) {
        (Program::Forward, complete(tile))
    } else if let Some(tile) = long() {
        (Program::ForwardLong, tile)
    } else {
        (Program::ForwardStreaming, complete(streaming_tile(caps)))
    };
    let blocks = if program == Program::ForwardStreaming {
        problem.rows.min((caps.sms / tile.cluster).max(1) as usize)
    } else {
        problem.rows.div_ceil((tile.groups * tile.unroll) as usize)
    };
    // A grid has at most 2^31 - 1 blocks; they go on to further rows.
    let grid = blocks.min(i32::MAX as usize / tile.cluster as usize) as u32 * tile.cluster;
    let shared_bytes = if program == Program::ForwardLong { shared_bytes(problem, &tile) as u32 } else { 0 };
    let launch = Step::Launch { key: key(problem, program, tile), grid, threads: tile.threads(), shared_bytes };
    Plan { steps: [Some(launch), None, None, None], ..Plan::default() }
}

/// What a row costs in registers besides its packs.
#[derive(Clone, Copy)]
enum Load {
    /// RMS norm.
    Plain,
    /// RMS norm with a residual: two tensors are read.
    Residual,
    /// Layer norm, whose row is visited three times.
    Layer,
}

/// How threads share a row of that many packs; `None` if it is too long for the L1.
///
/// The figures are shares of the copy's 4.2 TB/s, in bf16 on an H200, 2026-11-21.
fn tile(packs: usize, load: Load, has_residual: bool) -> Option<Tile> {
    use Load::{Layer, Plain, Residual};
    let tile = |threads_per_row: usize, groups, unroll, blocks_per_sm| Tile {
        packs: packs.div_ceil(threads_per_row) as u32,
        threads_per_row: threads_per_row as u32,
        groups,
        unroll,
        blocks_per_sm,
        ..Tile::NONE
    };
    let (threads, half) = (threads_for(packs) as usize, threads_for(packs.div_ceil(2)) as usize);
    Some(match (packs, load) {
        // 1048576x128: 100 %; one row in flight 81 %, four 83 %.
        (0..=32, Plain) => tile(threads, 256 / threads as u32, 2, 6),
        // 1048576x128: 99 %, layer norm 99 %.
        (0..=32, Residual) => tile(threads, 256 / threads as u32, 2, 3),
        (0..=32, Layer) => tile(half, 128 / half as u32, 2, 8),
        // 262144x512: 101 %.
        (33..=64, Plain) => tile(64, 8, 2, 2),
        (33..=64, Residual | Layer) => tile(64, 4, 1, 4),
        // 32768x1024: 100 %; with a residual 105 %; layer norm 90 %.
        (65..=128, Plain) => tile(64, 1, 1, 16),
        (65..=128, Residual) => tile(128, 1, 1, 8),
        (65..=128, Layer) => tile(64, 1, 1, 16),
        // 65536x2048: 101 %.
        (129..=256, Plain) => tile(128, 4, 1, 3),
        (129..=256, Residual | Layer) => tile(128, 1, 1, 8),
        // 32768x4096: 100 %, 128 threads with four packs 95 %; with a residual 102 %; layer norm 99.7 %.
        (257..=512, Plain) => tile(256, 1, 1, 6),
        (257..=512, Residual) => tile(256, 1, 1, 4),
        (257..=512, Layer) => tile(128, 1, 1, 8),
        // 16384x8192: 100 %.
        (513..=1024, Plain | Layer) => tile(256, 1, 1, 4),
        (513..=1024, Residual) => tile(512, 1, 1, 2),
        // 8192x16384: 99.5 %, 1024 threads with two packs 72 %; with a residual 101 %; layer norm 98 %.
        (1025..=2048, Plain) => tile(512, 1, 1, 3),
        (1025..=2048, Residual) => tile(512, 1, 1, 2),
        (1025..=2048, Layer) if !has_residual => tile(256, 1, 1, 3),
        // 4096x32768: 99.5 %.
        (2049..=4096, Plain) => tile(512, 1, 1, 2),
        // 2048x65536: 97 %.
        (4097..=8192, Plain) => tile(1024, 1, 1, 1),
        (_, Plain | Residual | Layer) => return None,
    })
}

/// How threads share a row that lies in shared memory; `None` if it does not fit.
fn long_tile(packs: usize, load: Load, caps: &Caps) -> Option<Tile> {
    use Load::{Layer, Plain, Residual};
    let tile = |cluster: u32, threads_per_row: u32, blocks_per_sm| Tile {
        packs: packs.div_ceil((cluster * threads_per_row) as usize) as u32,
        threads_per_row,
        groups: 1,
        cluster,
        blocks_per_sm,
        ..Tile::NONE
    };
    let tile = match (packs, load) {
        // 4096x32768: layer norm 91 %; with a residual 98 %.
        (0..=4096, Plain | Layer) => tile(1, 512, 2),
        (0..=4096, Residual) => tile(1, 512, 1),
        // 2048x65536: layer norm 83 %, with clusters of two 79 %; with a residual 94 %.
        (4097..=8192, Plain | Layer) => tile(1, 1024, 1),
        (4097..=8192, Residual) => tile(4, 512, 2),
        // 1024x131072: 89 %; layer norm 75 %; with a residual 91 %.
        (8193..=16384, Plain) => tile(4, 512, 3),
        (8193..=16384, Layer) => tile(4, 512, 2),
        (8193..=16384, Residual) => tile(8, 512, 2),
        // 512x262144: 88 %; layer norm 70 %.
        (16385..=32768, _) => tile(8, 512, 2),
        (32769..=65536, _) => tile(8, 1024, 1),
        (_, _) => return None,
    };
    Some(tile).filter(|tile| tile.cluster <= caps.max_cluster)
}

/// Whether the row of a block fits its shared memory.
fn fits(problem: &Problem, tile: &Tile, caps: &Caps) -> bool {
    shared_bytes(problem, tile) + RESERVED_BYTES <= caps.shared_per_block_optin as usize
}

/// Dynamic shared memory of a block of `forward_long`: its part of x and of the residual.
fn shared_bytes(problem: &Problem, tile: &Tile) -> usize {
    let residual = if problem.present.residual { problem.residual.size() } else { 0 };
    (tile.pack * tile.packs * tile.threads()) as usize * (problem.activation.size() + residual)
}

/// The blocks that visit a row several times.
fn streaming_tile(caps: &Caps) -> Tile {
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
