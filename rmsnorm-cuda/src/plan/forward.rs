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
    let load = match (problem.norm, problem.present.residual) {
        (Norm::Rms, false) => Load::Plain,
        (Norm::Rms, true) => Load::Residual,
        (Norm::Layer, false) => Load::Layer,
        (Norm::Layer, true) => Load::LayerResidual,
    };
    let packs = problem.cols.div_ceil(pack as usize);
    let complete = |tile| Tile { pack, access_bytes, ..tile };
    let long = || long_tile(packs, load, caps).map(complete).filter(|tile| fits(problem, tile, caps));
    // A cluster has one row, and a grid 2^31 - 1 blocks: more than any memory has rows of such a length.
    let is_one_grid = |tile: &Tile| problem.rows <= i32::MAX as usize / tile.cluster as usize;
    let (program, tile) = if let Some(tile) = cluster_tile(packs, load, caps).filter(is_one_grid) {
        (Program::ForwardCluster, complete(tile))
    } else if let Some(tile) = tile(packs, load) {
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
    /// Layer norm with a residual.
    LayerResidual,
}

/// Blocks of that many threads that have one row: a cluster of them, or one alone.
fn one_row(packs: usize, cluster: u32, threads_per_row: u32, blocks_per_sm: u32) -> Tile {
    Tile {
        packs: packs.div_ceil((cluster * threads_per_row) as usize) as u32,
        threads_per_row,
        groups: 1,
        cluster,
        blocks_per_sm,
        ..Tile::NONE
    }
}

/// How threads share a row that a cluster has in its registers; `None` if it is too short to gain by it, or too long.
///
/// The figures are shares of the copy's 4.2 TB/s, in bf16 on an H200, 2026-11-21.
fn cluster_tile(packs: usize, load: Load, caps: &Caps) -> Option<Tile> {
    let tile = |cluster, threads_per_row, blocks_per_sm| one_row(packs, cluster, threads_per_row, blocks_per_sm);
    let tile = match (packs, load) {
        // 4096x32768: 101 %, 100 % from the L1; with a residual 101 %, 98 % from shared memory.
        (2049..=4096, Load::Plain) => tile(2, 128, 3),
        (2049..=4096, Load::Residual) => tile(2, 256, 2),
        // 2048x65536: 100 %, 97 % from the L1; with a residual 102 %, 94 % from shared memory.
        (4097..=8192, Load::Plain) => tile(4, 128, 3),
        (4097..=8192, Load::Residual) => tile(4, 256, 2),
        // 1024x131072: 100 %, 256 threads 91 %, from shared memory 89 %; with a residual 100 %, 128 threads 96 %.
        (8193..=16384, Load::Plain) => tile(8, 128, 3),
        (8193..=16384, Load::Residual) => tile(8, 256, 2),
        // 512x262144, with a residual: 98 %. Without, 77 %, which forward_long betters.
        (16385..=32768, Load::Residual) => tile(8, 512, 1),
        (_, Load::Plain | Load::Residual | Load::Layer | Load::LayerResidual) => return None,
    };
    Some(tile).filter(|tile| tile.cluster <= caps.max_cluster)
}

