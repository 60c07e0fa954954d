//! Plans of backward: the tile of a row, chunks of rows, the workspace, and the reduction of
//! partial sums.

use std::ops::Range;

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_gpu::reduction;
use rmsnorm_gpu::tuning::find;
use rmsnorm_spec::{Direction, GradReduction, Problem, Slot, Storage, Tensor, TensorSet};

use super::tuning::{Ladders, Tuning, block, ring};
use super::{COLUMN_LANES, Plan, Program, RESERVED_BYTES, Step, Tile, Workspace, found, key, pack};
use crate::caps::Caps;

/// Threads of a block of `BackwardColumns`; each has one pack of columns.
const COLUMNS_THREADS: u32 = 256;

/// Blocks of `BackwardColumns` per multiprocessor.
const STREAMING_BLOCKS_PER_SM: u64 = 16;

/// The largest cluster.
const MOST_CLUSTER: u32 = 8;

/// The most bytes of rings of a multiprocessor in a call with a gate. Five matrices with more bytes in
/// flight get in each other's way. On an H200, RMS norm of 64 MiB of bf16, in us:
///
/// | columns | gate after, all that fits | at most this | gate before, all that fits | at most this |
/// |---|---|---|---|---|
/// | 128 | 95.2 | 86.5 | 95.9 | 88.1 |
/// | 256 | 95.0 | 86.1 | 95.7 | 86.6 |
/// | 4096 | 96.1 | 94.6 | 95.2 | 91.6 |
/// | 8192 | 98.0 | 93.8 | 91.4 | 88.6 |
const GATED_RINGS: usize = 112 << 10;

/// Rows of a thread that handles columns; it loads this many at once, or half as many.
const COLUMN_ROWS: u64 = 4;

/// The largest number of rows for which a call is split into blocks of rows and blocks of columns.
pub(super) const MOST_SPLIT_ROWS: u64 = 1024;

/// Bounds of the reduction of partial sums: the most threads per column, the most rows in flight
/// per thread, and the fewest threads per block.
const MOST_REDUCE_GROUPS: u32 = 64;
const MOST_REDUCE_ROWS: u64 = 8;
const LEAST_REDUCE_THREADS: u32 = 128;

/// Rows of partial sums for atomic additions. On an H200, 4096x1024 takes 10.2 us with four rows,
/// 12.6 us with one.
const ATOMIC_ROWS: u64 = 4;

/// The plan of a backward call.
pub(super) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    let pack = pack(problem);
    let Ladders { cluster, block, long: _ } = caps.tuning.ladders(problem, pack);
    let find = |ladder| found(ladder, problem.cols, pack, caps);
    match find(cluster).or_else(|| find(block)).and_then(|tile| fit(problem, tile, caps)) {
        Some(tile) => on_chip(problem, Tile { access_bytes, ..tile }, caps),
        None => streaming(problem, Tile { pack, access_bytes, ..Tile::NONE }, caps),
    }
}

/// Multiprocessors of the largest device that [`workspace_len_bound`] covers. In 2026 the largest
/// device has 192.
const MOST_SMS: u32 = 256;

/// Bytes of shared memory that a block can use on any device, and on any device with clusters.
const LEAST_SHARED: usize = 64 << 10;
const LEAST_SHARED_WITH_CLUSTERS: usize = 99 << 10;

/// The number of blocks (or clusters) with their own rows, on the largest device.
pub(super) fn most_blocks(tile: &Tile) -> u32 {
    (MOST_SMS * tile.blocks_per_sm / tile.cluster).max(1)
}

/// The same for a tile of a loaded table, with rows of `packs` packs: two per multiprocessor; for
/// long rows, as many as make 16 MiB of partial sums.
pub(super) fn most_tuned_blocks(packs: u32) -> u32 {
    (MOST_SMS * 2048 / packs.max(1)).clamp(1, 2 * MOST_SMS)
}

/// The matrices that backward reads, and that its ring holds.
const RING: TensorSet = Direction::Backward.reads().intersection(TensorSet::MATRICES);

/// Packs of a step, with all matrices of any dtype, that fit the shared memory of every device,
/// or of every device with clusters.
pub(super) const fn most_owned_packs(has_clusters: bool) -> u32 {
    let shared = if has_clusters { LEAST_SHARED_WITH_CLUSTERS } else { LEAST_SHARED };
    ((shared - RESERVED_BYTES) / (RING.len() * 16)) as u32
}

