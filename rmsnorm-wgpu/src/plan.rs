//! Turns a problem into dispatches: a pure function of the problem, its layout and the device's
//! capabilities.
//!
//! The assignment of columns to threads depends only on cols, dtypes, flags and capabilities. So
//! the bits of a row do not depend on the number of rows or on the position of a tensor.

mod backward;
#[cfg(any(test, feature = "conformance"))]
mod describe;
mod forward;
mod quantized_forward;
mod ranges;
mod sharing;
#[cfg(test)]
mod tests;
pub(crate) mod tuning;
pub(crate) mod uses;

use std::ops::Range;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_spec::{DType, Direction, Norm, Piece, Problem, Slot, Tensor, TensorSet};

use crate::caps::Caps;
use crate::unfit::PlanError;
#[cfg(test)]
pub(crate) use quantized_forward::{ALONG_FROM, FOUND_FROM, SIDE, gathers_scales};
pub(crate) use quantized_forward::{COLUMNWISE_TILE, lanes_of_set};
pub(crate) use ranges::{Layout, Placed};
pub(crate) use tuning::{KEPT, MOST_PACKS, PAIR, Tuning};
#[cfg(feature = "conformance")]
pub(crate) use tuning::{candidates, data::Name};

/// The tensors of calls of a direction. The workspace is left out: the other tensors determine the
/// part of it that a program uses.
const fn tensors(direction: Direction) -> TensorSet {
    direction.reads().union(direction.writes()).without(Tensor::Workspace)
}

const FORWARD: TensorSet = tensors(Direction::Forward);
const BACKWARD: TensorSet = tensors(Direction::Backward);
/// The inputs of backward's sums over a row: no gradient that is added after them, and no bias, of
/// which only the gradient of a gate is made.
const ROW_SUMS: TensorSet = Direction::Backward.reads().difference(LATE).without(Tensor::Bias);
/// The inputs of backward that belong to a piece before the norm, and that only backward has.
pub(crate) const LATE: TensorSet = {
    let (mut set, mut index) = (TensorSet::NONE, 0);
    while index < Piece::ALL.len() {
        let piece = Piece::ALL[index];
        if matches!(piece.slot(), Slot::Before) {
            set = set.union(piece.tensors(Direction::Backward));
        }
        index += 1;
    }
    set.intersection(Direction::Backward.reads()).difference(FORWARD)
};
/// The inputs of the codes, without a given scale.
const INPUTS: TensorSet = Direction::QuantizedForward.reads().intersection(FORWARD);
const COLUMNWISE: TensorSet = tensors(Direction::QuantizedForward).without(Tensor::CodesT);
const ALONG: TensorSet = TensorSet::of(&[Tensor::CodesColumnwise, Tensor::ScalesColumnwise]);
const CODES: TensorSet = COLUMNWISE.difference(ALONG);

rmsnorm_gpu::programs! {
    /// `forward.wgsl`: a row stays in registers.
    Forward = ("forward", Forward, FORWARD);
    /// `forward_streaming.wgsl`: a row is read two or three times, in a loop.
    ForwardStreaming = ("forward_streaming", Forward, FORWARD);
    /// `backward.wgsl`: a row stays in registers.
    Backward = ("backward", Backward, BACKWARD);
    /// `backward_row_sums.wgsl`, for streamed rows: mean_wdy and mean_wdy_xhat of every row.
    BackwardRowSums = ("backward_row_sums", Backward, ROW_SUMS);
    /// `backward_columns.wgsl`, for streamed rows: dx and the partial sums of dweight and dbias.
    BackwardColumns = ("backward_columns", Backward, BACKWARD);
    /// `reduce_partials.wgsl`
    ReducePartials = ("reduce_partials", Backward, TensorSet::SUMS_OVER_ROWS);
    /// `quantized_forward.wgsl`: a row stays in registers.
    QuantizedForward = ("quantized_forward", QuantizedForward, CODES);
    /// `quantized_forward_streaming.wgsl`: a row is read two to four times, in a loop.
    QuantizedForwardStreaming = ("quantized_forward_streaming", QuantizedForward, CODES);
    /// `transpose_codes.wgsl`
    TransposeCodes = ("transpose_codes", QuantizedForward, TensorSet::of(&[Tensor::Codes, Tensor::CodesT]));
    /// `columnwise.wgsl`.
    Columnwise = ("columnwise", QuantizedForward, COLUMNWISE);
    /// `tensor_scale.wgsl`: the scale of a tensor, from its amax.
    TensorScale = ("tensor_scale", QuantizedForward, TensorSet::of(&[Tensor::Scales]));
    /// `clear.wgsl`: zeroes a tensor for the next program.
    Clear = ("clear", QuantizedForward, TensorSet::of(&[Tensor::Scales, Tensor::Amax, Tensor::ScalesColumnwise]));
    /// `copy.wgsl`, the reference of measurements.
    Copy = ("copy", Forward, TensorSet::of(&[Tensor::X, Tensor::Y]));
}

