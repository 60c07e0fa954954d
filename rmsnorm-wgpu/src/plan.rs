//! How a problem becomes dispatches: a pure function of the problem, of how its tensors lie, and of the device's
//! capabilities.
//!
//! Which thread owns which columns depends on cols, dtypes, flags and capabilities only, so that a row's bits do not
//! depend on the number of rows or on where a tensor lies.

mod backward;
#[cfg(any(test, feature = "conformance"))]
mod describe;
mod forward;
mod quantized_forward;
mod ranges;
#[cfg(test)]
mod tests;
mod tuning;
mod unfit;

use std::ops::Range;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_spec::{DType, Direction, Norm, Problem, Tensor, TensorSet};

use crate::caps::Caps;
#[cfg(test)]
pub(crate) use quantized_forward::{ALONG_FROM, FOUND_FROM, SIDE, gathers_scales};
pub(crate) use quantized_forward::{COLUMNWISE_TILE, lanes_of_set};
pub(crate) use ranges::{Layout, Placed};
pub(crate) use tuning::{KEPT, Tuning};
#[cfg(feature = "conformance")]
pub(crate) use tuning::{candidates, data::Name};
pub(crate) use unfit::Unfit;

const INPUTS: TensorSet = TensorSet::of(&[Tensor::X, Tensor::Residual, Tensor::Weight, Tensor::Bias]);
const OUTPUTS: TensorSet = TensorSet::of(&[Tensor::Y, Tensor::ResidualOut, Tensor::Mean, Tensor::Rstd]);
const NEXT: TensorSet = TensorSet::of(&[Tensor::NextWeight, Tensor::NextBias, Tensor::NextMean, Tensor::NextRstd]);
const CODES: TensorSet = TensorSet::of(&[Tensor::Codes, Tensor::Scale, Tensor::Scales, Tensor::Amax]);
const ALONG: TensorSet = TensorSet::of(&[Tensor::CodesColumnwise, Tensor::ScalesColumnwise]);
const GRADIENTS: TensorSet = TensorSet::of(&[Tensor::Dweight, Tensor::Dbias]);
const ROW_SUMS: TensorSet = TensorSet::of(&[Tensor::X, Tensor::Weight, Tensor::Mean, Tensor::Rstd, Tensor::Dy]);
const STREAMS: TensorSet = TensorSet::of(&[Tensor::DresidualOut, Tensor::Dx, Tensor::Dresidual]);

rmsnorm_gpu::programs! {
    /// `forward.wgsl`: a row stays in registers.
    Forward = ("forward", Forward, INPUTS.union(OUTPUTS).union(NEXT));
    /// `forward_streaming.wgsl`: a row is read two or three times, in a loop.
    ForwardStreaming = ("forward_streaming", Forward, INPUTS.union(OUTPUTS).union(NEXT));
    /// `backward.wgsl`: a row stays in registers.
    Backward = ("backward", Backward, ROW_SUMS.union(STREAMS).union(GRADIENTS));
    /// `backward_row_sums.wgsl`, for rows that stream: mean_wdy and mean_wdy_xhat of every row.
    BackwardRowSums = ("backward_row_sums", Backward, ROW_SUMS);
    /// `backward_columns.wgsl`, for rows that stream: dx and the partial sums of dweight and dbias.
    BackwardColumns = ("backward_columns", Backward, ROW_SUMS.union(STREAMS).union(GRADIENTS));
    /// `reduce_partials.wgsl`
    ReducePartials = ("reduce_partials", Backward, GRADIENTS);
    /// `quantized_forward.wgsl`: a row stays in registers.
    QuantizedForward = ("quantized_forward", QuantizedForward, INPUTS.union(OUTPUTS).union(CODES));
    /// `quantized_forward_streaming.wgsl`: a row is read two to four times, in a loop.
    QuantizedForwardStreaming = ("quantized_forward_streaming", QuantizedForward, INPUTS.union(OUTPUTS).union(CODES));
    /// `transpose_codes.wgsl`
    TransposeCodes = ("transpose_codes", QuantizedForward, TensorSet::of(&[Tensor::Codes, Tensor::CodesT]));
    /// `columnwise.wgsl`. It has the files of those that write codes, and so functions for all of their tensors.
    Columnwise = ("columnwise", QuantizedForward, INPUTS.union(OUTPUTS).union(CODES).union(ALONG));
    /// `tensor_scale.wgsl`: the scale of a tensor from its largest magnitude.
    TensorScale = ("tensor_scale", QuantizedForward, TensorSet::of(&[Tensor::Scales]));
    /// `clear.wgsl`: zeroes a tensor for the program behind it.
    Clear = ("clear", QuantizedForward, TensorSet::of(&[Tensor::Scales, Tensor::Amax, Tensor::ScalesColumnwise]));
    /// `copy.wgsl`, the yardstick of measurements.
    Copy = ("copy", Forward, TensorSet::of(&[Tensor::X, Tensor::Y]));
}