/// An upper bound of the workspace of this problem's plan, for any legal table and any device with
/// up to [`MOST_SMS`] multiprocessors.
pub(super) fn workspace_len_bound(problem: &Problem) -> usize {
    let pack = pack(problem);
    let Ladders { cluster, block, long: _ } = Tuning::H200.ladders(problem, pack);
    let packs = problem.cols.div_ceil(pack as usize);
    let rows = problem.rows as u64;
    // Each table's tile, and the smallest shared memory of a device that can use it.
    let tiles = [(cluster, LEAST_SHARED_WITH_CLUSTERS), (block, LEAST_SHARED)]
        .map(|(ladder, shared)| (find(ladder, packs).map(|tile| Tile { pack, ..tile }), shared));
    let packs_of = |tile: &Tile| packs.div_ceil((tile.cluster * tile.threads_per_row) as usize) as u32;
    let fits = |(tile, shared): &(Option<Tile>, usize)| {
        let one = |tile: Tile| Tile { packs: packs_of(&tile), stages: 1, ..tile };
        tile.is_none_or(|tile| shared_bytes(problem, &one(tile)) + RESERVED_BYTES <= *shared)
    };
    let is_on_chip = tiles[1].0.is_some() && tiles.iter().all(fits);
    // The number of blocks that share the rows, if all multiprocessors are full: for those tiles,
    // and for the streaming kernels.
    let column_tiles = (problem.cols as u64).div_ceil((pack * COLUMNS_THREADS).into());
    let streaming = (STREAMING_BLOCKS_PER_SM * u64::from(MOST_SMS)).div_ceil(column_tiles);
    let on_chip = tiles.into_iter().filter_map(|(tile, _)| tile);
    let tuned = most_tuned_blocks(u32::try_from(packs).unwrap_or(u32::MAX));
    let on_chip = on_chip.map(|tile| u64::from(most_blocks(&tile).max(tuned)));
    let blocks = on_chip.fold(if is_on_chip { 0 } else { streaming }, u64::max).min(rows);
    // Whole rounds of blocks are at most one round more than the rows require.
    let chunks = blocks + rows / most_rows(rows, 1).max(1);
    let slices = column_tiles.max(u64::from(MOST_CLUSTER));
    let Sums { workspace, .. } = sums(problem, chunks, slices);
    let row_sums = if is_on_chip { 0 } else { 2 * problem.rows + reduction::ALIGNMENT_SLACK as usize };
    workspace.len.next_multiple_of(4) + row_sums
}

/// A row stays on chip: one kernel, and the reduction of partial sums.
fn on_chip(problem: &Problem, tile: Tile, caps: &Caps) -> Plan {
    let rows = problem.rows as u64;
    let blocks = u64::from(resident_clusters(&tile, caps)).min(rows.div_ceil((tile.groups * tile.unroll).into()));
    let blocks = match problem.grad_reduction {
        // Each lock gets the same number of blocks, if that drops few blocks. With 64 locks on an
        // H200, 4096x1024 takes 13.8 us instead of 14.3 us.
        GradReduction::Locks { groups } if blocks % u64::from(groups) <= blocks / 16 && blocks > u64::from(groups) => {
            blocks - blocks % u64::from(groups)
        }
        GradReduction::Partials | GradReduction::Locks { .. } | GradReduction::Atomics => blocks,
    };
    let chunks = reduction::chunks(rows, blocks, most_rows(rows, tile.groups));
    if let Some(cluster) = split_cluster(problem, &tile, chunks, caps) {
        return split(problem, tile, chunks, cluster);
    }
    let main = key(problem, Program::Backward, tile);
    let main = Step::launch(main, chunks as u32 * tile.cluster, shared_bytes(problem, &tile) as u32);
    finish(problem, chunks, tile.cluster.into(), [(problem.rows > 0).then_some(main), None], caps)
}

