//! Plans of forward to FP8 or int8: the tile of a row, the search for a tensor's scale, and the
//! transposed copy.

use rmsnorm_gpu::reduction;
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout};
use rmsnorm_spec::{DType, Norm, Piece, Problem, Storage, Tensor};

use super::tuning::Ladders;
use super::{
    MOST_BLOCKS, Plan, Program, REGISTERS_PER_SM, RESERVED_BYTES, Step, Tile, Workspace, forward, found, key, pack,
    reads_more,
};
use crate::caps::Caps;

/// Rows and columns of a tile of `transpose_codes.cu`.
const SIDE: usize = 128;

/// Bytes of its stores.
const STORE_BYTES: usize = 16;

/// Shared memory of a multiprocessor in `quantized_forward_transposed.cu`: for the codes of its tiles, and for one
/// step of rows. Each thread is charged at least `THREAD_BYTES` of a step, which limits them to 512.
const TILE_BYTES: u32 = 128 << 10;
const STEP_BYTES: u32 = 32 << 10;
const THREAD_BYTES: u32 = 64;

/// Rows and columns of a tile of `columnwise.cu`.
const COLUMNWISE_TILE: (usize, usize) = (128, 64);

/// Two words: the largest magnitude, and the number of blocks that have contributed.
const FOUND_LEN: usize = 2;

/// The plan of a quantized forward call, or of a group of columns of one. `shape`: rows and columns
/// of the call, which has all scales.
pub(super) fn plan(
    problem: &Problem,
    quant: &QuantSpec,
    shape: (usize, usize),
    access_bytes: u32,
    caps: &Caps,
) -> Plan {
    let codes_t = problem.has(Tensor::CodesT).then(|| transpose(problem)).flatten();
    // Plans of parts do not count the blocks of other groups of columns.
    let is_whole = problem.cols == shape.1 || problem.rows != shape.0;
    let mut plan = Plan::default();
    plan.steps = match quant.scale {
        ScaleKind::Given => {
            let is_cleared = problem.has(Tensor::Amax) && !quant.folds_amax;
            let [write, codes_t] = given(problem, codes_t, is_whole, access_bytes, caps);
            [is_cleared.then(|| Step::clear(Tensor::Amax, 0, size_of::<f32>())), write, codes_t, None]
        }
        ScaleKind::Current => {
            let both = cooperative(problem, access_bytes, caps).filter(|_| is_whole);
            // Blocks that wait for each other have a word each; they read four at a time.
            let words = both.map_or(FOUND_LEN, |(_, blocks)| if blocks > 1 { blocks.next_multiple_of(4) } else { 0 });
            let slack = if words > 0 { reduction::ALIGNMENT_SLACK as usize } else { 0 };
            plan.workspace = Workspace { len: words + slack, ..Workspace::default() };
            let clear = (words > 0).then(|| Step::clear(Tensor::Workspace, 0, words * size_of::<u32>()));
            if let Some((both, _)) = both {
                [clear, Some(both), codes_t, None]
            } else {
                // A call without rows also writes a scale. The search does not depend on later outputs.
                let found =
                    Problem { rows: problem.rows.max(1), tensors: problem.tensors.without(Tensor::CodesT), ..*problem };
                let find = rows(&found, quant.scale, access_bytes, caps);
                let mut known = *quant;
                known.scale = ScaleKind::Given;
                let write = Problem { quant: Some(known), ..*problem };
                let [write, codes_t] = given(&write, codes_t, is_whole, access_bytes, caps);
                [clear, find, write, codes_t]
            }
        }
        ScaleKind::Row | ScaleKind::Block { .. } | ScaleKind::Mx { .. } => {
            let columns = problem.has(Tensor::CodesColumnwise);
            // Nothing is enqueued between the last two kernels, so they may overlap.
            [
                clear_gaps(problem, Tensor::Scales, quant, shape),
                columns
                    .then(|| clear_gaps(problem, Tensor::ScalesColumnwise, &quant.columnwise(), (shape.1, shape.0)))
                    .flatten(),
                rows(problem, quant.scale, access_bytes, caps),
                columns.then(|| columnwise(problem, quant, access_bytes)).flatten(),
            ]
        }
    };
    plan
}

