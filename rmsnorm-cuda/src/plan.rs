//! How a problem becomes launches: a pure function of the problem, the alignment and the device's capabilities.
//!
//! Which thread owns which columns depends on cols, dtypes and flags only, so that a row's bits do not depend on the
//! number of rows or on where a tensor lies.

mod backward;
mod chain;
pub(crate) mod columns;
#[cfg(any(test, feature = "conformance"))]
mod describe;
mod forward;
#[cfg(feature = "peers")]
pub(crate) mod forward_exchange;
#[cfg(feature = "peers")]
pub(crate) mod gather_numbers;
mod quantized_forward;
#[cfg(feature = "peers")]
pub(crate) mod ranks;
#[cfg(feature = "peers")]
pub(crate) mod reduce_forward;
#[cfg(feature = "peers")]
pub(crate) mod reduce_forward_rows;
#[cfg(test)]
mod tests;
mod tuning;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_gpu::tuning::{Rung, find};
use rmsnorm_spec::{DType, Direction, Norm, Problem, Tensor, TensorSet};

use crate::caps::Caps;
#[cfg(test)]
pub(crate) use tests::drawn_devices;
pub(crate) use tuning::{KEPT, Tuning};
#[cfg(feature = "conformance")]
pub(crate) use tuning::{
    candidates,
    data::{Name, SPLIT_BYTES, Which},
};

const PLAIN: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Residual]);
const FORWARD: TensorSet = PLAIN.with(Tensor::NextWeight).with(Tensor::NextBias);
const CODES: TensorSet = PLAIN.with(Tensor::Amax).with(Tensor::Y).with(Tensor::CodesT);
const GRADIENTS: TensorSet = TensorSet::of(&[Tensor::Dweight, Tensor::Dbias]);
const BACKWARD: TensorSet = GRADIENTS.with(Tensor::Weight).with(Tensor::DresidualOut).with(Tensor::Dresidual);

rmsnorm_gpu::programs! {
    /// `forward.cu`: a row stays on chip.
    Forward = ("forward", Forward, FORWARD);
    /// `forward_cluster.cu`: a long row lies in the registers of a cluster.
    ForwardCluster = ("forward_cluster", Forward, FORWARD);
    /// `forward_long.cu`: a long row lies in shared memory, of a block or a cluster.
    ForwardLong = ("forward_long", Forward, FORWARD);
    /// `forward_streaming.cu`: a row fits nowhere on chip.
    ForwardStreaming = ("forward_streaming", Forward, FORWARD);
    /// `backward.cu`: a row stays on chip.
    Backward = ("backward", Backward, BACKWARD);
    /// `backward_split.cu`: the matrices fit the L2, so that some blocks have rows and others columns.
    BackwardSplit = ("backward_split", Backward, BACKWARD);
    /// `backward_streaming.cu`, first pass: mean_wdy and mean_wdy_xhat of every row.
    BackwardRowSums = ("backward_row_sums", Backward, TensorSet::of(&[Tensor::Weight]));
    /// `backward_streaming.cu`, second pass: dx and the partial sums of dweight and dbias.
    BackwardColumns = ("backward_columns", Backward, BACKWARD);
    /// `reduce_partials.cu`
    ReducePartials = ("reduce_partials", Backward, GRADIENTS);
    /// `quantized_forward.cu`: a row stays on chip.
    QuantizedForward = ("quantized_forward", QuantizedForward, CODES);
    /// `quantized_forward_streaming.cu`: it does not.
    QuantizedForwardStreaming = ("quantized_forward_streaming", QuantizedForward, CODES);
    /// `transpose_codes.cu`
    TransposeCodes = ("transpose_codes", QuantizedForward, TensorSet::NONE);
    /// `columnwise.cu`
    Columnwise = ("columnwise", QuantizedForward, PLAIN);
    /// `clear.cu`: of every direction, and so of none of them.
    Clear = ("clear", Forward, TensorSet::NONE);
    /// `column_statistics.cu`: the first half of forward on a rank's columns.
    ColumnStatistics = ("column_statistics", Forward, TensorSet::of(&[Tensor::Residual]));
    /// `forward_given.cu`: the second.
    ForwardGiven = ("forward_given", Forward, PLAIN);
    /// `backward_statistics.cu`: the first half of backward.
    BackwardStatistics = ("backward_statistics", Backward, TensorSet::of(&[Tensor::Weight]));
    /// `backward_given.cu`: the second, without the second stage of gradients.
    BackwardGiven = ("backward_given", Backward, BACKWARD);
    /// `reduce_forward.cu`: the norm of a sum over ranks.
    #[cfg(feature = "peers")]
    ReduceForward = ("reduce_forward", Forward, PLAIN);
    /// `reduce_forward_rows.cu`: the same where each rank adds the rows that it owns.
    #[cfg(feature = "peers")]
    ReduceForwardRows = ("reduce_forward_rows", Forward, PLAIN);
    /// `gather_numbers.cu`: between the halves of a call of either direction whose columns are divided among ranks.
    #[cfg(feature = "peers")]
    GatherNumbers = ("gather_numbers", Forward, TensorSet::NONE);
    /// `forward_exchange.cu`: both halves of forward and the exchange between them, of rows that stay in registers.
    #[cfg(feature = "peers")]
    ForwardExchange = ("forward_exchange", Forward, PLAIN);
}