impl Program {
    /// The properties of a program. Its text has code for the optional tensors, and omits tensors
    /// that a call does not have; a copy has x and y.
    pub(crate) const fn info(self) -> rmsnorm_gpu::program::Program {
        let (stem, direction, optional) = self.row();
        let is_reduction = matches!(self, Program::ReducePartials);
        rmsnorm_gpu::program::Program { stem, direction, is_reduction, stores_gradients: is_reduction, optional }
    }

    /// Whether this is a forward pass, to floats or to codes.
    pub(crate) const fn is_forward(self) -> bool {
        matches!(self, Program::Forward | Program::ForwardStreaming) || self.writes_codes()
    }

    /// Whether this writes codes: a forward pass to codes, or the columnwise copy.
    pub(crate) const fn writes_codes(self) -> bool {
        matches!(self, Program::QuantizedForward | Program::QuantizedForwardStreaming | Program::Columnwise)
    }

    /// Whether each column belongs to one thread. The other programs loop over columns or divide
    /// them in another way.
    pub(crate) const fn is_on_chip(self) -> bool {
        matches!(self, Program::Forward | Program::Backward | Program::QuantizedForward)
    }
}

/// How a dispatch reads and writes its matrices and vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Access {
    /// By pack: everything is aligned, and a row has whole packs.
    Aligned,
    /// By 32-bit word: no word has elements of two rows or tensors.
    Words,
    /// By part of a word (16 bits, or a byte of codes), because another thread may write the rest
    /// of the word.
    Parts,
}

impl Access {
    /// Packs that are read in straight-line code; more packs use a loop. Code for words and parts
    /// is long: llvmpipe took 1.25 s to compile eight packs of 16-bit parts.
    const fn most_packs(self) -> u32 {
        match self {
            Access::Aligned => u32::MAX,
            Access::Words => 4,
            Access::Parts => 1,
        }
    }
}

/// How threads combine their partial sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reduction {
    /// Through workgroup memory.
    Workgroup,
    /// With shuffles in subgroups of this many lanes, then through workgroup memory.
    Subgroup(u32),
}

/// How threads share a row, and a workgroup its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Threads on one row; a power of two, or a multiple of 32. In `ReducePartials`: threads on
    /// neighbouring quads of columns.
    pub(crate) threads_per_row: u32,
    /// Rows that a workgroup processes side by side; a power of two. In `ReducePartials`: threads
    /// on one column.
    pub(crate) groups: u32,
    /// Pairs of quads (8 columns) that a thread owns. In programs that loop: the pairs of an
    /// iteration.
    pub(crate) packs: u32,
    /// Rows that a thread of `Backward` processes at once; 1 in the other programs.
    pub(crate) rows_at_once: u32,
    /// Whether a thread of `Backward` loads its part of a row twice instead of keeping it in
    /// registers.
    pub(crate) reads_again: bool,
    /// How sums over a row are combined; `Workgroup` in programs without such sums.
    pub(crate) reduction: Reduction,
}

impl Tile {
    /// A tile with one row at once.
    pub(crate) const fn new(threads_per_row: u32, groups: u32, packs: u32, reduction: Reduction) -> Self {
        Tile { threads_per_row, groups, packs, rows_at_once: 1, reads_again: false, reduction }
    }

    /// Threads of a workgroup.
    pub(crate) const fn threads(&self) -> u32 {
        self.threads_per_row * self.groups
    }