impl Program {
    /// What it is: everything that the other rooms ask of a program. Its text has code for its optional tensors, and leaves out those
    /// that a call has not got; a copy has an x and a y. The workspace is not among them: which part of it a program has
    /// follows from the others.
    pub(crate) const fn info(self) -> rmsnorm_gpu::program::Program {
        let (stem, direction, optional) = self.row();
        let is_reduction = matches!(self, Program::ReducePartials);
        rmsnorm_gpu::program::Program { stem, direction, is_reduction, stores_gradients: is_reduction, optional }
    }

    /// Whether this is a forward pass, to floats or to codes.
    pub(crate) const fn is_forward(self) -> bool {
        matches!(self, Program::Forward | Program::ForwardStreaming) || self.writes_codes()
    }

    /// Whether this is a forward pass to codes, or the copy along columns, which makes codes of x too.
    pub(crate) const fn writes_codes(self) -> bool {
        matches!(self, Program::QuantizedForward | Program::QuantizedForwardStreaming | Program::Columnwise)
    }

    /// Whether every column belongs to one thread; the other programs walk through the columns, or share them otherwise.
    pub(crate) const fn is_on_chip(self) -> bool {
        matches!(self, Program::Forward | Program::Backward | Program::QuantizedForward)
    }
}

/// How the matrices and vectors of a dispatch are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Access {
    /// By the pack: everything lies on its bytes, and a row has no part of one.
    Aligned,
    /// By the 32-bit word: no word has elements of two rows or tensors.
    Words,
    /// By the part of a word that somebody else may write to: halves, and bytes of codes.
    Parts,
}

impl Access {
    /// Packs that are read in straight-line code; more take a loop. Code for single words and parts is long: eight packs
    /// of halves took llvmpipe 1.25 s to compile.
    const fn most_packs(self) -> u32 {
        match self {
            Access::Aligned => u32::MAX,
            Access::Words => 4,
            Access::Parts => 1,
        }
    }
}

/// How threads exchange their sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Flavour {
    /// Through workgroup memory.
    Workgroup,
    /// By shuffles in subgroups of so many lanes, then through workgroup memory.
    Subgroup(u32),
}

/// How threads share a row and a workgroup its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Threads on one row; a power of two, or a multiple of 32. In `ReducePartials` those on neighbouring quads of columns.
    pub(crate) threads_per_row: u32,
    /// Rows a workgroup works on side by side; a power of two. In `ReducePartials` threads on one column.
    pub(crate) groups: u32,
    /// Pairs of quads, 8 columns, that a thread owns; in the programs that loop over them, those of a turn.
    pub(crate) packs: u32,
    /// Rows that a thread of `Backward` works on at once; 1 in the other programs.
    pub(crate) rows_at_once: u32,
    /// Whether a thread of `Backward` reads what it has of a row a second time instead of keeping it.
    pub(crate) reads_again: bool,
    /// How sums over a row are made; `Workgroup` in programs that have none.
    pub(crate) flavour: Flavour,
}

impl Tile {
    /// Threads that work on one row at once.
    pub(crate) const fn new(threads_per_row: u32, groups: u32, packs: u32, flavour: Flavour) -> Self {
        Tile { threads_per_row, groups, packs, rows_at_once: 1, reads_again: false, flavour }
    }

    /// Threads of a workgroup.
    pub(crate) const fn threads(&self) -> u32 {
        self.threads_per_row * self.groups
    }

    /// Columns that the threads of a row own.
    pub(crate) const fn columns(&self) -> usize {
        (self.threads_per_row * self.packs) as usize * PAIR
    }

    /// Whether the sums of a row's subgroups, too, are added by shuffles: they are then read once, not by every thread.
    pub(crate) const fn shuffles_twice(&self, lanes: u32) -> bool {
        let senders = self.threads_per_row / lanes;
        8 < senders && senders <= lanes
    }

    /// Terms that a thread adds in the first of the two visits of `reduce_workgroup.wgsl`: about the root of the
    /// threads on a row.
    pub(crate) const fn segment(&self) -> u32 {
        if self.threads_per_row > 256 { 32 } else { 16 }
    }
}

/// Everything a program is compiled for. Two dispatches with equal keys run the same code; what does not matter to a
/// program has one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) program: Program,
    /// Of the tensors, those that the program has code for. In place, y without x and residual_out without residual.
    pub(crate) call: CallKey,
    /// Whether a number is added to the weight.
    pub(crate) has_weight_offset: bool,
    pub(crate) tile: Tile,
    pub(crate) access: Access,
    /// Whether the packs of a row's threads are just its columns, so that nothing asks which of them exist.
    pub(crate) is_whole: bool,
    /// Whether inputs are declared `read_write`, since one lies in a buffer that is also written.
    pub(crate) aliased: bool,
    /// Whether `Forward` loads weights together with x.
    pub(crate) is_early: bool,
    /// Whether a streaming program of layer norm makes both sums of a row in one visit.
    pub(crate) visits_once: bool,
    /// Whether the scales of a word, which are bytes, are written as one by the first of their lanes.
    pub(crate) gathers_scales: bool,
}

