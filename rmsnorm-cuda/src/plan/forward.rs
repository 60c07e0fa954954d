//! Forward: tiles by the length of a row.

use rmsnorm_spec::{Norm, Problem};

use super::{Plan, Program, RESERVED_BYTES, Step, Tile, key, pack, threads_for};
use crate::caps::Caps;

/// The plan of a forward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    if problem.rows == 0 {
        return Plan::default();
    }
    let adds_residual = problem.tensors.adds_residual();
    let stream = adds_residual.then_some(problem.dtypes.residual);
    let pack = pack(problem.dtypes.activation, stream);
    let load = match (problem.norm, adds_residual) {
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
        // 2048x65536: 100 %, 97 % from the L1; with a residual 101 %, 94 % from shared memory.
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
/// What decides is how many bytes a multiprocessor has on their way, which is at its best from 64 to 128 KiB, how many
/// lanes have nothing to do, and what a row costs besides its packs. Between powers of two, threads of three, five, six or
/// seven packs leave fewer lanes idle. The figures are shares of the copy's 4.2 TB/s, in bf16 on an H200, 2026-11-21.
fn tile(packs: usize, load: Load) -> Option<Tile> {
    let (threads_per_row, groups, unroll, blocks_per_sm) = match load {
        Load::Plain => plain(packs),
        Load::Residual => residual(packs),
        Load::Layer => layer(packs),
        Load::LayerResidual => layer_residual(packs),
    }?;
    Some(Tile {
        packs: packs.div_ceil(threads_per_row as usize) as u32,
        threads_per_row,
        groups,
        unroll,
        blocks_per_sm,
        ..Tile::NONE
    })
}

/// Threads of a row, groups of such threads in a block, rows of a group at a time, and blocks of a multiprocessor.
type Division = Option<(u32, u32, u32, u32)>;

fn plain(packs: usize) -> Division {
    let threads = threads_for(packs);
    Some(match packs {
        // 699008x192: 99 %, 32 threads with one pack 84 %; 1398080x96: 99 %, 16 with one pack 85 %.
        9..=12 => (4, 32, 2, 6),
        17..=24 => (8, 32, 1, 6),
        // 1048576x128: 100 %; one row in flight 81 %, four 83 %.
        0..=32 => (threads, 256 / threads, 2, 6),
        // 349504x384: 99.8 %, 64 threads with one pack 82 %.
        33..=48 => (16, 16, 1, 4),
        // 262144x512: 99 %, 64 threads with one pack 94 %.
        49..=64 => (32, 8, 2, 5),
        // 209664x640: 99 %, 32 threads with three packs 97 %; at 576 columns 98 and 88 %.
        65..=80 => (16, 8, 1, 8),
        // 174720x768: 99 %, 64 threads with two packs 92 %.
        81..=96 => (32, 1, 1, 16),
        // 149760x896: 99 %, 64 threads with two packs 96 %.
        97..=112 => (32, 8, 1, 5),
        // 131072x1024: 100 %.
        113..=128 => (64, 1, 1, 16),
        // 104832x1280: 99.7 %, 128 threads with two packs 93 %; at 1152 columns 100 and 88 %.
        129..=176 => (64, 1, 1, 24),
        // 65536x2048: 100 %, four rows a block 96 %.
        177..=256 => (128, 1, 1, 16),
        // 58240x2304: 100 %, eight blocks 95 %.
        257..=288 => (128, 1, 1, 12),
        // 52416x2560: 100 %, 256 threads with two packs 82 %.
        289..=384 => (128, 1, 1, 8),
        // 32768x4096: 100 %, 128 threads with four packs 99 %.
        // 1024x4096: 5.6 us, with 40 registers instead of 32, which is a second wave of blocks, 6.0 us.
        385..=512 => (256, 1, 1, 8),
        // 26176x5120: 99 %; 29120x4608: 98 %, of five blocks 94 %.
        513..=768 => (256, 1, 1, 6),
        // 16384x8192: 99.5 %; 13056x10240: 100 %, 512 threads 95 %.
        769..=1280 => (256, 1, 1, 4),
        // 8192x16384: 99 %, 1024 threads with two packs 72 %.
        1281..=2048 => (512, 1, 1, 3),
        // 4096x32768: 99.5 %. From here on for devices without clusters.
        2049..=4096 => (512, 1, 1, 2),
        // 2048x65536: 97 %.
        4097..=8192 => (1024, 1, 1, 1),
        _ => return None,
    })
}

fn residual(packs: usize) -> Division {
    let threads = threads_for(packs);
    Some(match packs {
        // 699008x192: 99 %, 32 threads with one pack 93 %.
        17..=24 => (8, 32, 1, 5),
        // 1048576x128: 100 %, two rows in flight 99 %.
        0..=32 => (threads, 256 / threads, 1, 5),
        // 349504x384: 101 %; at 320 columns 99 %, 32 threads with two packs 93 %.
        33..=48 => (16, 16, 1, 3),
        // 262144x512: 100 %, 64 threads with one pack 88 %; at 576 columns 101 and 89 %.
        49..=80 => (32, 8, 1, 4),
        // 174720x768: 101 %.
        81..=96 => (64, 1, 1, 8),
        // 131072x1024: 102 %.
        97..=128 => (128, 1, 1, 8),
        // 116480x1152: 100 %, 128 threads with two packs 93 %.
        129..=160 => (32, 8, 1, 3),
        // 65536x2048: 101 %.
        161..=256 => (128, 1, 1, 8),
        // 52416x2560: 101 %, 256 threads with two packs 96 %; at 2304 columns 102 and 91 %.
        257..=320 => (128, 2, 1, 4),
        // 32768x4096: 101 %.
        321..=512 => (256, 1, 1, 4),
        // 26176x5120: 101 %; 18688x7168: 101 %, 512 threads with two packs 95 %.
        513..=1280 => (256, 1, 1, 3),
        // 8192x16384: 101 %.
        1281..=2048 => (512, 1, 1, 2),
        _ => return None,
    })
}

/// Layer norm, whose row is visited three times, has least to do between its sums where few threads have many packs.
fn layer(packs: usize) -> Division {
    let half = threads_for(packs.div_ceil(2));
    Some(match packs {
        // 699008x192: 98 %, 16 threads with two packs 79 %; 1398080x96: 99 and 82 %.
        9..=12 => (4, 32, 2, 6),
        17..=24 => (8, 16, 2, 6),
        // 1048576x128: 98 %.
        0..=32 => (half, 128 / half, 2, 8),
        // 419392x320: 92 %, 16 threads with three packs 85 %.
        33..=40 => (8, 16, 1, 5),
        // 349504x384: 99 %.
        41..=48 => (16, 8, 2, 6),
        // 262144x512: 97 %, 64 threads with one pack 57 %.
        49..=64 => (32, 4, 2, 10),
        // 232960x576: 91 %, 32 threads with three packs 79 %.
        65..=72 => (16, 4, 1, 12),
        // 209664x640: 98 %, 32 threads with three packs 90 %.
        73..=80 => (16, 8, 2, 4),
        // 174720x768: 99 %; 131072x1024: 98 %; 149760x896: 98 %, 64 threads with two packs 90 %.
        81..=128 => (32, 1, 1, 32),
        // 104832x1280: 99 %, 128 threads with two packs 83 %.
        129..=160 => (32, 1, 1, 24),
        // 87360x1536: 99 %. 83840x1600: 99 %, of 16 blocks 92 %, 64 threads with four packs 90 %. 65536x2048: 99 %, 128
        // threads with two packs 88 %.
        161..=256 => (32, 1, 1, 20),
        // 52416x2560: 99 %, of twelve blocks 99 %, but at 2304 columns 97 instead of 99 %.
        257..=384 => (64, 1, 1, 16),
        // 37440x3584: 99 %.
        385..=448 => (64, 1, 1, 12),
        // 32768x4096: 99 %; 26176x5120: 99 %.
        449..=768 => (128, 1, 1, 8),
        // 18688x7168: 99 %.
        769..=896 => (128, 1, 1, 6),
        // 16384x8192: 98 %; 13056x10240: 98.5 %, of three blocks 93 %.
        897..=1280 => (256, 1, 1, 4),
        // 8192x16384: 98 %; 10880x12288: 98 %.
        1281..=2048 => (256, 1, 1, 3),
        _ => return None,
    })
}

fn layer_residual(packs: usize) -> Division {
    let half = threads_for(packs.div_ceil(2));
    Some(match packs {
        // 699008x192: 98 %, 16 threads with two packs 93 %.
        9..=12 => (4, 64, 1, 4),
        17..=24 => (8, 32, 1, 5),
        // 1048576x128: 99 %, two rows in flight 94 %.
        0..=32 => (half, 256 / half, 1, 5),
        // 349504x384: 101 %, 32 threads with two packs 93 %.
        33..=48 => (16, 16, 1, 3),
        // 262144x512: 100 %, 64 threads with one pack 85 %; 174720x768: 100 and 92 %.
        49..=96 => (32, 8, 1, 5),
        // 131072x1024: 100 %.
        97..=128 => (64, 1, 1, 16),
        // 104832x1280: 100 %, 128 threads with two packs 84 %.
        129..=160 => (32, 8, 1, 3),
        // 87360x1536: 100 %, 128 threads with two packs 92 %.
        161..=208 => (64, 4, 1, 4),
        // 65536x2048: 101 %.
        209..=256 => (128, 1, 1, 8),
        // 52416x2560: 99 %.
        257..=320 => (64, 1, 1, 12),
        // 43648x3072: 101 %, 64 threads with six packs 97 %; 32768x4096: 99 %.
        321..=640 => (128, 1, 1, 6),
        // 18688x7168: 100 %, 128 threads with seven packs 95 %.
        641..=1024 => (256, 1, 1, 4),
        // 13056x10240: 101 %.
        1025..=1536 => (256, 1, 1, 3),
        // 8192x16384: 101 %, from shared memory 91 %.
        1537..=2048 => (512, 1, 1, 2),
        _ => return None,
    })
}

/// How threads share a row that lies in shared memory; `None` if it does not fit.
fn long_tile(packs: usize, load: Load, caps: &Caps) -> Option<Tile> {
    use Load::{Layer, LayerResidual, Plain, Residual};
    let tile = |cluster, threads_per_row, blocks_per_sm| one_row(packs, cluster, threads_per_row, blocks_per_sm);
    let tile = match (packs, load) {
        // 4096x32768: layer norm 93 %; RMS norm with a residual, for devices without clusters, 98 %.
        (2049..=4096, Layer) => tile(1, 512, 2),
        (2049..=4096, Residual | LayerResidual) => tile(1, 512, 1),
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
    let residual = if problem.tensors.adds_residual() { problem.dtypes.residual.size() } else { 0 };
    (tile.pack * tile.packs * tile.threads()) as usize * (problem.dtypes.activation.size() + residual)
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