/// The matrices fit the L2: one kernel. Its blocks of columns read them a second time from the L2,
/// without partial sums.
fn split(problem: &Problem, tile: Tile, chunks: u64, cluster: u32) -> Plan {
    // Two steps suffice for few rows; the remaining shared memory lets more blocks of columns run.
    let tile = Tile { stages: tile.stages.min(2), ..tile };
    let mut key = key(problem, Program::BackwardSplit, tile);
    key.call.accumulate = Accumulate::Partials;
    // A cluster handles either rows or columns, so the last cluster of rows may have idle blocks.
    let chunks = chunks.next_multiple_of(cluster.into());
    let columns = column_tiles(problem, &tile) * u64::from(cluster);
    let main = Step::Launch {
        key,
        grid: (chunks + columns) as u32,
        cluster,
        threads: tile.threads(),
        shared_bytes: shared_bytes(problem, &tile).max(column_bytes(problem, &tile)) as u32,
    };
    Plan { steps: [Some(main), None, None, None], chunks, ..Plan::default() }
}

/// The number of blocks of columns.
fn column_tiles(problem: &Problem, tile: &Tile) -> u64 {
    (problem.cols as u64).div_ceil((COLUMN_LANES * tile.pack).into())
}

/// Bytes that the threads of a block of columns exchange: the sums of each warp, and the sums of
/// the block.
fn column_bytes(problem: &Problem, tile: &Tile) -> usize {
    let sums = problem.tensors.sums_over_rows() * (COLUMN_LANES * tile.pack) as usize;
    (tile.threads() as usize / 32 + 1) * sums * size_of::<f32>()
}

/// The cluster size of a split call (blocks of rows and blocks of columns), if splitting is faster
/// than `chunks` rows of partial sums.
///
/// A split call reads x and dy twice, the second time from the L2. It saves the partial sums and a
/// kernel, which is worth reading `Tuning::split_bytes` from the L2. Microseconds on an H200, in
/// bf16:
///
/// | shape | split | partial sums |
/// |---|---|---|
/// | 128x4096 | 2.9 | 5.2 |
/// | 512x5120 | 7.5 | 10.1 |
/// | 256x12288 | 9.1 | 11.3 |
/// | 512x8192 | 11.0 | 12.4 |
/// | 1536x2048 | 10.6 | 10.4 |
/// | 4096x1024 | 11.5 | 10.7 |
/// | layer norm 2048x1024 | 12.0 | 9.9 |
fn split_cluster(problem: &Problem, tile: &Tile, chunks: u64, caps: &Caps) -> Option<u32> {
    let gradients = problem.tensors.sums_over_rows() as u64;
    let (rows, cols) = (problem.rows as u64, problem.cols as u64);
    // A row that needs several blocks has more columns than the device has blocks for. Behind a
    // weight before the norm dweight needs the sums over the row.
    let needs_sums = problem.cast_order.is_weight_first() && problem.tensors.has(Tensor::Dweight);
    if gradients == 0 || rows == 0 || rows > MOST_SPLIT_ROWS || tile.cluster > 1 || needs_sums {
        return None;
    }
    // Neither product wraps: a matrix has at most isize::MAX bytes, and there are fewer partial
    // sums than rows.
    let streams = streams(problem, RING.without(Tensor::DresidualOut));
    let again = rows * cols * streams as u64;
    let partials = chunks * cols * gradients * size_of::<f32>() as u64;
    // Doubles the cluster until a thread has few rows, or the multiprocessors are full.
    let rows_of = |cluster: u32| rows.div_ceil(u64::from(tile.threads() / COLUMN_LANES * cluster));
    let has_room = |cluster: u32| column_tiles(problem, tile) * u64::from(cluster) <= caps.sms.into();
    let mut cluster = 1;
    while rows_of(cluster) > COLUMN_ROWS && cluster < caps.max_cluster && has_room(2 * cluster) {
        cluster *= 2;
    }
    let is_worth_it = caps.tuning.split_bytes > 0 && again <= caps.tuning.split_bytes + partials * 3 / 2;
    is_worth_it.then_some(cluster)
}