/// The tile of a row in one block; `None` for rows that do not fit one.
fn on_chip(problem: &Problem, scale: ScaleKind, caps: &Caps) -> Option<Tile> {
    let pack = pack(problem);
    let Ladders { block, .. } = caps.tuning.ladders(problem, pack);
    let own = caps.tuning.to_codes(problem, scale, pack).and_then(|ladder| found(ladder, problem.cols, pack, caps));
    own.or_else(|| found(block, problem.cols, pack, caps).map(|tile| with_registers(problem, tile)))
}

/// One kernel that finds the tensor's scale and writes the codes, and the number of its blocks, which
/// wait for each other in between. `None` if the device does not hold all rows at the same time, or no
/// such kernels, if there are no rows, or if tables keep none.
fn cooperative(problem: &Problem, access_bytes: u32, caps: &Caps) -> Option<(Step, usize)> {
    let tile = on_chip(problem, ScaleKind::Current, caps).filter(|_| caps.cooperates && caps.tuning.keeps_rows)?;
    // Few blocks find each other's words sooner. RMS norm, 128x4096: 5.1 us (a row in each block 5.7);
    // 1024x4096: 9.0 (two rows 10.0). The rows of layer norm take longer, so that each multiprocessor has
    // a block: 16x4096 4.8 us (four rows in a block 5.4), 256x4096 6.9 (eight 8.8), 1024x2048 8.0 (16 9.3).
    let rows_per_sm = problem.rows.div_ceil(caps.sms as usize);
    let threads = match problem.norm {
        Norm::Layer => (rows_per_sm.min(512).next_power_of_two() as u32 * tile.threads_per_row).clamp(32, 512),
        Norm::Rms | Norm::L2 | Norm::L2Clamped if rows_per_sm <= 1 => 256,
        Norm::Rms | Norm::L2 | Norm::L2Clamped => 512,
    };
    // Blocks of half as many threads often hold more rows: fewer blocks are lost to rounding, or a thread needs
    // fewer registers. RMS norm, 700x8192: 10.9 us (two kernels 12.5); layer norm, 390x16384: 14.6 (17.4).
    [threads, threads / 2].into_iter().find_map(|threads| in_blocks_of(problem, tile, threads, access_bytes, caps))
}

/// The same, with blocks of so many threads, or of one row.
fn in_blocks_of(problem: &Problem, tile: Tile, threads: u32, access_bytes: u32, caps: &Caps) -> Option<(Step, usize)> {
    let groups = (threads / tile.threads_per_row).max(1);
    let tile = Tile { groups, blocks_per_sm: tile.groups * tile.blocks_per_sm / groups, ..tile };
    // ptxas ignores a bound of more threads than a multiprocessor has, and then spends more registers.
    let most = MOST_BLOCKS.min(caps.threads_per_sm / tile.threads());
    // With fewer registers these spill. Blocks of several rows ask whether a row exists.
    let registers = match (tile.packs > 4, groups > 1) {
        (true, true) if problem.norm == Norm::Layer => 128,
        (true, false) => 80,
        _ => 32,
    };
    let most = most.min(REGISTERS_PER_SM / (tile.threads() * registers));
    let tile = Tile { blocks_per_sm: tile.blocks_per_sm.clamp(1, most.max(1)), ..tile };
    let blocks = problem.rows.div_ceil(tile.groups as usize);
    let key = key(problem, Program::QuantizedForward, Tile { access_bytes, is_cooperative: true, ..tile });
    // With a barrier for each row, a block has all 16 that it can name. An H200 holds four such blocks.
    let resident = if groups > 1 && tile.threads_per_row > 32 { tile.blocks_per_sm.min(4) } else { tile.blocks_per_sm };
    (1..=(caps.sms * resident) as usize).contains(&blocks).then(|| (Step::launch(key, blocks as u32, 0), blocks))
}