impl Program {
    /// What it is: everything that the other rooms ask of a program.
    pub(crate) const fn info(self) -> rmsnorm_gpu::program::Program {
        let (stem, direction, optional) = self.row();
        let is_reduction = matches!(self, Program::ReducePartials);
        let stores_gradients = is_reduction || matches!(self, Program::BackwardSplit);
        rmsnorm_gpu::program::Program { stem, direction, is_reduction, stores_gradients, optional }
    }

    /// Whether this is a part of backward.
    pub(crate) const fn is_backward(self) -> bool {
        matches!(self.info().direction, Direction::Backward)
    }

    /// Whether this is a half of a call on a rank's columns, whose kernel has a second argument.
    pub(crate) const fn is_half(self) -> bool {
        matches!(
            self,
            Program::ColumnStatistics | Program::ForwardGiven | Program::BackwardStatistics | Program::BackwardGiven
        )
    }

    /// Whether it is told of the columns of all ranks: of the halves, and of what is both.
    pub(crate) const fn divides_columns(self) -> bool {
        #[cfg(feature = "peers")]
        if matches!(self, Program::ForwardExchange) {
            return true;
        }
        self.is_half()
    }

    /// Whether it hands other ranks something through slots.
    #[cfg(feature = "peers")]
    pub(crate) const fn has_peers(self) -> bool {
        use Program::{ForwardExchange, GatherNumbers, ReduceForward, ReduceForwardRows};
        matches!(self, ReduceForward | ReduceForwardRows | GatherNumbers | ForwardExchange)
    }
}

/// The tensors that some program may leave out.
pub(crate) const OPTIONAL: TensorSet = CODES.union(BACKWARD).union(FORWARD);

/// Everything a program is compiled for. Two calls with equal keys run the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) program: Program,
    /// Of the tensors, those that the program has code for. A residual stands here, in place too.
    pub(crate) call: CallKey,
    pub(crate) tile: Tile,
    /// Ranks whose parts of x it adds; 1 where a program has nothing to do with any.
    pub(crate) ranks: u32,
}

/// How threads share a row and a block its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Elements that a thread owns side by side.
    pub(crate) pack: u32,
    /// Packs a thread owns in a row.
    pub(crate) packs: u32,
    /// Threads of one block on one row; a power of two or a multiple of 32.
    pub(crate) threads_per_row: u32,
    /// Rows a block works on side by side.
    pub(crate) groups: u32,
    /// Blocks on one row, which exchange sums through distributed shared memory.
    pub(crate) cluster: u32,
    /// Rows that a thread has in flight in one step.
    pub(crate) unroll: u32,
    /// Steps that shared memory holds; 0 where rows go straight to registers.
    pub(crate) stages: u32,
    /// Whether the next step's first pass runs while the sums of this one are exchanged.
    pub(crate) is_overlapped: bool,
    /// Blocks that the registers of a multiprocessor must have room for.
    pub(crate) blocks_per_sm: u32,
    /// Bytes of one memory access: what all addresses and strides are multiples of, at most 16.
    pub(crate) access_bytes: u32,
    /// Whether cols is not the number of columns that the threads own.
    pub(crate) is_ragged: bool,
    /// Whether the last pack of a row is cut, which takes code for single elements.
    pub(crate) has_tail: bool,
    /// How forward reads what it needs once the statistics are known.
    pub(crate) reads: Reads,
}