/// A row is too long to stay on chip: the row sums, then the columns, then the reduction of partial
/// sums.
fn streaming(problem: &Problem, tile: Tile, caps: &Caps) -> Plan {
    let row_tile =
        Tile { packs: 1, threads_per_row: 512, groups: 1, cluster: caps.max_cluster, blocks_per_sm: 2, ..tile };
    // A gate takes registers.
    let blocks_per_sm = if problem.gate.is_some() { 2 } else { 3 };
    let col_tile = Tile { packs: 1, threads_per_row: COLUMNS_THREADS, groups: 1, blocks_per_sm, ..tile };
    let (rows, tiles) =
        (problem.rows as u64, (problem.cols as u64).div_ceil((col_tile.pack * col_tile.threads()).into()));
    // Several blocks per multiprocessor, to balance the load.
    let blocks = (STREAMING_BLOCKS_PER_SM * u64::from(caps.sms)).div_ceil(tiles).min(rows);
    let chunks = reduction::chunks(rows, blocks, most_rows(rows, 1));
    let clusters = problem.rows.min((2 * caps.sms / row_tile.cluster).max(1) as usize);
    let sums = key(problem, Program::BackwardRowSums, row_tile);
    let sums = Step::launch(sums, clusters as u32 * row_tile.cluster, 0);
    let columns = key(problem, Program::BackwardColumns, col_tile);
    let columns = Step::launch(columns, (tiles * chunks).min(i32::MAX as u64) as u32, 0);
    let has_rows = problem.rows > 0;
    let mut plan = finish(problem, chunks, tiles, [has_rows.then_some(sums), has_rows.then_some(columns)], caps);
    if has_rows {
        plan.workspace.row_sums = plan.workspace.len.next_multiple_of(4);
        plan.workspace.len = plan.workspace.row_sums + 2 * problem.rows + reduction::ALIGNMENT_SLACK as usize;
    }
    plan
}

/// Adds the steps around the main kernels, clearing and the reduction of partial sums, and the
/// workspace. `slices` is the number of blocks that share a row of partial sums.
pub(super) fn finish(problem: &Problem, chunks: u64, slices: u64, main: [Option<Step>; 2], caps: &Caps) -> Plan {
    let Sums { partial_rows, workspace, zeroed } = sums(problem, chunks, slices);
    let mut plan = Plan { workspace, chunks, partial_rows, ..Plan::default() };
    let [first, second] = if partial_rows == chunks { main.map(|step| step.map(alone)) } else { main };
    if problem.tensors.sums_over_rows() == 0 {
        plan.steps = [first, second, None, None];
        return plan;
    }
    let clear = (!zeroed.is_empty()).then(|| {
        let [first, bytes] = [zeroed.start, zeroed.len()].map(|elements| elements * size_of::<f32>());
        Step::clear(Tensor::Workspace, first, bytes)
    });
    plan.steps = [clear, first, second, Some(second_stage(problem, partial_rows, caps))];
    plan
}

/// The partial sums over rows, and their place in the workspace.
struct Sums {
    partial_rows: u64,
    workspace: Workspace,
    /// Elements of the workspace that must start at zero.
    zeroed: Range<usize>,
}

fn sums(problem: &Problem, chunks: u64, slices: u64) -> Sums {
    let gradients = problem.tensors.sums_over_rows();
    let partial_rows = match problem.grad_reduction {
        GradReduction::Partials => chunks,
        GradReduction::Locks { groups } => chunks.min(groups.into()),
        GradReduction::Atomics => chunks.min(ATOMIC_ROWS),
    };
    if gradients == 0 {
        return Sums { partial_rows, workspace: Workspace::default(), zeroed: 0..0 };
    }
    let partials = (partial_rows * reduction::row_stride(problem.cols)) as usize * gradients;
    let (locks, zeroed) = match problem.grad_reduction {
        // Each chunk has its own row of partial sums, for every `GradReduction`.
        _ if partial_rows == chunks => (0, 0..0),
        GradReduction::Partials => (0, 0..0),
        // A lock also records whether its row was written.
        GradReduction::Locks { .. } => {
            let locks = (partial_rows * slices) as usize;
            (locks, partials..partials + locks)
        }
        GradReduction::Atomics => (0, 0..partials),
    };
    let len = partials + locks + reduction::ALIGNMENT_SLACK as usize;
    Sums { partial_rows, workspace: Workspace { locks: partials, len, ..Workspace::default() }, zeroed }
}

/// A step without shared partial sums: each chunk has its own row.
fn alone(step: Step) -> Step {
    match step {
        Step::Launch { mut key, grid, cluster, threads, shared_bytes } => {
            key.call.accumulate = Accumulate::Partials;
            Step::Launch { key, grid, cluster, threads, shared_bytes }
        }
        Step::Clear { .. } => step,
    }
}

