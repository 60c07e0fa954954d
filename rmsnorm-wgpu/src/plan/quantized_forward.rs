//! Forward to codes: the tile of a row, the steps before it (zeroing, tensor scale), and the
//! transposed copy.

use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding, ScaleType};
use rmsnorm_spec::{DType, DTypes, Norm, Problem, Storage, Tensor, TensorSet};

use super::{
    ALONG, Access, INPUTS, KernelKey, Layout, PAIR, Plan, PlanError, Program, Reduction, Step, Tile, forward, is_split,
    key, pairs, ranges, reduction, width,
};
use crate::caps::Caps;

/// Rows and columns of a tile of `transpose_codes.wgsl`.
pub(crate) const SIDE: u64 = 64;

/// Rows and columns of a tile of `columnwise.wgsl`.
pub(crate) const COLUMNWISE_TILE: (u64, u64) = (128, 64);

/// Threads on one row of such a tile.
const THREADS_ACROSS: u32 = COLUMNWISE_TILE.1 as u32 / PAIR as u32;

/// Maximum workgroup memory per thread: two sums in two buffers, and a magnitude.
const THREAD_BYTES: u32 = 20;

/// Byte scales per word.
const SCALES_OF_WORD: u32 = 4;

/// The plan of a quantized forward call.
pub(super) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, PlanError> {
    let Some(quant) = problem.quant else { return Ok(Plan::default()) };
    let mut steps = Vec::new();
    match quant.scale {
        ScaleKind::Given => {
            if problem.has(Tensor::Amax) && !quant.folds_amax {
                steps.push(clear(Tensor::Amax, ScaleType::F32, size_of::<f32>() as u64, layout, caps)?);
            }
            steps.extend(rows(problem, layout, caps)?);
        }
        ScaleKind::Current => {
            // The amax is stored in place of the scale, until the scale replaces it; then the scale
            // is given.
            steps.push(clear(Tensor::Scales, ScaleType::F32, size_of::<f32>() as u64, layout, caps)?);
            let found = problem.tensors.intersection(FOUND_FROM);
            steps.extend(rows(&Problem { tensors: found, ..*problem }, layout, caps)?);
            let bare = bare(problem, &[Tensor::Scales], QuantSpec::new(quant.codes, ScaleKind::Current));
            steps.push(one_workgroup(&bare, Program::TensorScale, layout, caps)?);
            let mut given = quant;
            given.scale = ScaleKind::Given;
            let tensors = problem.tensors.without(Tensor::Scales).with(Tensor::Scale);
            steps.extend(rows(&Problem { tensors, quant: Some(given), ..*problem }, layout, caps)?);
        }
        ScaleKind::Row | ScaleKind::Block { .. } | ScaleKind::Mx { .. } => {
            let shape = (problem.rows, problem.cols);
            steps.extend(clear_gaps(problem, Tensor::Scales, &quant, shape, (layout, caps))?);
            steps.extend(rows(problem, layout, caps)?);
        }
    }
    if problem.has(Tensor::CodesT) {
        steps.extend(transpose(problem, layout, caps)?);
    }
    if problem.has(Tensor::CodesColumnwise) {
        let (along, shape) = (quant.columnwise(), (problem.cols, problem.rows));
        // A byte scale's word is shared by several rows.
        let parts = Layout { scales_access: Access::Parts, ..*layout };
        steps.extend(clear_gaps(problem, Tensor::ScalesColumnwise, &along, shape, (&parts, caps))?);
        steps.extend(columnwise(problem, &along, layout, caps)?);
    }
    Ok(Plan { steps, ..Plan::default() })
}

/// The tensors of the pass that finds a tensor's amax.
pub(crate) const FOUND_FROM: TensorSet = INPUTS.with(Tensor::Scales);

