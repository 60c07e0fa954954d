//! Backward: tiles by the length of a row, chunks of rows, and the workspace between its stages.

use rmsnorm_gpu::reduction;
use rmsnorm_spec::{DTypes, GradReduction, Norm, Problem, Tensor};

use super::{Plan, Program, RESERVED_BYTES, Step, Tile, Workspace, key, pack, threads_for};
use crate::caps::Caps;

/// Threads that share the partial rows of a column at the most.
const MOST_REDUCE_GROUPS: u32 = 128;

/// The plan of a backward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    let pack = pack(problem.dtypes.activation, Some(problem.dtypes.residual));
    match tile(problem, pack, caps) {
        Some(tile) => on_chip(problem, Tile { access_bytes, ..tile }, caps),
        None => streaming(problem, Tile { pack, access_bytes, ..Tile::NONE }, caps),
    }
}

/// The row stays on chip: one kernel, and the second stage.
fn on_chip(problem: &Problem, tile: Tile, caps: &Caps) -> Plan {
    let rows = problem.rows as u64;
    let blocks = u64::from(resident_clusters(&tile, caps)).min(rows.div_ceil((tile.groups * tile.unroll).into()));
    let chunks = reduction::chunks(rows, blocks, most_rows(rows, tile.groups));
    let main = Step::Launch {
        key: key(problem, Program::Backward, tile),
        grid: chunks as u32 * tile.cluster,
        threads: tile.threads(),
        shared_bytes: shared_bytes(problem, &tile) as u32,
    };
    finish(problem, chunks, tile.cluster.into(), [(problem.rows > 0).then_some(main), None])
}

/// The row fits nowhere on chip: its sums first, then its columns, then the second stage.
fn streaming(problem: &Problem, tile: Tile, caps: &Caps) -> Plan {
    let row_tile =
        Tile { packs: 1, threads_per_row: 512, groups: 1, cluster: caps.max_cluster, blocks_per_sm: 2, ..tile };
    let col_tile = Tile { packs: 1, threads_per_row: 256, groups: 1, blocks_per_sm: 3, ..tile };
    let (rows, tiles) =
        (problem.rows as u64, (problem.cols as u64).div_ceil((col_tile.pack * col_tile.threads()).into()));
    // Enough blocks for every multiprocessor to have several, and to even out.
    let blocks = (16 * u64::from(caps.sms)).div_ceil(tiles).min(rows);
    let chunks = reduction::chunks(rows, blocks, most_rows(rows, 1));
    let clusters = problem.rows.min((2 * caps.sms / row_tile.cluster).max(1) as usize);
    let sums = Step::Launch {
        key: key(problem, Program::BackwardRowSums, row_tile),
        grid: clusters as u32 * row_tile.cluster,
        threads: row_tile.threads(),
        shared_bytes: 0,
    };
    let columns = Step::Launch {
        key: key(problem, Program::BackwardColumns, col_tile),
        grid: (tiles * chunks).min(i32::MAX as u64) as u32,
        threads: col_tile.threads(),
        shared_bytes: 0,
    };
    let has_rows = problem.rows > 0;
    let mut plan = finish(problem, chunks, tiles, [has_rows.then_some(sums), has_rows.then_some(columns)]);
    plan.workspace.row_sums = plan.workspace.len.next_multiple_of(4);
    plan.workspace.len = plan.workspace.row_sums + 2 * problem.rows + reduction::ALIGNMENT_SLACK as usize;
    plan
}