/// When forward reads what it needs once the statistics are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reads {
    /// `Forward`: there is no second read of a row, which stays in registers.
    pub(crate) is_held: bool,
    /// `Forward`: the second read of a pack comes just before it is needed, and not all at once. `ForwardCluster`: the read of a
    /// residual that is added after the norm.
    pub(crate) is_late: bool,
    /// `ForwardCluster`, `ForwardLong`: parameters come while the row does.
    pub(crate) is_early: bool,
    /// `ForwardCluster`, `ForwardLong`: packs that are read together.
    pub(crate) batch: u32,
}

/// One thing to enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Zeroes so many bytes of a tensor, from its byte `first` on, by `grid` blocks of that kernel.
    Clear { key: KernelKey, grid: u32, tensor: Tensor, first: usize, bytes: usize },
    /// Launches a kernel. `grid` counts blocks and is a multiple of `cluster`, which is that of the key's tile or, where blocks have
    /// columns too, a multiple of it.
    Launch { key: KernelKey, grid: u32, cluster: u32, threads: u32, shared_bytes: u32 },
}

/// How one call is executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// In order; those that are there.
    pub(crate) steps: [Option<Step>; 4],
    /// Where the parts of the workspace lie.
    pub(crate) workspace: Workspace,
    /// Sets of rows whose gradients are summed one after the other; chunk c has the rows c, c + chunks, ...
    pub(crate) chunks: u64,
    /// Rows of partial sums: the chunks, the groups of `Locks`, or a few; none where other threads have the columns.
    pub(crate) partial_rows: u64,
}

/// Bytes that a thread of `clear.cu` zeroes in one turn.
const CLEARED_PIECE: usize = 16;

/// Blocks of `clear.cu` at the most.
const MOST_CLEARING_BLOCKS: usize = 1024;

impl Step {
    /// Zeroes bytes of a tensor: one code for every call.
    fn clear(tensor: Tensor, first: usize, bytes: usize) -> Self {
        let tile = Tile { pack: 8, packs: 1, threads_per_row: 32, groups: 1, blocks_per_sm: 32, ..Tile::NONE };
        let key = key(&Problem::forward(Norm::Rms, 0, 0, DType::F32, &[]), Program::Clear, tile);
        // The blocks go on to further pieces.
        let grid = bytes.div_ceil(CLEARED_PIECE * tile.threads() as usize).min(MOST_CLEARING_BLOCKS) as u32;
        Step::Clear { key, grid, tensor, first, bytes }
    }

    /// A launch in clusters of the tile's size.
    fn launch(key: KernelKey, grid: u32, shared_bytes: u32) -> Self {
        Step::Launch { key, grid, cluster: key.tile.cluster, threads: key.tile.threads(), shared_bytes }
    }
}

impl Plan {
    /// The kernels that it launches, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = KernelKey> + use<> {
        self.steps.into_iter().flatten().map(|step| match step {
            Step::Clear { key, .. } | Step::Launch { key, .. } => key,
        })
    }
}

/// The parts of the workspace, as element offsets from its start, which `launch` rounds up to 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Workspace {
    /// Where the locks begin; partial rows come first.
    pub(crate) locks: usize,
    /// Where the row sums begin.
    pub(crate) row_sums: usize,
    /// Elements in all, with room for the rounding.
    pub(crate) len: usize,
}

/// Senders of a row whose sums every thread adds itself, in a tree: that is sooner done than shuffles.
pub(crate) const TREE_SENDERS: u32 = 8;

/// Visits of a thread to a row that fits nowhere on chip, whose sums are added up before they join those of others.
pub(crate) const BLOCK_VISITS: u64 = 64;

/// Threads side by side on the packs of a block of columns: 128 bytes of 16 bits.
pub(crate) const COLUMN_LANES: u32 = 8;

/// Blocks of a multiprocessor on every architecture.
const MOST_BLOCKS: u32 = 16;

/// Registers of a multiprocessor: of every architecture.
const REGISTERS_PER_SM: u32 = 1 << 16;

/// Shared memory of a block that is not its rows: what threads exchange, and what the driver keeps.
const RESERVED_BYTES: usize = 4 << 10;

/// Row counts at which the plan changes at any length, for the conformance suite: a block's rows in one step, a row for every block.
/// Those from which on forward reads its rows again depend on the length; the suite runs on [`Tuning::as_if_large`] as well.
#[cfg(any(test, feature = "conformance"))]
pub(crate) const ROWS_BREAKPOINTS: [usize; 3] = [16, 32, 132];