/// The kernel of the rows, on all rows.
fn rows(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Vec<Step>, PlanError> {
    let (program, tile) = match tile(problem, caps) {
        Some(tile) if tile.packs <= layout.access.most_packs() => (Program::QuantizedForward, tile),
        Some(tile) => (Program::QuantizedForwardStreaming, Tile { packs: 1, ..tile }),
        None => (Program::QuantizedForwardStreaming, forward::streaming_tile(problem, layout.access, caps)),
    };
    let mut key =
        KernelKey { visits_once: forward::visits_once(problem, caps), ..key(problem, program, tile, layout, caps) };
    let is_words = layout.scales_access != Access::Parts;
    key.gathers_scales = is_words
        && !key.has_groups
        && key.call.quant.is_some_and(|quant| gathers_scales(&quant, &tile, is_split(problem)));
    forward::rows(problem, key, layout, caps)
}

/// The tile of a row in registers; `None` if it is too long. Columns that share a scale belong to
/// adjacent lanes.
fn tile(problem: &Problem, caps: &Caps) -> Option<Tile> {
    let tile = forward::tile(problem, caps)?;
    let lanes = problem.quant.and_then(|quant| lanes_of_set(quant.scale, is_split(problem))).unwrap_or(1);
    let threads = tile.threads_per_row.max(lanes);
    // Short rows share a workgroup, because a multiprocessor can hold only a few workgroups.
    let groups = if threads <= 64 { caps.threads_with(128, THREAD_BYTES) / threads } else { tile.groups }.max(1);
    let packs = pairs(problem).div_ceil(threads as usize) as u32;
    Some(Tile::new(threads, groups, packs, reduction(threads, groups, caps)))
}

/// Lanes whose columns share a scale; `None` if scales are not for adjacent columns.
pub(crate) const fn lanes_of_set(scale: ScaleKind, is_split: bool) -> Option<u32> {
    let cols = match scale {
        ScaleKind::Given | ScaleKind::Current | ScaleKind::Row => return None,
        ScaleKind::Block { cols, .. } => cols,
        ScaleKind::Mx { .. } => ScaleKind::MX_COLS,
    };
    // If the quads of a pair are apart, a lane has one quad of a scale's columns.
    Some((cols / if is_split { PAIR / 2 } else { PAIR }) as u32)
}

/// Whether shuffles combine the scales of a word.
pub(crate) fn gathers_scales(quant: &QuantSpec, tile: &Tile, is_split: bool) -> bool {
    let (Some(lanes), Reduction::Subgroup(most)) = (lanes_of_set(quant.scale, is_split), tile.reduction) else {
        return false;
    };
    let of_word = SCALES_OF_WORD * lanes;
    quant.scale_type() == ScaleType::E8m0 && of_word <= most && tile.threads_per_row.is_multiple_of(of_word)
}

/// Zeroes a tensor of `bytes` bytes.
fn clear(tensor: Tensor, elements: ScaleType, bytes: u64, layout: &Layout, caps: &Caps) -> Result<Step, PlanError> {
    let scale = match elements {
        ScaleType::F32 => ScaleKind::Row,
        ScaleType::E8m0 => ScaleKind::Mx { rounding: ScaleRounding::Up },
    };
    let problem = Problem::quantized_forward(Norm::Rms, 0, 1, DType::F32, QuantSpec::new(CodeType::E4m3, scale), &[]);
    let problem = Problem { tensors: TensorSet::of(&[tensor]), ..problem };
    let tile = Tile::new(caps.threads(256), 1, 1, Reduction::Workgroup);
    let access = if elements == ScaleType::E8m0 { layout.scales_access } else { Access::Words };
    let key = key(&problem, Program::Clear, tile, &Layout { access, is_aliased: false, ..*layout }, caps);
    Step::by_rows(key, 0..bytes, (4 * u64::from(tile.threads()), 1), caps)
}

/// A kernel of one workgroup, independent of rows.
fn one_workgroup(problem: &Problem, program: Program, layout: &Layout, caps: &Caps) -> Result<Step, PlanError> {
    let tile = Tile::new(caps.threads(32), 1, 1, Reduction::Workgroup);
    let key = key(problem, program, tile, &Layout { access: Access::Words, is_aliased: false, ..*layout }, caps);
    Step::dispatch(key, 0..1, 1, caps)
}

/// The kernel that transposes codes, on rows that fit a binding.
fn transpose(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Vec<Step>, PlanError> {
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
    let bare = bare(problem, &[Tensor::Codes, Tensor::CodesT], quant);
    let tile = Tile::new(caps.threads(256), 1, 1, Reduction::Workgroup);
    let key = key(&bare, Program::TransposeCodes, tile, &Layout { access: layout.transpose_access, ..*layout }, caps);
    let across = (problem.cols as u64).div_ceil(SIDE);
    let by_grid = (caps.most_groups() / across).max(1) * SIDE;
    let most = ranges::most_rows(problem, layout, 1, caps)?.min(by_grid);
    // Whole tiles, unless the device cannot bind one row of tiles.
    let most = if most >= SIDE { most / SIDE * SIDE } else { most };
    let ranges = ranges::split(problem.rows as u64, most);
    ranges.map(|rows| Step::by_rows(key, rows, (SIDE, across), caps)).collect()
}

/// The kernel of the columnwise copy of x, on blocks of rows that fit a binding.
fn columnwise(problem: &Problem, along: &QuantSpec, layout: &Layout, caps: &Caps) -> Result<Vec<Step>, PlanError> {
    let tensors = problem.tensors.intersection(ALONG_FROM);
    let copied = Problem { tensors, quant: Some(*along), ..*problem };
    let threads = caps.threads(256);
    let tile = Tile::new(THREADS_ACROSS, threads / THREADS_ACROSS, 1, Reduction::Workgroup);
    let key = key(&copied, Program::Columnwise, tile, layout, caps);
    let (height, across) = (COLUMNWISE_TILE.0, (width(problem) as u64).div_ceil(COLUMNWISE_TILE.1));
    let by_grid = (caps.most_groups() / across).max(1).saturating_mul(height);
    let most = ranges::most_rows(problem, layout, height as u32, caps)?.min(by_grid);
    // Whole tiles, or at least whole blocks.
    let block = along.scale.set_cols(problem.rows).map_or(height, |rows| rows as u64);
    let unit = if most >= height { height } else { block };
    if most < unit.min(problem.rows as u64) {
        return Err(PlanError::Columnwise { rows: block, most });
    }
    let ranges = ranges::split(problem.rows as u64, (most / unit).max(1) * unit);
    ranges.map(|rows| Step::by_rows(key, rows, (height, across), caps)).collect()
}

/// The tensors of the columnwise copy.
pub(crate) const ALONG_FROM: TensorSet = INPUTS.union(ALONG).with(Tensor::Mean).with(Tensor::Rstd);

/// Zeroes scales that have gaps: kernels write every scale, but not the gaps.
fn clear_gaps(
    problem: &Problem,
    tensor: Tensor,
    quant: &QuantSpec,
    (rows, cols): (usize, usize),
    (layout, caps): (&Layout, &Caps),
) -> Result<Option<Step>, PlanError> {
    let scales = |quant: &QuantSpec| quant.scales_len(rows, cols).unwrap_or(0);
    if scales(quant) <= scales(&quant.layout(ScaleLayout::RowMajor)) {
        return Ok(None);
    }
    let bytes = (scales(quant) * problem.storage(tensor).map_or(0, Storage::size)) as u64;
    clear(tensor, quant.scale_type(), bytes, layout, caps).map(Some)
}

/// A call of a kernel that reads no values: one program for all norms and dtypes.
fn bare(problem: &Problem, tensors: &[Tensor], quant: QuantSpec) -> Problem {
    Problem {
        norm: Norm::Rms,
        dtypes: DTypes::uniform(DType::F32),
        tensors: TensorSet::of(tensors),
        has_weight_offset: false,
        groups: 1,
        quant: Some(quant),
        ..*problem
    }
}