/// Adds what follows the main kernels: the second stage of the gradients, and the workspace. `slices` is the number of
/// blocks that share a partial row.
fn finish(problem: &Problem, chunks: u64, slices: u64, main: [Option<Step>; 2]) -> Plan {
    let gradients = problem.tensors.sums_over_rows();
    let partial_rows = match problem.grad_reduction {
        GradReduction::Partials => chunks,
        GradReduction::Locks { groups } => chunks.min(groups.into()),
        GradReduction::Atomics => chunks.min(1),
    };
    let [first, second] = main;
    let mut plan = Plan { chunks, partial_rows, ..Plan::default() };
    if gradients == 0 {
        plan.steps = [first, second, None, None];
        return plan;
    }
    let partials = (partial_rows * reduction::row_stride(problem.cols)) as usize * gradients;
    let (locks, zeroed) = match problem.grad_reduction {
        GradReduction::Partials => (0, 0),
        GradReduction::Locks { .. } => ((partial_rows * slices) as usize, partials + (partial_rows * slices) as usize),
        GradReduction::Atomics => (0, partials),
    };
    let len = partials + locks + reduction::ALIGNMENT_SLACK as usize;
    let zero = (zeroed > 0).then_some(Step::Zero { first: 0, len: zeroed });
    plan.workspace = Workspace { locks: partials, row_sums: 0, len };
    plan.steps = [zero, first, second, Some(second_stage(problem, partial_rows))];
    plan
}

/// The second stage: adds the partial rows.
fn second_stage(problem: &Problem, partial_rows: u64) -> Step {
    let groups = reduction::groups(partial_rows, MOST_REDUCE_GROUPS);
    let tile = Tile { pack: reduction::COLUMNS, packs: 1, threads_per_row: reduction::LANES, groups, ..Tile::NONE };
    let mut key = key(problem, Program::ReducePartials, tile);
    // The sums are f32, whatever they came from, and are added whether or not the row is whole tiles.
    key.tile.is_ragged = true;
    key.tile.has_tail = true;
    let grid = reduction::blocks(problem.cols, problem.tensors.sums_over_rows()) as u32;
    Step::Launch { key, grid, threads: tile.threads(), shared_bytes: 0 }
}

/// Rows of a chunk at the most: of the `2 sqrt(rows) + 64` additions that math.md section 4 allows, what is left when
/// the second stage has had its share.
fn most_rows(rows: u64, groups: u32) -> u64 {
    let root = rows.isqrt();
    (2 * root - root / 64 + 32) * u64::from(groups)
}