    /// Columns that the threads of a row own.
    pub(crate) const fn columns(&self) -> usize {
        (self.threads_per_row * self.packs) as usize * PAIR
    }

    /// Whether the subgroup sums of a row are added with shuffles too, and so read once instead of
    /// by every thread.
    pub(crate) const fn shuffles_twice(&self, lanes: u32) -> bool {
        let senders = self.threads_per_row / lanes;
        8 < senders && senders <= lanes
    }

    /// Terms that a thread adds in the first of the two passes of `reduce_workgroup.wgsl`: about
    /// the square root of the threads per row.
    pub(crate) const fn segment(&self) -> u32 {
        if self.threads_per_row > 256 { 32 } else { 16 }
    }
}

/// Everything that a program is compiled for. Dispatches with equal keys run the same code. Fields
/// that do not matter to a program have a fixed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) program: Program,
    /// The tensors that the program has code for. In place: y without x, and residual_out without
    /// residual.
    pub(crate) call: CallKey,
    /// Whether weight_offset is added to the weight.
    pub(crate) has_weight_offset: bool,
    pub(crate) tile: Tile,
    pub(crate) access: Access,
    /// Whether the threads of a row own exactly its columns, so that the code needs no bounds
    /// check.
    pub(crate) is_whole: bool,
    /// Whether inputs are declared `read_write`, because one shares its buffer with an output.
    pub(crate) aliased: bool,
    /// Whether `Forward` loads weights together with x.
    pub(crate) is_early: bool,
    /// Whether a streaming program of layer norm makes both sums of a row in one pass.
    pub(crate) visits_once: bool,
    /// Whether the first lane of a word's lanes writes the word's four byte scales at once.
    pub(crate) gathers_scales: bool,
    /// Whether the grid's third dimension counts groups of columns.
    pub(crate) has_groups: bool,
    /// Whether vectors and statistics lie in the workspace, because the device has too few bindings.
    pub(crate) shares_binding: bool,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Zeroes `len` f32 of the workspace, from element `first`.
    Zero { first: u64, len: u64 },
    /// Dispatches a kernel.
    Dispatch(Dispatch),
}

/// A kernel and its part of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    pub(crate) key: KernelKey,
    /// The call's rows that this dispatch processes; bindings begin at the first. Empty in
    /// `ReducePartials`; elements in `Copy`, bytes in `Clear`.
    pub(crate) rows: Range<u64>,
    /// Partial row of this dispatch's first chunk.
    pub(crate) first_chunk: u32,
    /// Chunks of the dispatch's rows; the gradients of a chunk are summed sequentially. 0 in
    /// programs without gradients.
    pub(crate) chunks: u32,
    /// Whether the sums are added to partial rows that an earlier dispatch wrote.
    pub(crate) accumulates: bool,
    /// Workgroups in x and y; surplus workgroups do nothing.
    pub(crate) grid: [u32; 2],
    /// The tensors that share the workspace's binding, and their first f32 in the workspace.
    pub(crate) shared: Vec<(Tensor, u64)>,
    /// The tensor that `Copy` moves to the workspace or back; `None` if it copies x to y.
    pub(crate) moved: Option<Moved>,
}

/// A part of a tensor that is copied to the workspace, or from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) tensor: Tensor,
    /// The first element.
    pub(crate) first: u64,
    /// The first f32 in the workspace.
    pub(crate) at: u64,
    /// Whether it is copied to the workspace.
    pub(crate) is_input: bool,
}

impl Dispatch {
    /// A dispatch of no workgroups, without partial sums.
    fn new(key: KernelKey, rows: Range<u64>) -> Self {
        let (shared, moved) = (Vec::new(), None);
        Dispatch { key, rows, first_chunk: 0, chunks: 0, accumulates: false, grid: [0; 2], shared, moved }
    }
}

impl Step {
    /// A kernel without partial sums, in `workgroups` workgroups.
    ///
    /// # Errors
    /// [`PlanError::Grid`]
    fn dispatch(key: KernelKey, rows: Range<u64>, workgroups: u64, caps: &Caps) -> Result<Self, PlanError> {
        let grid = ranges::grid(workgroups, caps)?;
        Ok(Step::Dispatch(Dispatch { grid, ..Dispatch::new(key, rows) }))
    }