/// One thing to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Zeroes so many f32 of the workspace, from that element.
    Zero { first: u64, len: u64 },
    /// Dispatches a kernel.
    Dispatch(Dispatch),
}

/// A kernel, and what of the call it is to work on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dispatch {
    pub(crate) key: KernelKey,
    /// Of the call's rows, those that this dispatch has; its bindings begin at the first. Empty in `ReducePartials`;
    /// elements in `Copy`, bytes in `Clear`.
    pub(crate) rows: Range<u64>,
    /// Partial row of the first of this dispatch's chunks.
    pub(crate) first_chunk: u32,
    /// Sets of the dispatch's rows whose gradients are summed one after the other; 0 in programs without.
    pub(crate) chunks: u32,
    /// Whether an earlier dispatch has written these partial rows, so that sums are added to what is there.
    pub(crate) accumulates: bool,
    /// Workgroups in x and y; surplus ones do nothing.
    pub(crate) grid: [u32; 2],
}

impl Step {
    /// A kernel that makes no partial sums, in so many workgroups.
    ///
    /// # Errors
    /// [`Unfit::Grid`]
    fn dispatch(key: KernelKey, rows: Range<u64>, workgroups: u64, caps: &Caps) -> Result<Self, Unfit> {
        let grid = ranges::grid(workgroups, caps)?;
        Ok(Step::Dispatch(Dispatch { key, rows, first_chunk: 0, chunks: 0, accumulates: false, grid }))
    }

    /// The same with so many workgroups for every so many rows.
    fn by_rows(key: KernelKey, rows: Range<u64>, (each, across): (u64, u64), caps: &Caps) -> Result<Self, Unfit> {
        let workgroups = (rows.end - rows.start).div_ceil(each) * across;
        Step::dispatch(key, rows, workgroups, caps)
    }
}

/// How one call is executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In order.
    pub(crate) steps: Vec<Step>,
    /// Where the parts of the workspace lie.
    pub(crate) workspace: Workspace,
    /// Rows of partial sums, all of them written by the time the last step reads them.
    pub(crate) partial_rows: u32,
}

impl Plan {
    /// The kernels that it dispatches, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = KernelKey> {
        self.steps.iter().filter_map(|step| match step {
            Step::Dispatch(dispatch) => Some(dispatch.key),
            Step::Zero { .. } => None,
        })
    }
}

/// The parts of the workspace, as f32 elements from its start, which `launch` rounds up to 16 bytes. Partial rows come
/// first: those of dweight, then those of dbias, each padded to a multiple of 8 columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Workspace {
    /// Where the sums of the dispatch's rows begin, two each; a multiple of 4.
    pub(crate) row_sums: u64,
    /// Elements in all, with room for the rounding; 0 if nothing is bound.
    pub(crate) len: u64,
}

/// Columns of a pair of quads, which is what threads own.
pub(crate) const PAIR: usize = 8;

/// Pairs of a row that a thread of forward has in registers at most, and those of a block of a longer row (`ends_block`) at least.
pub(crate) const MOST_PACKS: u32 = 8;

/// Packs of `Forward` whose weights and biases are read before their y are written.
pub(crate) const FORWARD_BATCH: u32 = 4;

/// The same where a thread has 64 registers, 32 of them with its row, and biases. Layer norm of 65536 columns, H200 through wgpu:
/// 185 us, by four packs 206, one by one 198; RMS norm 155, by four 149.
pub(crate) const CROWDED_BATCH: u32 = 2;

/// Rows up to which `Forward` loads weights together with x: as many as hardly fill a device.
const EARLY_ROWS: usize = 256;

/// Row counts at which the plan changes, for the conformance suite: a workgroup's rows, a chunk for every workgroup of
/// a software device.
#[cfg(any(test, feature = "conformance"))]
pub(crate) const ROWS_BREAKPOINTS: [usize; 2] = [8, 16];

/// The plan of a problem whose tensors lie as `layout` says.
///
/// # Errors
/// [`Unfit`] with the rule that the device, or WGSL, sets.
pub(crate) fn plan(problem: &Problem, layout: &Layout, caps: &Caps) -> Result<Plan, Unfit> {
    caps.check()?;
    match problem.direction {
        Direction::Forward => forward::plan(problem, layout, caps),
        Direction::QuantizedForward => quantized_forward::plan(problem, layout, caps),
        Direction::Backward => backward::plan(problem, layout, caps),
    }
}