/// The reduction of partial sums.
fn second_stage(problem: &Problem, partial_rows: u64, caps: &Caps) -> Step {
    let tile = reduce_tile(problem, partial_rows, caps);
    let mut key = key(problem, Program::ReducePartials, tile);
    // The input is f32 for every dtype, and one kernel serves rows of every length.
    key.tile.is_ragged = true;
    key.tile.has_tail = true;
    let tiles = problem.cols.div_ceil((tile.pack * tile.threads_per_row) as usize);
    Step::launch(key, (tiles * problem.tensors.sums_over_rows()) as u32, 0)
}

/// How threads divide the partial sums: two rows per thread, if all threads fit the device at once.
/// On an H200, 264 rows of 1024 columns take 1.4 us.
fn reduce_tile(problem: &Problem, partial_rows: u64, caps: &Caps) -> Tile {
    let values = problem.cols.saturating_mul(problem.tensors.sums_over_rows()) as u64;
    let held = u64::from(caps.sms * caps.threads_per_sm * reduction::COLUMNS) / values.max(1);
    let groups = partial_rows.div_ceil(2).next_power_of_two().min(1 << held.max(1).ilog2());
    // Limits the number of serial additions.
    let groups = groups.max(partial_rows.div_ceil(2 * MOST_REDUCE_ROWS).next_power_of_two());
    let groups = groups.clamp(8, MOST_REDUCE_GROUPS.into()) as u32;
    let threads_per_row = (LEAST_REDUCE_THREADS / groups).max(reduction::LANES);
    let unroll = partial_rows.div_ceil(groups.into()).clamp(1, MOST_REDUCE_ROWS).next_power_of_two() as u32;
    // A thread with eight rows in flight needs half of the registers.
    let threads = caps.threads_per_sm / if unroll > 4 { 2 } else { 1 };
    let blocks_per_sm = (threads / (threads_per_row * groups)).max(1);
    Tile { pack: reduction::COLUMNS, packs: 1, threads_per_row, groups, unroll, blocks_per_sm, ..Tile::NONE }
}

/// The most rows of a chunk: math.md section 4 allows `2 sqrt(rows) + 64` serial additions, and the
/// reduction of partial sums takes a part of them.
pub(super) fn most_rows(rows: u64, groups: u32) -> u64 {
    let root = rows.isqrt();
    (2 * root - root / 64 + 32) * u64::from(groups)
}

/// The tile of a call with a gate, if it differs: with one sum over the rows and 256 threads on each of
/// two rows, a row has 512 threads with one pack each, and a multiprocessor two blocks; a gate after the
/// norm has two rows at a time where a row has 1024 threads. On an H200, RMS norm of 64 MiB of bf16, in
/// us:
///
/// | columns | gate after, tile without a gate | this tile | gate before, tile without a gate | this tile |
/// |---|---|---|---|---|
/// | 4096 | 95.4 | 90.4 | 91.6 | 88.6 |
/// | 8192 | 94.0 | 90.7 | 88.8 | 88.8 |
fn gated(problem: &Problem, tile: Tile) -> Tile {
    let is_after = problem.gate.is_some_and(|gate| gate.slot == Slot::After);
    match (tile.packs, tile.threads_per_row, tile.groups) {
        (2, 256, 2) if problem.tensors.sums_over_rows() < 2 => {
            Tile { packs: 1, threads_per_row: 512, groups: 1, blocks_per_sm: 2, stages: 2, ..tile }
        }
        (1, 1024, 1) if is_after => Tile { unroll: 2, ..tile },
        _ => tile,
    }
}