    /// The same, as a copy of this part of a tensor.
    const fn moving(mut self, moved: Moved) -> Self {
        if let Step::Dispatch(dispatch) = &mut self {
            dispatch.moved = Some(moved);
        }
        self
    }

    /// The same with `across` workgroups for every `each` rows.
    fn by_rows(key: KernelKey, rows: Range<u64>, (each, across): (u64, u64), caps: &Caps) -> Result<Self, PlanError> {
        let workgroups = (rows.end - rows.start).div_ceil(each) * across;
        Step::dispatch(key, rows, workgroups, caps)
    }
}

/// The steps and the workspace of one call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In execution order.
    pub(crate) steps: Vec<Step>,
    /// Layout of the workspace.
    pub(crate) workspace: Workspace,
    /// Rows of partial sums. All are written before the last step reads them.
    pub(crate) partial_rows: u32,
}

impl Plan {
    /// The keys of the dispatched kernels, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = KernelKey> {
        self.steps.iter().filter_map(|step| match step {
            Step::Dispatch(dispatch) => Some(dispatch.key),
            Step::Zero { .. } => None,
        })
    }
}

/// Layout of the workspace, in f32 elements from its start, which `launch` rounds up to 16 bytes.
/// The partial rows of dweight come first, then the partial rows of dbias, each padded to a
/// multiple of 8 columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Workspace {
    /// Start of the dispatch's row sums, two per row; a multiple of 4.
    pub(crate) row_sums: u64,
    /// Total elements, with room for the rounding; 0 if nothing is bound.
    pub(crate) len: u64,
}

/// Packs of `Forward` whose weights and biases are loaded before their y are stored.
pub(crate) const FORWARD_BATCH: u32 = 4;

/// The same with biases, and 64 registers per thread of which 32 hold the row. Layer norm of 65536
/// columns, H200 through wgpu: 185 us, 206 us with four packs, 198 us one by one. RMS norm: 155 us,
/// 149 us with four.
pub(crate) const CROWDED_BATCH: u32 = 2;

/// Most rows for which `Forward` loads weights together with x: too few to fill a device.
const EARLY_ROWS: usize = 256;

/// Row counts at which the plan changes, for the conformance suite: the rows of a workgroup, and
/// one chunk per workgroup of a software device.
#[cfg(any(test, feature = "conformance"))]
pub(crate) const ROWS_BREAKPOINTS: [usize; 2] = [8, 16];

/// The plan of a problem with this layout.
///
/// # Errors
/// [`PlanError`] with the rule of the device or of WGSL.
pub(crate) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, PlanError> {
    caps.check()?;
    let (groups, most) = (problem.groups as u64, u64::from(caps.groups_per_dimension));
    if groups > most {
        return Err(PlanError::Grid { groups, most });
    }
    let plan = match problem.direction {
        Direction::Forward => forward::plan(problem, layout, caps),
        Direction::QuantizedForward => quantized_forward::plan(problem, layout, caps),
        Direction::Backward => backward::plan(problem, layout, caps),
    };
    sharing::with_copies(plan?, problem, layout, caps)
}

/// A copy of `len` elements: one row, divided into ranges with a dispatch each.
/// `size_of(dtype) * rows.start` is a multiple of 16.
///
/// # Errors
/// [`PlanError::Device`]
pub(crate) fn copy(dtype: DType, len: u64, access: Access, aliased: bool, caps: &Caps) -> Result<Vec<Step>, PlanError> {
    caps.check()?;
    // GB/s on an H200, 64 MB and 256 MB: 512 threads of 16 bytes 3900 and 4190, 128 threads the
    // same, 256 threads of 32 bytes 3840 and 4100, of 64 bytes 3757 and 4057.
    let tile = Tile::new(caps.threads(512), 1, 1, Reduction::Workgroup);
    let problem = Problem::forward(Norm::Rms, 1, len as usize, dtype, TensorSet::NONE);
    let layout = Layout { access, is_aliased: aliased, ..Layout::dense(&problem) };
    let key = key(&problem, Program::Copy, tile, &layout, caps);
    let owned = tile.columns() as u64;
    let most = (caps.available_bytes() / dtype.size() as u64).min(owned * caps.most_groups());
    let ranges = ranges::split(len, (most / 16 * 16).max(16));
    ranges.map(|rows| Step::by_rows(key, rows, (owned, 1), caps)).collect()
}