/// The fewest rows of an odd length whose backward has partial rows, for the conformance suite. Asked of the plan itself.
#[cfg(any(test, feature = "conformance"))]
pub(crate) fn unsplit_from(dtype: DType, caps: &Caps) -> Option<(usize, usize)> {
    const COLS: usize = 1021;
    let has_partials = |rows: &usize| {
        let problem = Problem::backward(Norm::Rms, *rows, COLS, dtype, &[Tensor::Dweight, Tensor::Dbias]);
        plan(&problem, 16, caps).partial_rows > 0
    };
    (1..1 << 14).find(has_partials).map(|rows| (rows, COLS))
}

/// The plan of a problem whose addresses and strides are multiples of `access_bytes`.
pub(crate) fn plan(problem: &Problem, access_bytes: u32, caps: &Caps) -> Plan {
    match (problem.direction, &problem.quant) {
        (Direction::QuantizedForward, Some(quant)) => quantized_forward::plan(problem, quant, access_bytes, caps),
        // A quantized call says how.
        (Direction::Forward | Direction::QuantizedForward, _) => forward::plan(problem, access_bytes, caps),
        (Direction::Backward, _) => backward::plan(problem, access_bytes, caps),
    }
}

/// f32 elements of workspace.
pub(crate) fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
    // How memory is accessed has no part in it.
    plan(problem, 16, caps).workspace.len
}

/// f32 elements of workspace that are enough for a backward call on any device with up to 256 multiprocessors: where a program is
/// made on a machine without the device that runs it, as XLA may. [`NormBackend::workspace_len`](rmsnorm_spec::NormBackend::workspace_len)
/// has what a device at hand needs, which is less; a call that is given too little is refused.
pub fn workspace_len_bound(problem: &Problem) -> usize {
    match problem.direction {
        Direction::Backward => backward::workspace_len_bound(problem),
        Direction::Forward | Direction::QuantizedForward => 0,
    }
}

/// Elements of one pack: 16 bytes of the widest matrix.
fn pack(problem: &Problem) -> u32 {
    let has_stream = problem.direction == Direction::Backward || is_sum(problem);
    let stream = if has_stream { problem.dtypes.residual } else { problem.dtypes.activation };
    if [problem.dtypes.activation, stream].contains(&DType::F32) { 4 } else { 8 }
}

/// The tile that a table has for rows of that length, where the device has such clusters.
fn found(ladder: &[Rung<Tile>], cols: usize, pack: u32, caps: &Caps) -> Option<Tile> {
    let packs = cols.div_ceil(pack as usize);
    let tile = find(ladder, packs).filter(|tile| tile.cluster <= caps.max_cluster)?;
    Some(Tile { pack, packs: packs.div_ceil((tile.cluster * tile.threads_per_row) as usize) as u32, ..tile })
}

/// Whether forward adds something to `x`, a residual or further parts of it, and normalizes the sum, in the residual's dtype. A residual
/// that is added after the norm counts too: its rows are read as well.
pub(super) fn is_sum(problem: &Problem) -> bool {
    problem.tensors.adds_residual() || problem.parts > 1
}

/// Whether the columns of a tile are not just those of the row.
fn is_ragged(tile: &Tile, cols: usize) -> bool {
    let owned = [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].into_iter().map(|n| n as usize);
    owned.product::<usize>() != cols
}

impl Tile {
    /// To be filled in.
    const NONE: Tile = Tile {
        pack: 0,
        packs: 0,
        threads_per_row: 0,
        groups: 0,
        cluster: 1,
        unroll: 1,
        stages: 0,
        is_overlapped: false,
        blocks_per_sm: 1,
        access_bytes: 16,
        is_ragged: false,
        has_tail: false,
        reads: Reads { is_held: false, is_late: false, is_early: false, batch: 1 },
    };

    /// Threads of a block.
    fn threads(&self) -> u32 {
        self.threads_per_row * self.groups
    }

