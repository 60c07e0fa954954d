//! Forward to codes: the tile of a row, what is found first, and the transposed copy.

use rmsnorm_gpu::reduction;
use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleType};
use rmsnorm_spec::{DType, DTypes, Norm, Problem, Tensor};

use super::tuning::Ladders;
use super::{Plan, Program, Step, Tile, Workspace, forward, found, key, pack};
use crate::caps::Caps;

/// Rows and columns of a tile of `transpose_codes.cu`.
const SIDE: usize = 128;

/// The largest magnitude, and blocks that have looked for it.
const FOUND_LEN: usize = 2;

/// Of every device.
const REGISTERS_PER_SM: u32 = 1 << 16;

/// Rounds of all blocks that a device holds in which the tensor's largest magnitude is looked for: each block counts once.
const ROUNDS: u32 = 4;

/// The plan of a quantized forward call.
pub(super) fn plan(problem: &Problem, quant: &QuantSpec, access_bytes: u32, caps: &Caps) -> Plan {
    let codes_t = problem.has(Tensor::CodesT).then(|| transpose(problem, caps)).flatten();
    let mut plan = Plan::default();
    plan.steps = match quant.scale {
        ScaleKind::Given => {
            let is_zeroed = problem.has(Tensor::Amax) && !quant.folds_amax;
            let zero = Step::Zero { tensor: Tensor::Amax, bytes: size_of::<f32>() };
            [is_zeroed.then_some(zero), rows(problem, access_bytes, caps, None), codes_t, None]
        }
        ScaleKind::Current => {
            plan.workspace = Workspace { len: FOUND_LEN + reduction::ALIGNMENT_SLACK as usize, ..Workspace::default() };
            let zero = Step::Zero { tensor: Tensor::Workspace, bytes: FOUND_LEN * size_of::<u32>() };
            // Of no rows there is a scale too.
            let find = rows(&Problem { rows: problem.rows.max(1), ..*problem }, access_bytes, caps, Some(ROUNDS));
            let mut given = *quant;
            given.scale = ScaleKind::Given;
            let write = rows(&Problem { quant: Some(given), ..*problem }, access_bytes, caps, None);
            [Some(zero), find, write, codes_t]
        }
        ScaleKind::Row | ScaleKind::Block { .. } | ScaleKind::Mx { .. } => {
            let bytes = scales_bytes(quant, problem);
            let zero = Step::Zero { tensor: Tensor::Scales, bytes };
            let has_gaps = quant.layout != ScaleLayout::RowMajor && bytes > 0;
            [has_gaps.then_some(zero), rows(problem, access_bytes, caps, None), None, None]
        }
    };
    plan
}

/// The kernel that works on rows; nothing for no rows. `rounds`: how often all that the device holds is replaced, at the most.
fn rows(problem: &Problem, access_bytes: u32, caps: &Caps, rounds: Option<u32>) -> Option<Step> {
    let stream = problem.tensors.adds_residual().then_some(problem.dtypes.residual);
    let pack = pack(problem.dtypes.activation, stream);
    let Ladders { block, .. } = caps.tuning.ladders(problem, pack);
    let (program, tile) = match found(block, problem.cols, pack, caps) {
        Some(tile) => (Program::QuantizedForward, with_registers(tile)),
        None => (Program::QuantizedForwardStreaming, Tile { pack, ..forward::streaming_tile(caps) }),
    };
    let tile = Tile { access_bytes, ..tile };
    let resident = (caps.sms * tile.blocks_per_sm / tile.cluster).max(1);
    let blocks = match program {
        Program::QuantizedForward => problem.rows.div_ceil((tile.groups * tile.unroll) as usize),
        _ => problem.rows.min(resident as usize),
    };
    let blocks = rounds.map_or(blocks, |rounds| blocks.min((rounds * resident) as usize));
    // A grid has at most 2^31 - 1 blocks; they go on to further rows.
    let grid = blocks.min(i32::MAX as usize / tile.cluster as usize) as u32 * tile.cluster;
    let launch = Step::Launch { key: key(problem, program, tile), grid, threads: tile.threads(), shared_bytes: 0 };
    (problem.rows > 0).then_some(launch)
}

/// A forward tile, with the registers that codes and scales take: no second row in flight, and fewer blocks where a thread has many
/// packs.
fn with_registers(tile: Tile) -> Tile {
    let registers = match tile.packs {
        0..4 => 32,
        4..8 => 64,
        _ => 96,
    };
    let most = REGISTERS_PER_SM / (tile.threads() * registers);
    Tile { unroll: 1, blocks_per_sm: tile.blocks_per_sm.min(most).max(1), ..tile }
}

/// The kernel that copies codes transposed.
fn transpose(problem: &Problem, caps: &Caps) -> Option<Step> {
    let tile = Tile { pack: 8, packs: 1, threads_per_row: 256, groups: 1, blocks_per_sm: 4, ..Tile::NONE };
    // One code for all: bytes are bytes.
    let (norm, dtypes) = (Norm::Rms, DTypes::uniform(DType::F32));
    let quant = Some(QuantSpec::new(CodeType::E4m3, ScaleKind::Given));
    let mut key = key(&Problem { norm, dtypes, quant, ..*problem }, Program::TransposeCodes, tile);
    (key.tile.is_ragged, key.tile.has_tail) = (true, true);
    let tiles = problem.rows.div_ceil(SIDE) * problem.cols.div_ceil(SIDE);
    let grid = tiles.min((16 * caps.sms) as usize) as u32;
    (grid > 0).then_some(Step::Launch { key, grid, threads: tile.threads(), shared_bytes: 0 })
}

/// Bytes of all scales, with what lies between them.
fn scales_bytes(quant: &QuantSpec, problem: &Problem) -> usize {
    let size = match quant.scale_type() {
        ScaleType::F32 => size_of::<f32>(),
        ScaleType::E8m0 => 1,
    };
    quant.scales_len(problem.rows, problem.cols).unwrap_or(0) * size
}