/// How threads share a row of that many packs; `None` if it is too long for the L1.
///
/// The figures are shares of the copy's 4.2 TB/s, in bf16 on an H200, 2026-11-21.
fn tile(packs: usize, load: Load) -> Option<Tile> {
    use Load::{Layer, LayerResidual, Plain, Residual};
    let tile = |threads_per_row: usize, groups, unroll, blocks_per_sm| Tile {
        packs: packs.div_ceil(threads_per_row) as u32,
        threads_per_row: threads_per_row as u32,
        groups,
        unroll,
        blocks_per_sm,
        ..Tile::NONE
    };
    let (threads, half) = (threads_for(packs) as usize, threads_for(packs.div_ceil(2)) as usize);
    // Between powers of two, threads of three, five, six or seven packs leave fewer of them without work.
    Some(match (packs, load) {
        // 1048576x128: 100 %; one row in flight 81 %, four 83 %.
        (0..=32, Plain) => tile(threads, 256 / threads as u32, 2, 6),
        // 1048576x128: 99 %, layer norm 99 %.
        (0..=32, Residual) => tile(threads, 256 / threads as u32, 2, 3),
        (0..=32, Layer | LayerResidual) => tile(half, 128 / half as u32, 2, 8),
        // 576000x384: 99.8 %, 64 threads with one pack 82 %; with a residual 102 %; layer norm 99 %.
        (33..=48, Plain) => tile(16, 16, 1, 4),
        (33..=48, Residual | LayerResidual) => tile(32, 1, 1, 16),
        (33..=48, Layer) => tile(16, 8, 2, 6),
        // 262144x512: 101 %.
        (49..=64, Plain) => tile(64, 8, 2, 2),
        (49..=64, Residual | Layer | LayerResidual) => tile(64, 4, 1, 4),
        // 262144x768: 99.9 %, 64 threads with two packs 92 %; with a residual 102 %; layer norm 99.5 %.
        (65..=96, Plain) => tile(32, 1, 1, 16),
        (65..=96, Residual | LayerResidual) => tile(64, 1, 1, 8),
        (65..=96, Layer) => tile(32, 1, 1, 32),
        // 32768x1024: 100 %; with a residual 105 %; layer norm 98 %, with 48 registers instead of 32 96 %.
        (97..=128, Plain) => tile(64, 1, 1, 16),
        (97..=128, Residual) => tile(128, 1, 1, 8),
        (97..=128, Layer) => tile(64, 1, 1, 32),
        (97..=128, LayerResidual) => tile(64, 1, 1, 16),
        // 65536x2048: 100 %, four rows a block 96 %; 87360x1536: 101 %, with a residual 102 %, layer norm 99 %.
        (129..=256, Plain) => tile(128, 1, 1, 16),
        (129..=192, Layer) => tile(64, 1, 1, 24),
        (129..=256, Residual | Layer | LayerResidual) => tile(128, 1, 1, 8),
        // 65536x2560: 101 %, 256 threads with two packs 82 %; layer norm 99.8 %, at 3584 columns 99 %.
        (257..=384, Plain) => tile(128, 1, 1, 8),
        (257..=448, Layer | LayerResidual) => tile(64, 1, 1, 12),
        // 32768x4096: 100 %, 128 threads with four packs 99 %; with a residual 102 %; layer norm 99.7 %.
        // 1024x4096: 5.6 us, with 40 registers instead of 32, which is a second wave of blocks, 6.0 us.
        (385..=512, Plain) => tile(256, 1, 1, 8),
        (257..=512, Residual) => tile(256, 1, 1, 4),
        (449..=512, Layer | LayerResidual) => tile(128, 1, 1, 8),
        // 32768x5120: 101 %, with a residual 101 %, layer norm 99.7 %, at 7168 columns 99.5 %.
        (513..=768, Plain) => tile(256, 1, 1, 6),
        (513..=768, Residual) => tile(256, 1, 1, 3),
        (513..=896, Layer | LayerResidual) => tile(128, 1, 1, 6),
        // 16384x8192: 100 %.
        (769..=1024, Plain | Layer | LayerResidual) => tile(256, 1, 1, 4),
        (769..=1024, Residual) => tile(512, 1, 1, 2),
        // 8192x16384: 99.5 %, 1024 threads with two packs 72 %; with a residual 101 %; layer norm 98 %.
        (1025..=2048, Plain) => tile(512, 1, 1, 3),
        (1025..=2048, Residual) => tile(512, 1, 1, 2),
        (1025..=2048, Layer) => tile(256, 1, 1, 3),
        // 4096x32768: 99.5 %. From here on for devices without clusters.
        (2049..=4096, Plain) => tile(512, 1, 1, 2),
        // 2048x65536: 97 %.
        (4097..=8192, Plain) => tile(1024, 1, 1, 1),
        (_, Plain | Residual | Layer | LayerResidual) => return None,
    })
}

/// How threads share a row that lies in shared memory; `None` if it does not fit.
fn long_tile(packs: usize, load: Load, caps: &Caps) -> Option<Tile> {
    use Load::{Layer, LayerResidual, Plain, Residual};
    let tile = |cluster, threads_per_row, blocks_per_sm| one_row(packs, cluster, threads_per_row, blocks_per_sm);
    let tile = match (packs, load) {
        // 4096x32768: layer norm 93 %; RMS norm with a residual, for devices without clusters, 98 %.
        (0..=4096, Layer) => tile(1, 512, 2),
        (0..=4096, Residual | LayerResidual) => tile(1, 512, 1),
        // 2048x65536: layer norm 87 %, with clusters of two 83 %.
        (4097..=8192, Layer) => tile(1, 1024, 1),
        (4097..=8192, LayerResidual) => tile(4, 512, 2),
        // 1024x131072: layer norm 78 %.
        (8193..=16384, Layer) => tile(4, 256, 3),
        (8193..=16384, LayerResidual) => tile(8, 512, 2),
        // 512x262144: 87 %; layer norm 72 %.
        (16385..=32768, Plain) => tile(8, 512, 3),
        (16385..=32768, Layer) => tile(8, 256, 2),
        (16385..=32768, LayerResidual) => tile(8, 512, 2),
        (32769..=65536, Plain | Residual | Layer | LayerResidual) => tile(8, 1024, 1),
        (_, Plain | Residual | Layer | LayerResidual) => return None,
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
