//! Backward: the tile of a row, chunks of rows, and the workspace between its stages.

use rmsnorm_gpu::reduction;
use rmsnorm_gpu::tuning::find;
use rmsnorm_spec::{DTypes, GradReduction, Problem, Tensor};

use super::tuning::{Ladders, Tuning};
use super::{Plan, Program, RESERVED_BYTES, Step, Tile, Workspace, found, key, pack};
use crate::caps::Caps;

/// Threads of a block of `BackwardColumns`, with a pack of columns each.
const COLUMNS_THREADS: u32 = 256;

/// Blocks of `BackwardColumns` for each multiprocessor.
const STREAMING_BLOCKS_PER_SM: u64 = 16;

/// Blocks of a cluster at the most.
const MOST_CLUSTER: u32 = 8;

/// Threads that share the partial rows of a column at the most.
const MOST_REDUCE_GROUPS: u32 = 128;

/// The plan of a backward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    let pack = pack(problem.dtypes.activation, Some(problem.dtypes.residual));
    let Ladders { cluster, block, long: _ } = caps.tuning.ladders(problem, pack);
    let find = |ladder| found(ladder, problem.cols, pack, caps);
    match find(cluster).or_else(|| find(block)).and_then(|tile| fit(problem, tile, caps)) {
        Some(tile) => on_chip(problem, Tile { access_bytes, ..tile }, caps),
        None => streaming(problem, Tile { pack, access_bytes, ..Tile::NONE }, caps),
    }
}

/// Multiprocessors of the largest device that [`workspace_len_bound`] is for. The largest there is has 192 (2026).
const MOST_SMS: u32 = 256;

/// Bytes of shared memory that a block may have on any device, and on any that has clusters.
const LEAST_SHARED: usize = 64 << 10;
const LEAST_SHARED_WITH_CLUSTERS: usize = 99 << 10;

/// At least the workspace of the plan of this problem on any device with up to [`MOST_SMS`] multiprocessors.
pub(super) fn workspace_len_bound(problem: &Problem) -> usize {
    let pack = pack(problem.dtypes.activation, Some(problem.dtypes.residual));
    let Ladders { cluster, block, long: _ } = Tuning::H200.ladders(problem, pack);
    let packs = problem.cols.div_ceil(pack as usize);
    let rows = problem.rows as u64;
    // Each table's tile, and the shared memory of the least device that may take it.
    let tiles = [(cluster, LEAST_SHARED_WITH_CLUSTERS), (block, LEAST_SHARED)]
        .map(|(ladder, shared)| (find(ladder, packs).map(|tile| Tile { pack, ..tile }), shared));
    let packs_of = |tile: &Tile| packs.div_ceil((tile.cluster * tile.threads_per_row) as usize) as u32;
    let fits = |(tile, shared): &(Option<Tile>, usize)| {
        let one = |tile: Tile| Tile { packs: packs_of(&tile), stages: 1, ..tile };
        tile.is_none_or(|tile| shared_bytes(problem, &one(tile)) + RESERVED_BYTES <= *shared)
    };
    let is_on_chip = tiles[1].0.is_some() && tiles.iter().all(fits);
    // Blocks that share the rows, if all multiprocessors have as many as they may: by those tiles, and by the kernels for rows
    // that fit nowhere.
    let column_tiles = (problem.cols as u64).div_ceil((pack * COLUMNS_THREADS).into());
    let streaming = (STREAMING_BLOCKS_PER_SM * u64::from(MOST_SMS)).div_ceil(column_tiles);
    let on_chip = tiles.into_iter().filter_map(|(tile, _)| tile);
    let on_chip = on_chip.map(|tile| u64::from(MOST_SMS * tile.blocks_per_sm / tile.cluster).max(1));
    let blocks = on_chip.fold(if is_on_chip { 0 } else { streaming }, u64::max).min(rows);
    // Whole rounds of blocks are at most one round more than the rows ask for.
    let chunks = blocks + rows / most_rows(rows, 1).max(1);
    let slices = column_tiles.max(u64::from(MOST_CLUSTER));
    let plan = finish(problem, chunks, slices, [None; 2]);
    let row_sums = if is_on_chip { 0 } else { 2 * problem.rows + reduction::ALIGNMENT_SLACK as usize };
    plan.workspace.len.next_multiple_of(4) + row_sums
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
    let col_tile = Tile { packs: 1, threads_per_row: COLUMNS_THREADS, groups: 1, blocks_per_sm: 3, ..tile };
    let (rows, tiles) =
        (problem.rows as u64, (problem.cols as u64).div_ceil((col_tile.pack * col_tile.threads()).into()));
    // Enough blocks for every multiprocessor to have several, and to even out.
    let blocks = (STREAMING_BLOCKS_PER_SM * u64::from(caps.sms)).div_ceil(tiles).min(rows);
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
    if has_rows {
        plan.workspace.row_sums = plan.workspace.len.next_multiple_of(4);
        plan.workspace.len = plan.workspace.row_sums + 2 * problem.rows + reduction::ALIGNMENT_SLACK as usize;
    }
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
    let zero = (zeroed > 0).then_some(Step::Zero { tensor: Tensor::Workspace, bytes: zeroed * size_of::<f32>() });
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