/// Workspace, in f32, that suffices for every layout of the problem; 0 without a plan.
pub(crate) fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
    match problem.direction {
        Direction::Forward | Direction::QuantizedForward => 0,
        Direction::Backward => usize::try_from(backward::workspace_len(problem, caps)).unwrap_or(usize::MAX),
    }
}

/// Columns that have statistics of their own: of a row, or of one of its groups.
const fn width(problem: &Problem) -> usize {
    problem.cols / problem.groups
}

/// Pairs of quads of these columns.
const fn pairs(problem: &Problem) -> usize {
    width(problem).div_ceil(PAIR)
}

/// The dtype of the residual stream, if the call has one.
fn stream(problem: &Problem) -> Option<DType> {
    let is_of_stream = problem.tensors.adds_residual() || problem.tensors.is_cast();
    let has_stream = problem.direction == Direction::Backward || is_of_stream;
    has_stream.then_some(problem.dtypes.residual)
}

/// Number of vector gradients.
fn gradients(problem: &Problem) -> u64 {
    problem.tensors.sums_over_rows() as u64
}

/// Whether a matrix is f32: the two quads of a pair are then apart and take twice the registers.
fn is_split(problem: &Problem) -> bool {
    problem.dtypes.activation == DType::F32 || stream(problem) == Some(DType::F32)
}

/// Whether a pair takes twice the registers: it is f32, or a gate is held beside it.
fn is_wide(problem: &Problem) -> bool {
    is_split(problem) || problem.gate.is_some()
}

/// The number of threads, a multiple of 32 (the usual subgroup size), with no idle thread, for the
/// first of `packs` that fits. Threads then own exactly the columns of a row, and the code needs no
/// bounds check.
fn threads_without_idle(pairs: usize, packs: &[u32], most: u32) -> Option<u32> {
    let threads =
        packs.iter().filter(|packs| pairs.is_multiple_of(**packs as usize)).map(|packs| pairs / *packs as usize);
    let mut fitting = threads.filter(|threads| threads.is_multiple_of(32) && *threads <= most as usize);
    fitting.next().map(|threads| threads as u32)
}

/// How the threads of a row combine their sums, in workgroups of `groups` rows: with subgroups if
/// that shortens the chain of additions.
///
/// us for bf16 RMS norm, H200 through wgpu, subgroups and workgroup memory: forward of 16384
/// columns on 256 threads 145 and 154, of 1024 columns on 64 threads 46.2 and 48.6; backward of
/// 16384 columns on 1024 threads 240 and 262.
fn reduction(threads_per_row: u32, groups: u32, caps: &Caps) -> Reduction {
    match caps.subgroup {
        // Subgroups must be full, because lanes are numbered within their subgroup.
        Some(lanes)
            if (threads_per_row * groups).is_multiple_of(lanes) && threads_per_row <= 128.max(lanes * lanes) =>
        {
            Reduction::Subgroup(lanes)
        }
        _ => Reduction::Workgroup,
    }
}

fn key(problem: &Problem, program: Program, tile: Tile, layout: &Layout, caps: &Caps) -> KernelKey {
    let info = program.info();
    let call = info.key(problem);
    let has_weight = call.tensors.has(Tensor::Weight) || call.tensors.has(Tensor::NextWeight);
    let key = KernelKey {
        program,
        call,
        has_weight_offset: has_weight && problem.has_weight_offset,
        tile,
        access: if info.is_reduction { layout.reduce_access } else { layout.access },
        is_whole: program.is_on_chip() && layout.access == Access::Aligned && width(problem) == tile.columns(),
        aliased: if info.is_reduction { layout.reduce_aliased } else { layout.is_aliased },
        is_early: program == Program::Forward && problem.rows <= EARLY_ROWS,
        visits_once: false,
        gathers_scales: false,
        has_groups: problem.groups > 1,
        shares_binding: false,
    };
    KernelKey { shares_binding: uses::bound(&key).len() > caps.storage_buffers as usize, ..key }
}
