//! Plans of the two phases on column-divided rows: threads that loop over a row of any length, and,
//! for backward's second phase, threads that have columns.

use rmsnorm_gpu::reduction;
use rmsnorm_spec::{Direction, Norm, Problem};
#[cfg(any(test, feature = "peers"))]
use rmsnorm_spec::{Piece, TensorSet};

use super::backward::{finish, most_rows};
use super::{MOST_BLOCKS, Plan, Program, Reads, Step, Tile, key, pack};
use crate::caps::Caps;

/// The fewest threads of a row, a warp, and the most, in one block.
const LEAST_THREADS: usize = 32;
const MOST_THREADS: usize = 1024;

/// The smallest block; with fewer threads per row it handles several rows.
const BLOCK_THREADS: u32 = 256;

/// Threads per multiprocessor, with 64 registers each. Half as many if packs are assembled from
/// 2-byte accesses.
const THREADS_PER_SM: u32 = 1024;

/// The most packs that a thread of forward reads together, and the packs of a thread of a short
/// row. A multiprocessor then has 64 KiB in flight.
const BATCH: usize = 4;

/// Packs per thread above which a row gets the blocks of a cluster.
const MOST_PACKS: usize = 16;

/// Blocks that handle columns: the most threads of a block, and threads per multiprocessor with 80
/// registers each, or with 128 registers for packs that are assembled from 2-byte accesses.
const COLUMNS_THREADS: usize = 256;
const COLUMNS_THREADS_PER_SM: u32 = 768;
const COLUMNS_THREADS_PER_SM_BY_HALVES: u32 = 512;

/// Blocks that handle columns, per resident block. More blocks balance the load better, but make
/// more partial sums.
const COLUMNS_ROUNDS: u64 = 2;

/// The problem of the first phase that belongs to this second phase: only the tensors that the
/// first phase reads.
#[cfg(any(test, feature = "peers"))]
pub(crate) fn first_half(problem: &Problem) -> Problem {
    let read = match problem.direction {
        // The residual's gradient is added afterwards.
        Direction::Backward => Direction::Backward.reads().difference(Piece::Residual.tensors(Direction::Backward)),
        // In place, y has x.
        Direction::Forward | Direction::QuantizedForward => TensorSet::MATRICES,
    };
    Problem { tensors: problem.tensors.intersection(read), ..*problem }
}

/// The plan of a first phase, forward or backward as the problem's direction says.
pub(crate) fn statistics(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    let program = match problem.direction {
        Direction::Forward | Direction::QuantizedForward => Program::PartialStatistics,
        Direction::Backward => Program::PartialBackwardStatistics,
    };
    by_rows(problem, program, access_bytes, caps)
}

/// The plan of a second phase. For backward it may need more workspace than a backward call of the
/// same size.
pub(crate) fn given(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    match problem.direction {
        Direction::Forward | Direction::QuantizedForward => {
            by_rows(problem, Program::ForwardWithStatistics, access_bytes, caps)
        }
        Direction::Backward => backward_with_statistics(problem, access_bytes, caps),
    }
}

/// Plans a kernel with a loop over rows in each thread.
fn by_rows(problem: &Problem, program: Program, access_bytes: u32, caps: &Caps) -> Plan {
    if problem.rows == 0 {
        return Plan::default();
    }
    let tile = row_tile(problem, program, access_bytes, caps);
    let resident = (caps.sms * tile.blocks_per_sm / tile.cluster).max(1) as usize;
    // Each block loops over further rows.
    let blocks = problem.rows.div_ceil(tile.groups as usize).min(resident) as u32;
    let launch = Step::launch(key(problem, program, tile), blocks * tile.cluster, 0);
    Plan { steps: [Some(launch), None, None, None], ..Plan::default() }
}

/// The threads of a row.
fn row_tile(problem: &Problem, program: Program, access_bytes: u32, caps: &Caps) -> Tile {
    let pack = pack(problem);
    let packs = problem.cols.div_ceil(pack as usize);
    let threads = packs.div_ceil(BATCH).next_power_of_two().clamp(LEAST_THREADS, MOST_THREADS);
    let cluster = if packs > MOST_PACKS * MOST_THREADS { caps.max_cluster } else { 1 };
    let groups = (BLOCK_THREADS / threads as u32).max(1);
    // The first phase of layer norm visits a row twice; a short row stays in registers.
    let keeps_row = program == Program::PartialStatistics && problem.norm == Norm::Layer && packs <= BATCH * threads;
    // Packs that are assembled from 2-byte accesses take registers, and so do wide parameters.
    let is_by_halves = access_bytes < 4;
    let threads_per_sm = if is_by_halves { THREADS_PER_SM / 2 } else { THREADS_PER_SM };
    let has_wide_parameters =
        program == Program::ForwardWithStatistics && pack as usize * problem.dtypes.weight.size() > 16;
    let reads_few = (is_by_halves || has_wide_parameters) && !keeps_row;
    let batch = match problem.direction {
        Direction::Backward => 1,
        Direction::Forward | Direction::QuantizedForward if reads_few => BATCH / 2,
        Direction::Forward | Direction::QuantizedForward => BATCH,
    };
    Tile {
        pack,
        packs: 1,
        threads_per_row: threads as u32,
        groups,
        cluster,
        blocks_per_sm: (threads_per_sm / (threads as u32 * groups)).max(1),
        access_bytes,
        reads: Reads { keeps_row, batch: batch as u32, ..Tile::NONE.reads },
        ..Tile::NONE
    }
}

/// Plans a kernel that gives each thread columns of a chunk of rows; then the reduction of partial
/// sums.
fn backward_with_statistics(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    let pack = pack(problem);
    let packs = problem.cols.div_ceil(pack as usize);
    let threads = packs.next_power_of_two().clamp(LEAST_THREADS, COLUMNS_THREADS) as u32;
    let blocks_per_sm = |threads_per_sm: u32| (threads_per_sm / threads).min(MOST_BLOCKS);
    let resident =
        blocks_per_sm(if access_bytes < 4 { COLUMNS_THREADS_PER_SM_BY_HALVES } else { COLUMNS_THREADS_PER_SM });
    let tile = Tile {
        pack,
        packs: 1,
        threads_per_row: threads,
        groups: 1,
        blocks_per_sm: resident,
        access_bytes,
        ..Tile::NONE
    };
    let (rows, tiles) = (problem.rows as u64, (packs as u64).div_ceil(threads.into()));
    // The number of blocks ignores the access width, because chunks decide the bits of gradients.
    let blocks = COLUMNS_ROUNDS * u64::from(caps.sms * blocks_per_sm(COLUMNS_THREADS_PER_SM));
    let chunks = reduction::chunks(rows, blocks.div_ceil(tiles).min(rows), most_rows(rows, 1));
    // A grid has at most 2^31 - 1 blocks, which loop over further tiles of chunks.
    let grid = tiles.saturating_mul(chunks).min(i32::MAX as u64) as u32;
    let columns = Step::launch(key(problem, Program::BackwardWithStatistics, tile), grid, 0);
    finish(problem, chunks, tiles, [(problem.rows > 0).then_some(columns), None], caps)
}