/// How threads share a row in packs of `pack` values; `None` if it does not fit the shared memory of a cluster.
///
/// The figures are shares of the copy's 4.2 TB/s, in bf16 on an H200, 2026-11-21.
fn tile(problem: &Problem, pack: u32, caps: &Caps) -> Option<Tile> {
    let packs = problem.cols.div_ceil(pack as usize);
    let tile = |threads_per_row: u32, groups, unroll, blocks_per_sm| Tile {
        pack,
        packs: packs.div_ceil(threads_per_row as usize) as u32,
        threads_per_row,
        groups,
        unroll,
        stages: 3,
        blocks_per_sm,
        ..Tile::NONE
    };
    let overlapped = |tile| Tile { is_overlapped: true, ..tile };
    // Where three steps in shared memory would be more bytes under way than the memory likes.
    let two = |tile| Tile { stages: 2, ..tile };
    let on_cluster = |cluster: u32, threads: u32, blocks_per_sm| {
        let packs = packs.div_ceil((threads * cluster) as usize) as u32;
        (cluster <= caps.max_cluster).then(|| Tile { packs, cluster, ..tile(threads, 1, 1, blocks_per_sm) })
    };
    // Two sums a row and two a column need more registers.
    let is_layer = problem.norm == Norm::Layer || problem.tensors.sums_over_rows() == 2;
    let threads = threads_for(packs);
    let tile = match (packs, is_layer) {
        // 1398080x96: 95 %, 16 threads with one pack 86 %; layer norm 91 and 83 %.
        (9..=12, _) => Some(two(tile(4, 64, 1, 1))),
        // 699008x192: 99 %, 32 threads with one pack 91 %; layer norm 95 and 85 %.
        (17..=24, _) => Some(two(tile(8, 32, 1, 1))),
        // 1048576x128: 98 %, overlapped 94 %; layer norm 97 %.
        (0..=32, false) => Some(tile(threads, 256 / threads, 1, 4)),
        (0..=32, true) => Some(tile(threads, 512 / threads, 2, 1)),
        // 419392x320: 95 %, 64 threads with one pack 81 %; layer norm 95 and 80 %.
        (33..=40, _) => Some(tile(8, 32, 1, 1)),
        // 349504x384: 99 %, overlapped 96 %; layer norm 97 %.
        (41..=48, _) => Some(two(tile(16, 16, 1, 1))),
        // 262144x512: 98 %; layer norm 96 %.
        (49..=64, false) => Some(tile(64, 8, 2, 1)),
        (49..=64, true) => Some(tile(32, 8, 1, 2)),
        // 209664x640: 97 %, 128 threads with one pack 93 %; layer norm 96 and 92 %.
        (65..=80, _) => Some(tile(16, 16, 1, 1)),
        // 174720x768: 99 %, three steps 98 %; layer norm 97 %.
        (81..=96, false) => Some(two(tile(128, 4, 1, 2))),
        (81..=96, true) => Some(two(tile(32, 8, 1, 1))),
        // 131072x1024: 94 to 97 %, overlapped 88 to 95 %; layer norm 97 %, at 896 columns 96 %, 128 threads with one pack
        // 86 %.
        (97..=128, false) => Some(tile(128, 4, 1, 2)),
        (97..=128, true) => Some(tile(64, 8, 1, 1)),
        // 104832x1280: 97 %, 256 threads with one pack 90 %; layer norm 96 and 85 %.
        (129..=160, _) => Some(two(tile(32, 8, 1, 1))),
        // 87360x1536: 98 %; layer norm 96 %.
        (161..=192, false) => Some(two(tile(256, 4, 1, 1))),
        (161..=192, true) => Some(two(tile(64, 4, 1, 1))),
        // 65536x2048: 97 to 100 %, overlapped 96 %; layer norm 98 %, overlapped 97 %.
        (193..=256, false) => Some(tile(256, 4, 1, 1)),
        (193..=256, true) => Some(tile(128, 4, 1, 1)),
        // 52416x2560: 97 %; layer norm 98 %, 128 threads with three packs 84 %, at 3072 columns 95 and 93 %.
        (257..=384, false) => Some(two(tile(128, 2, 1, 2))),
        (257..=320, true) => Some(two(tile(64, 4, 1, 1))),
        (321..=384, true) => Some(two(tile(64, 2, 1, 2))),
        // 32768x4096: 100 %, overlapped 96 %; layer norm 97 %, at 3584 columns 95 %.
        (385..=512, false) => Some(tile(512, 1, 1, 2)),
        (385..=512, true) => Some(tile(128, 2, 1, 1)),
        // 26176x5120: 97 %, 256 threads with three packs 96 %; layer norm 97 %; at 6144 columns 95 and 89 %.
        (513..=768, _) => Some(two(tile(128, 2, 1, 1))),
        // 18688x7168: 96 %; layer norm 90 %.
        (769..=896, false) => Some(tile(512, 1, 1, 1)),
        (769..=896, true) => Some(tile(256, 1, 1, 1)),
        // 16384x8192: 99 %, overlapped 98 %; layer norm 94 %, overlapped 90 %.
        (897..=1024, false) => Some(tile(1024, 1, 1, 1)),
        (897..=1024, true) => Some(tile(512, 1, 1, 1)),
        // 13056x10240: 96 %, on a cluster of two 83 %; layer norm 94 and 79 %. f32 13056x5120: 98 %, of two
        // steps 90 %.
        (1025..=1280, false) => Some(tile(256, 1, 1, 1)),
        (1025..=1280, true) => Some(two(tile(256, 1, 1, 1))),
        // 10880x12288: 93 %, on a cluster of two 90 %; layer norm 87 and 86 %, at 11264 columns 93 and 83 %.
        (1281..=1536, false) => Some(two(tile(256, 1, 1, 1))),
        (1281..=1536, true) => Some(two(tile(512, 1, 1, 1))),
        // 8192x16384: 93 %; layer norm 89 %, overlapped 85 %, without a cluster 83 %.
        (1537..=2048, _) => on_cluster(2, 256, 2).or(Some(tile(512, 1, 1, 1))),
        // 4096x32768: 93 to 95 %, 256 threads 93 %; layer norm 89 %, overlapped 84 %; 6528x20480: 81 and 78 %, of 256 threads 72
        // %.
        (2049..=4096, false) | (2049..=3584, true) => on_cluster(4, 128, 2).map(two),
        (3585..=4096, true) => on_cluster(4, 256, 2).map(two),
        // 2048x65536: 90 to 93 %, 512 threads 89 %; layer norm 89 %, overlapped 83 %; at 40960 columns 76 %, 256 threads 69
        // %.
        (4097..=8192, false) => on_cluster(8, 128, 2),
        (4097..=6144, true) => on_cluster(8, 128, 2).map(two),
        (6145..=8192, true) => on_cluster(8, 256, 2),
        // 1024x131072: 85 to 86 %, 512 threads 85 %, the passes in turn 85 %; layer norm 77 to 81 %.
        (8193..=16384, false) => on_cluster(8, 256, 1).map(overlapped),
        (8193..=16384, true) => on_cluster(8, 512, 1).map(overlapped),
        (_, _) => None,
    };
    fit(problem, tile?, caps)
}