/// The tile of a call with neither sums over the rows nor a gate, such as one without a weight or with
/// a frozen one. A block with several rows has at most two stages; a row of more than 8192 columns of
/// 16 bits has a block of its own, with two packs for each thread. Rows of fewer than 512 columns were
/// not measured. On an H200, RMS norm of 64 MiB of bf16 without a weight, in us:
///
/// | columns | tile with sums | this tile |
/// |---|---|---|
/// | 512 | 54.5 | 49.4 |
/// | 1024 | 56.1 | 49.3 |
/// | 4096 | 59.0 | 49.2 |
/// | 10240 | 62.8 | 49.1 |
/// | 12288 | 58.4 | 50.2 |
/// | 14336 | 52.9 | 50.2 |
/// | 16384 | 65.5 | 50.4 |
fn without_sums(problem: &Problem, tile: Tile) -> Tile {
    if problem.tensors.sums_over_rows() > 0 || problem.gate.is_some() {
        return tile;
    }
    match problem.cols.div_ceil(tile.pack as usize) {
        64..=1024 if tile.groups > 1 => Tile { stages: tile.stages.min(2), ..tile },
        packs @ 1025..=2048 => {
            let threads_per_row = packs.div_ceil(2).next_multiple_of(32) as u32;
            Tile { packs: 2, pack: tile.pack, ..ring(2, block(threads_per_row, 1, 1, 1)) }
        }
        _ => tile,
    }
}

/// Removes stages, then blocks, until the ring fits the shared memory. With a gate, removes blocks,
/// then stages, until a multiprocessor has at most [`GATED_RINGS`] in flight, if that is possible and
/// [`gated`] gives a thread no second row.
fn fit(problem: &Problem, tile: Tile, caps: &Caps) -> Option<Tile> {
    let bytes = |tile: &Tile| shared_bytes(problem, tile) + RESERVED_BYTES;
    let fits = |tile: &Tile| {
        bytes(tile) <= caps.shared_per_block_optin as usize
            && bytes(tile) * tile.blocks_per_sm as usize <= caps.shared_per_sm as usize
            && tile.threads() * tile.blocks_per_sm <= caps.threads_per_sm
    };
    let tile = without_sums(problem, tile);
    if problem.gate.is_some() {
        let (tile, one_row) = (gated(problem, tile), tile.unroll);
        let stages = (2..=tile.stages).rev();
        let mut tiles = stages.flat_map(|stages| {
            (1..=tile.blocks_per_sm).rev().map(move |blocks_per_sm| Tile { blocks_per_sm, stages, ..tile })
        });
        let is_light = |tile: &Tile| {
            tile.unroll > one_row || shared_bytes(problem, tile) * tile.blocks_per_sm as usize <= GATED_RINGS
        };
        if let Some(tile) = tiles.find(|tile| is_light(tile) && fits(tile)) {
            return Some(tile);
        }
    }
    let with = |least: u32| {
        let blocks = (1..=tile.blocks_per_sm).rev();
        blocks.flat_map(move |blocks_per_sm| {
            (least..=tile.stages).rev().map(move |stages| Tile { blocks_per_sm, stages, ..tile })
        })
    };
    // Two stages let a row load while another is computed; one stage is the last resort.
    let one = Tile { stages: 1, blocks_per_sm: 1, is_overlapped: false, ..tile };
    with(2).find(fits).or_else(|| Some(one).filter(fits))
}

/// The bytes of an element of all those matrices that the call has.
fn streams(problem: &Problem, matrices: TensorSet) -> usize {
    let there = problem.tensors.intersection(matrices).iter();
    there.filter_map(|tensor| problem.storage(tensor)).map(Storage::size).sum()
}

/// Dynamic shared memory of a block: the ring of rows, or the exchange of its groups at the end of
/// a chunk.
fn shared_bytes(problem: &Problem, tile: &Tile) -> usize {
    let owned = (tile.pack * tile.packs * tile.threads()) as usize;
    let ring = (tile.stages * tile.unroll) as usize * owned * streams(problem, RING);
    let gradients = problem.tensors.sums_over_rows();
    let width = tile.threads_per_row.max(32);
    let exchange =
        gradients * (tile.pack * tile.packs * (tile.threads() / width / 2) * width) as usize * size_of::<f32>();
    ring.max(exchange)
}

/// Clusters that run at the same time. Clusters of more than two blocks do not fill a device,
/// because each lies within one part of it: an H200 with 132 multiprocessors ran 30 clusters of
/// four.
fn resident_clusters(tile: &Tile, caps: &Caps) -> u32 {
    let blocks = caps.sms * tile.blocks_per_sm;
    let usable = if tile.cluster > 2 { blocks - blocks / 11 } else { blocks };
    (usable / tile.cluster).max(1)
}