/// The plan of a copy of `len` elements: one row, of ranges of which each is a dispatch. `size_of(dtype) * rows.start`
/// is a multiple of 16.
///
/// # Errors
/// [`Unfit::Device`]
pub(crate) fn copy(dtype: DType, len: u64, access: Access, aliased: bool, caps: &Caps) -> Result<Plan, Unfit> {
    caps.check()?;
    // 512 threads of 16 bytes, on an H200: 3900 GB/s of 64 MB, 4190 of 256 MB; 128 threads the same; 256 with 32 bytes
    // 3840 and 4100, with 64 bytes 3757 and 4057.
    let tile = Tile::new(caps.threads(512), 1, 1, Flavour::Workgroup);
    let problem = Problem::forward(Norm::Rms, 1, len as usize, dtype, TensorSet::NONE);
    let key = key(&problem, Program::Copy, tile, &Layout { access, is_aliased: aliased, ..Layout::dense(&problem) });
    let owned = tile.columns() as u64;
    let most = (caps.available_bytes() / dtype.size() as u64).min(owned * caps.most_groups());
    let ranges = ranges::split(len, (most / 16 * 16).max(16));
    let steps = ranges.map(|rows| Step::by_rows(key, rows, (owned, 1), caps));
    Ok(Plan { steps: steps.collect::<Result<_, _>>()?, ..Plan::default() })
}

/// f32 elements of workspace that suffice however the tensors of the problem lie; 0 for what has no plan.
pub(crate) fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
    match problem.direction {
        Direction::Forward | Direction::QuantizedForward => 0,
        Direction::Backward => usize::try_from(backward::workspace_len(problem, caps)).unwrap_or(usize::MAX),
    }
}

/// Pairs of quads in a row.
const fn pairs(cols: usize) -> usize {
    cols.div_ceil(PAIR)
}

/// The dtype of the residual stream, if the call has one.
fn stream(problem: &Problem) -> Option<DType> {
    let has_stream = problem.direction == Direction::Backward || problem.tensors.adds_residual();
    has_stream.then_some(problem.dtypes.residual)
}

/// Gradients of vectors.
fn gradients(problem: &Problem) -> u64 {
    problem.tensors.sums_over_rows() as u64
}

/// Whether a matrix is f32, so that the two quads of a pair lie apart and take twice the registers.
fn is_split(problem: &Problem) -> bool {
    problem.dtypes.activation == DType::F32 || stream(problem) == Some(DType::F32)
}

/// Threads with one of these numbers of packs each, the first that fits, and no thread idle: where threads own just the
/// columns there are, nothing asks which of them exist. They are whole subgroups, of 32 lanes as most devices have them.
fn threads_without_idle(pairs: usize, packs: &[u32], most: u32) -> Option<u32> {
    let threads =
        packs.iter().filter(|packs| pairs.is_multiple_of(**packs as usize)).map(|packs| pairs / *packs as usize);
    let mut fitting = threads.filter(|threads| threads.is_multiple_of(32) && *threads <= most as usize);
    fitting.next().map(|threads| threads as u32)
}

/// How a row's threads exchange their sums, in workgroups of `groups` rows: by subgroups where they shorten the chain of
/// additions.
///
/// bf16 RMS norm, H200 through wgpu: forward of 16384 columns on 256 threads, subgroups 145 us, workgroup memory 154; of
/// 1024 on 64 46.2 and 48.6. Backward of 16384 on 1024 threads 240 and 262.
fn flavour(threads_per_row: u32, groups: u32, caps: &Caps) -> Flavour {
    match caps.subgroup {
        // Subgroups must be full: a lane is counted within its own.
        Some(lanes)
            if (threads_per_row * groups).is_multiple_of(lanes) && threads_per_row <= 128.max(lanes * lanes) =>
        {
            Flavour::Subgroup(lanes)
        }
        _ => Flavour::Workgroup,
    }
}

fn key(problem: &Problem, program: Program, tile: Tile, layout: &Layout) -> KernelKey {
    let info = program.info();
    let call = info.key(problem);
    let has_weight = call.tensors.has(Tensor::Weight) || call.tensors.has(Tensor::NextWeight);
    KernelKey {
        program,
        call,
        has_weight_offset: has_weight && problem.has_weight_offset,
        tile,
        access: if info.is_reduction { layout.reduce_access } else { layout.access },
        is_whole: program.is_on_chip() && layout.access == Access::Aligned && problem.cols == tile.columns(),
        aliased: if info.is_reduction { layout.reduce_aliased } else { layout.is_aliased },
        is_early: program == Program::Forward && problem.rows <= EARLY_ROWS,
        visits_once: false,
        gathers_scales: false,
    }
}