/// The kernel that handles rows; `None` if there are no rows.
fn rows(problem: &Problem, scale: ScaleKind, access_bytes: u32, caps: &Caps) -> Option<Step> {
    let resident = |tile: &Tile| {
        let blocks_per_sm = tile.blocks_per_sm.min(caps.threads_per_sm / tile.threads());
        (caps.sms * blocks_per_sm / tile.cluster).max(1) as usize
    };
    let (program, tile, blocks) = if let Some(tile) = on_chip(problem, scale, caps) {
        (Program::QuantizedForward, tile, problem.rows.div_ceil(tile.groups as usize))
    } else {
        let tile = Tile { pack: pack(problem), ..forward::streaming_tile(caps) };
        (Program::QuantizedForwardStreaming, tile, problem.rows.min(resident(&tile)))
    };
    let tile = Tile { access_bytes, ..tile };
    // With `Current`, each block counts once after its search for the largest magnitude, so only as
    // many blocks are launched as are resident. 16384x4096 takes 86.6 us that way, 96.8 us with a
    // block per row.
    let blocks = if scale == ScaleKind::Current { blocks.min(resident(&tile)) } else { blocks };
    // A grid has at most 2^31 - 1 blocks, which loop over further rows.
    let grid = blocks.min(i32::MAX as usize / tile.cluster as usize) as u32 * tile.cluster;
    let launch = Step::launch(key(problem, program, tile), grid, 0);
    (problem.rows > 0).then_some(launch)
}

/// The kernels that write codes by a known scale, and `codes_t`, their transposed copy.
fn given(
    problem: &Problem,
    codes_t: Option<Step>,
    is_whole: bool,
    access_bytes: u32,
    caps: &Caps,
) -> [Option<Step>; 2] {
    match codes_t.filter(|_| is_whole).and_then(|_| transposed(problem, access_bytes, caps)) {
        Some(both) => [Some(both), None],
        None => [rows(problem, ScaleKind::Given, access_bytes, caps), codes_t],
    }
}

/// One kernel that writes codes and their transposed copy, of rows of a warp or more and up to 4096 columns.
/// On an H200, RMS norm of bf16 to E4M3, in us:
///
/// | rows x columns | two kernels | one |
/// |---|---|---|
/// | 16384x4096 | 88.6 | 77.9 |
/// | 4096x4096 | 25.0 | 21.0 |
/// | 2048x4096, half of the multiprocessors | 15.1 | 17.0 |
/// | 32768x2048 | 88.6 | 75.1 |
/// | 65536x1024 | 88.7 | 79.6 |
/// | 8192x4096 of f32 | 62.7 | 61.4 |
///
/// With a residual it is from 11 % faster to 5 % slower, and is not used.
fn transposed(problem: &Problem, access_bytes: u32, caps: &Caps) -> Option<Step> {
    let has_warps = |tile: &Tile| tile.threads_per_row.is_multiple_of(32) && tile.cluster == 1;
    let tile = on_chip(problem, ScaleKind::Given, caps).filter(has_warps)?;
    let fits = caps.shared_per_block_optin as usize >= (TILE_BYTES + 2 * STEP_BYTES) as usize + RESERVED_BYTES / 2;
    // The kernel stores whole strips of 16 rows.
    if !fits || !problem.rows.is_multiple_of(STORE_BYTES) || reads_more(problem) {
        return None;
    }
    let cols = tile.threads_per_row * tile.pack * tile.packs;
    let blocks_per_sm = if cols <= 1024 { 2 } else { 1 };
    let power_of_two = |bytes: u32, each: u32| (bytes / blocks_per_sm / each).checked_ilog2().map(|bits| 1 << bits);
    let tile_rows = power_of_two(TILE_BYTES, cols)?.min(64);
    let bytes = cols * problem.dtypes.activation.size() as u32;
    let groups = power_of_two(STEP_BYTES, bytes.max(THREAD_BYTES * tile.threads_per_row))?;
    let (tiles, resident) = (problem.rows.div_ceil(tile_rows as usize), (caps.sms * blocks_per_sm) as usize);
    // Blocks take tiles in rounds, and in the last round some get none. At most an eighth of all turns may be
    // empty, and a sixteenth for f32, which gains less.
    let part = if problem.dtypes.activation == DType::F32 { 16 } else { 8 };
    let is_busy = part * tiles >= (part - 1) * tiles.next_multiple_of(resident) || !caps.tuning.keeps_rows;
    if tile_rows < 32 || !is_busy {
        return None;
    }
    let tile = Tile { groups, unroll: tile_rows / groups, stages: 2, blocks_per_sm, access_bytes, ..tile };
    let key = key(problem, Program::QuantizedForwardTransposed, tile);
    Some(Step::launch(key, tiles.min(resident) as u32, tile_rows * cols + tile.stages * groups * bytes))
}