    /// Whether a thread has registers for its part of the rows from the first sum to the last store. A pack fills four; what else is
    /// needed is what the assembler was seen to need without spilling. With a residual, layer norm of 4608 and 7168 columns is 18 and
    /// 11 % slower where it spills, of 16384 columns 3 %.
    fn holds_rows(&self, norm: Norm, adds_residual: bool) -> bool {
        let packs = self.packs * self.unroll;
        let needed = match (adds_residual, norm) {
            (false, Norm::Rms) => 44 + 4 * packs,
            (false, Norm::Layer) => 28 + 17 * packs,
            (true, Norm::Rms) => 48 + 8 * packs,
            (true, Norm::Layer) => 44 + 9 * packs + if self.is_ragged { 4 } else { 0 },
        };
        needed <= self.registers()
    }

    /// The same where `x` is the sum of several parts, of which a thread adds two packs at a time: four parts of each are on their way.
    /// Those that were added before are in registers, or with `forward_long` in shared memory.
    fn holds_parts(&self, program: Program, norm: Norm) -> bool {
        let packs = if program == Program::ForwardLong { 3 } else { self.packs };
        let needed = match (self.pack, norm) {
            (8, Norm::Rms) => 44 + 16 * packs,
            (8, Norm::Layer) => 48 + 16 * packs,
            (_, Norm::Rms) => 56 + 4 * packs,
            (_, Norm::Layer) => 44 + 12 * packs,
        };
        needed <= self.registers()
    }

    /// Registers of a thread. The assembler gives them in eights, and a thread has 255 at the most.
    fn registers(&self) -> u32 {
        (REGISTERS_PER_SM / (self.threads() * self.blocks_per_sm)).min(255) / 8 * 8
    }
}

fn key(problem: &Problem, program: Program, tile: Tile) -> KernelKey {
    let has_tail = !problem.cols.is_multiple_of(tile.pack as usize);
    let tile = Tile { is_ragged: is_ragged(&tile, problem.cols), has_tail, ..tile };
    let mut call = program.info().key(problem);
    // Where gradients are made and there is no weight, `W` is the type that it would have: the assembler's schedule depends on it.
    if call.tensors.sums_over_rows() > 0 && !program.info().is_reduction {
        call.dtypes.weight = problem.dtypes.weight;
    }
    KernelKey { program, call, tile: Tile { reads: reads(program, &call, &tile), ..tile }, ranks: 1 }
}

/// What is no forward pass on chip reads in one way.
fn reads(program: Program, call: &CallKey, tile: &Tile) -> Reads {
    let (weight_bytes, reads) = (call.dtypes.weight.size() as u32, tile.reads);
    let is_after = call.form.is_residual_after();
    // One pack, where registers are short: of a row that has a whole multiprocessor already.
    let batch_of_parts = || if tile.holds_parts(program, call.norm) { 2 } else { 1 };
    if program == Program::QuantizedForward {
        // Few packs: nothing is gained by having all of them on their way.
        return Reads { is_late: tile.packs <= 2, ..reads };
    }
    if program == Program::Forward {
        // A residual that comes after has the registers that a row on its way would take.
        if is_after {
            return Reads { is_held: false, is_late: true, ..reads };
        }
        // The second read of several parts would be of all of them.
        if call.has_parts {
            return Reads { is_held: true, batch: batch_of_parts(), ..reads };
        }
        // The second read of a residual's rows would be of two matrices.
        let is_held = reads.is_held || call.tensors.adds_residual() && tile.holds_rows(call.norm, true);
        return Reads { is_held, is_late: tile.packs <= 2 && !is_held, ..reads };
    }
    if program == Program::ForwardCluster {
        // Where there are registers for what is needed last: for a residual that comes then, from furthest, else for the weights.
        let is_narrow = tile.pack * weight_bytes <= 16;
        if is_after {
            let batch = match (is_narrow, call.form.norms_twice()) {
                (true, _) => 4,
                (false, false) => 2,
                (false, true) => 1,
            };
            return Reads { is_late: tile.packs > 4, is_early: false, batch, ..reads };
        }
        let batch = if call.has_parts { batch_of_parts() } else { 4 };
        return Reads { is_early: is_narrow, batch, ..reads };
    }
    if program == Program::ForwardLong {
        // All packs would need registers that are not there. Neither are there any for parameters in f32, where the end of a row
        // is looked for, nor in the blocks of a cluster, which are more to a multiprocessor.
        let is_early = tile.cluster == 1 && weight_bytes == 2 && !tile.is_ragged;
        let batch = if call.norm == Norm::Layer { 4 } else { 2 };
        return Reads { is_early, batch: if call.has_parts { batch_of_parts() } else { batch }, ..reads };
    }
    reads
}