/// Takes stages away, then blocks, until the ring fits the shared memory.
fn fit(problem: &Problem, tile: Tile, caps: &Caps) -> Option<Tile> {
    let fits = |tile: &Tile| {
        let bytes = shared_bytes(problem, tile) + RESERVED_BYTES;
        bytes <= caps.shared_per_block_optin as usize
            && bytes * tile.blocks_per_sm as usize <= caps.shared_per_sm as usize
            && tile.threads() * tile.blocks_per_sm <= caps.threads_per_sm
    };
    let with = |least: u32| {
        let blocks = (1..=tile.blocks_per_sm).rev();
        blocks.flat_map(move |blocks_per_sm| {
            (least..=tile.stages).rev().map(move |stages| Tile { blocks_per_sm, stages, ..tile })
        })
    };
    // A row must be on its way while another is worked on: one stage is the last resort.
    let one = Tile { stages: 1, blocks_per_sm: 1, is_overlapped: false, ..tile };
    with(2).find(fits).or_else(|| Some(one).filter(fits))
}

/// Dynamic shared memory of a block: the ring of rows, or what its groups exchange at the end of a chunk.
fn shared_bytes(problem: &Problem, tile: &Tile) -> usize {
    let DTypes { activation, residual, .. } = problem.dtypes;
    let streams = activation.size() + residual.size() * (1 + usize::from(problem.has(Tensor::DresidualOut)));
    let owned = (tile.pack * tile.packs * tile.threads()) as usize;
    let ring = (tile.stages * tile.unroll) as usize * owned * streams;
    let gradients = problem.tensors.sums_over_rows();
    let width = tile.threads_per_row.max(32);
    let exchange =
        gradients * (tile.pack * tile.packs * (tile.threads() / width / 2) * width) as usize * size_of::<f32>();
    ring.max(exchange)
}

/// Clusters of blocks that run at the same time. Clusters of more than two do not fill a device, since each lies within
/// a part of it: of 132 multiprocessors 30 clusters of four and 15 of eight were seen to run (H200, 2026-11-21).
fn resident_clusters(tile: &Tile, caps: &Caps) -> u32 {
    let blocks = caps.sms * tile.blocks_per_sm;
    let usable = if tile.cluster > 2 { blocks - blocks / 11 } else { blocks };
    (usable / tile.cluster).max(1)
}