/// A tile of forward with the registers that codes and scales need: no second row in flight, and
/// fewer blocks if a thread has many packs. Behind a gate, h is f32.
fn with_registers(problem: &Problem, tile: Tile) -> Tile {
    let of_gate = if problem.pieces().has(Piece::GateBefore) { 32 } else { 0 };
    let registers = match tile.packs {
        0..4 => 32,
        4..8 => 64,
        _ => 96,
    };
    let most = REGISTERS_PER_SM / (tile.threads() * (registers + of_gate));
    Tile { unroll: 1, blocks_per_sm: tile.blocks_per_sm.min(most).max(1), ..tile }
}

/// The kernel that copies codes transposed. It copies bytes, so all norms, dtypes and formats share
/// it. `None` if there are no rows.
fn transpose(problem: &Problem) -> Option<Step> {
    // On an H200 16385x4096 takes 96.2 us with the norm, and 453 us with stores of single bytes.
    // 16384x4096 took 88.4 us with this kernel, and 92.9 us by the program of ragged columns.
    let is_ragged = !problem.rows.is_multiple_of(STORE_BYTES);
    let tile = Tile { pack: 8, packs: 1, threads_per_row: 256, groups: 1, blocks_per_sm: 8, ..Tile::NONE };
    // A grid has at most 2^31 - 1 blocks, which loop over further tiles.
    let grid = (problem.rows.div_ceil(SIDE) * problem.cols.div_ceil(SIDE)).min(i32::MAX as usize) as u32;
    let quant = Some(QuantSpec::new(CodeType::E4m3, ScaleKind::Given));
    let any = Problem::forward(Norm::Rms, 0, 0, DType::F32, &[]);
    let mut key = key(&Problem { quant, rows_per_group: problem.rows_per_group, ..any }, Program::TransposeCodes, tile);
    (key.tile.is_ragged, key.tile.has_tail) = (is_ragged, true);
    (grid > 0).then(|| Step::launch(key, grid, 0))
}

/// The kernel of the columnwise copy, which needs the statistics of all rows; `None` if there are
/// no rows.
fn columnwise(problem: &Problem, quant: &QuantSpec, access_bytes: u32) -> Option<Step> {
    let problem = Problem { quant: Some(quant.columnwise()), ..*problem };
    let pack = pack(&problem);
    // On an H200, both kernels for bf16 16384x4096 to E4M3 take 108 us with five blocks, 113 us
    // with four. Six blocks spill and take 153 us.
    let blocks_per_sm = if pack == 8 && !reads_more(&problem) { 5 } else { 3 };
    let tile = Tile { pack, packs: 1, threads_per_row: 256, groups: 1, blocks_per_sm, access_bytes, ..Tile::NONE };
    // A grid has at most 2^31 - 1 blocks, which loop over further tiles.
    let tiles = problem.rows.div_ceil(COLUMNWISE_TILE.0) * problem.cols.div_ceil(COLUMNWISE_TILE.1);
    let grid = tiles.min(i32::MAX as usize) as u32;
    let mut key = key(&problem, Program::Columnwise, tile);
    key.tile.is_ragged = !problem.cols.is_multiple_of(COLUMNWISE_TILE.1);
    (grid > 0).then(|| Step::launch(key, grid, 0))
}

/// Clears scales with gaps in their layout, because kernels write only the scales.
fn clear_gaps(problem: &Problem, tensor: Tensor, quant: &QuantSpec, (rows, cols): (usize, usize)) -> Option<Step> {
    let scales = |quant: &QuantSpec| quant.scales_len(rows, cols).unwrap_or(0);
    let bytes = scales(quant) * problem.storage(tensor).map_or(0, Storage::size);
    let has_gaps = scales(quant) > scales(&quant.layout(ScaleLayout::RowMajor));
    has_gaps.then(|| Step::clear(tensor, 0, bytes))
}
