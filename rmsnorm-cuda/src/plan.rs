//! Turns a problem into launches: a pure function of the problem, the alignment and the device's
//! capabilities.
//!
//! The columns of a thread depend on cols, dtypes and flags only. A row's bits therefore depend
//! neither on the number of rows nor on the alignment of tensors.

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
mod inputs;
mod quantized_forward;
#[cfg(feature = "peers")]
pub(crate) mod ranks;
mod reads;
#[cfg(feature = "peers")]
pub(crate) mod reduce_forward;
#[cfg(feature = "peers")]
pub(crate) mod reduce_forward_packs;
#[cfg(feature = "peers")]
pub(crate) mod reduce_forward_rows;
#[cfg(test)]
mod tests;
mod tile;
mod tuning;

use rmsnorm_gpu::program::CallKey;
use rmsnorm_gpu::tuning::{Rung, find};
use rmsnorm_spec::{DType, DTypes, Direction, Norm, Piece, PieceSet, Problem, Tensor, TensorSet};

use crate::caps::Caps;
use inputs::inputs_of;
pub(crate) use inputs::{reads_more, widest_input};
use reads::reads;
#[cfg(test)]
pub(crate) use tests::drawn_devices;
pub(crate) use tile::{REGISTERS_PER_SM, RESERVED_BYTES, Reads, Tile};
pub(crate) use tuning::{KEPT, Tuning};
#[cfg(feature = "conformance")]
pub(crate) use tuning::{
    candidates,
    data::{Name, SPLIT_BYTES, Which},
};

/// Tensors for which no program is compiled anew: those of every call; those whose address kernels
/// test (all that forward saves, and the gradient of a gate); and those that follow from the kind
/// of scale or belong to programs of their own.
const NO_OPTIONS: TensorSet = TensorSet::of(&[
    Tensor::X,
    Tensor::Dy,
    Tensor::Dx,
    Tensor::Workspace,
    Tensor::ResidualOut,
    Tensor::Mean,
    Tensor::Rstd,
    Tensor::Codes,
    Tensor::Scale,
    Tensor::Scales,
    Tensor::CodesColumnwise,
    Tensor::ScalesColumnwise,
    Tensor::Dgate,
]);

/// The optional tensors that forward reads.
const FORWARD: TensorSet = Direction::Forward.reads().difference(NO_OPTIONS);
/// The optional tensors of backward, and of its statistics, to which the residual's gradient is
/// added afterwards.
const BACKWARD: TensorSet = Direction::Backward.reads().union(Direction::Backward.writes()).difference(NO_OPTIONS);
/// Nor does a bias, which a gate's gradient needs, belong to these.
const BACKWARD_STATISTICS: TensorSet = Direction::Backward
    .reads()
    .difference(NO_OPTIONS)
    .difference(Piece::Residual.tensors(Direction::Backward))
    .without(Tensor::Bias);
/// The optional tensors of a quantized forward, and of its copy along columns, which reads them again.
const CODES: TensorSet = COLUMNWISE.union(Direction::QuantizedForward.writes().difference(NO_OPTIONS));
/// The same, without the other matrices that a call reads.
const CODES_OF_X: TensorSet = CODES.difference(TensorSet::of(&[Tensor::Residual, Tensor::Gate]));
const COLUMNWISE: TensorSet = Direction::QuantizedForward.reads().difference(NO_OPTIONS);

rmsnorm_gpu::programs! {
    /// `forward.cu`: a row stays on chip.
    Forward = ("forward", Forward, FORWARD);
    /// `forward_cluster.cu`: a long row stays in the registers of a cluster.
    ForwardCluster = ("forward_cluster", Forward, FORWARD);
    /// `forward_long.cu`: a long row stays in shared memory, of a block or a cluster.
    ForwardLong = ("forward_long", Forward, FORWARD);
    /// `forward_streaming.cu`: a row is too long to stay on chip.
    ForwardStreaming = ("forward_streaming", Forward, FORWARD);
    /// `backward.cu`: a row stays on chip.
    Backward = ("backward", Backward, BACKWARD);
    /// `backward_split.cu`: the matrices fit the L2; some blocks handle rows, others columns.
    BackwardSplit = ("backward_split", Backward, BACKWARD);
    /// `backward_streaming.cu`, first pass: mean_wdy and mean_wdy_xhat of every row.
    BackwardRowSums = ("backward_row_sums", Backward, BACKWARD_STATISTICS);
    /// `backward_streaming.cu`, second pass: dx and the partial sums of dweight and dbias.
    BackwardColumns = ("backward_columns", Backward, BACKWARD);
    /// `reduce_partials.cu`
    ReducePartials = ("reduce_partials", Backward, TensorSet::SUMS_OVER_ROWS);
    /// `quantized_forward.cu`: a row stays on chip.
    QuantizedForward = ("quantized_forward", QuantizedForward, CODES);
    /// `quantized_forward_streaming.cu`: a row is too long to stay on chip.
    QuantizedForwardStreaming = ("quantized_forward_streaming", QuantizedForward, CODES);
    /// `quantized_forward_transposed.cu`: many rows stay on chip, and their codes are transposed there.
    QuantizedForwardTransposed = ("quantized_forward_transposed", QuantizedForward, CODES_OF_X);
    /// `transpose_codes.cu`
    TransposeCodes = ("transpose_codes", QuantizedForward, TensorSet::NONE);
    /// `columnwise.cu`
    Columnwise = ("columnwise", QuantizedForward, COLUMNWISE);
    /// `clear.cu`: used in every direction.
    Clear = ("clear", Forward, TensorSet::NONE);
    /// `partial_statistics.cu`: the first phase of forward on column-divided rows.
    PartialStatistics = ("partial_statistics", Forward, FORWARD.intersection(Piece::Residual.tensors(Direction::Forward)));
    /// `forward_with_statistics.cu`: the second phase of forward.
    ForwardWithStatistics = ("forward_with_statistics", Forward, FORWARD);
    /// `partial_backward_statistics.cu`: the first phase of backward.
    PartialBackwardStatistics = ("partial_backward_statistics", Backward, BACKWARD_STATISTICS);
    /// `backward_with_statistics.cu`: the second phase of backward, without the reduction of gradients.
    BackwardWithStatistics = ("backward_with_statistics", Backward, BACKWARD);
    /// `reduce_forward.cu`: the norm of a sum over ranks.
    #[cfg(feature = "peers")]
    ReduceForward = ("reduce_forward", Forward, FORWARD);
    /// `reduce_forward_packs.cu`: the same; each rank adds the packs of a row that it owns.
    #[cfg(feature = "peers")]
    ReduceForwardPacks = ("reduce_forward_packs", Forward, FORWARD);
    /// `reduce_forward_rows.cu`: the same; each rank adds the rows that it owns.
    #[cfg(feature = "peers")]
    ReduceForwardRows = ("reduce_forward_rows", Forward, FORWARD);
    /// `gather_numbers.cu`: the exchange between the phases of a call on column-divided rows.
    #[cfg(feature = "peers")]
    GatherNumbers = ("gather_numbers", Forward, TensorSet::NONE);
    /// `forward_exchange.cu`: both phases of forward and the exchange, for rows that fit registers.
    #[cfg(feature = "peers")]
    ForwardExchange = ("forward_exchange", Forward, FORWARD);
}

impl Program {
    /// The properties of a program that other modules need.
    pub(crate) const fn info(self) -> rmsnorm_gpu::program::Program {
        let (stem, direction, optional) = self.row();
        let is_reduction = matches!(self, Program::ReducePartials);
        let stores_gradients = is_reduction || matches!(self, Program::BackwardSplit);
        rmsnorm_gpu::program::Program { stem, direction, is_reduction, stores_gradients, optional }
    }

    /// Whether this is a kernel of backward.
    pub(crate) const fn is_backward(self) -> bool {
        matches!(self.info().direction, Direction::Backward)
    }

    /// Whether this is a phase of a call on column-divided rows; its kernel has a second argument.
    pub(crate) const fn is_half(self) -> bool {
        matches!(
            self,
            Program::PartialStatistics
                | Program::ForwardWithStatistics
                | Program::PartialBackwardStatistics
                | Program::BackwardWithStatistics
        )
    }

    /// Whether the kernel gets the column counts of all ranks: a phase, or `ForwardExchange`.
    pub(crate) const fn divides_columns(self) -> bool {
        #[cfg(feature = "peers")]
        if matches!(self, Program::ForwardExchange) {
            return true;
        }
        self.is_half()
    }

    /// Whether the kernel sends data to other ranks through slots.
    #[cfg(feature = "peers")]
    pub(crate) const fn has_peers(self) -> bool {
        use Program::{ForwardExchange, GatherNumbers, ReduceForward, ReduceForwardPacks, ReduceForwardRows};
        matches!(self, ReduceForward | ReduceForwardPacks | ReduceForwardRows | GatherNumbers | ForwardExchange)
    }
}

/// The tensors that are optional in some program.
pub(crate) const OPTIONAL: TensorSet = CODES.union(BACKWARD).union(FORWARD);

/// All compile-time parameters of a kernel. Two calls with equal keys run the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) program: Program,
    /// The call, with only the tensors that the program has code for. A residual is always
    /// included, also in place.
    pub(crate) call: CallKey,
    pub(crate) tile: Tile,
    /// Where the groups of columns are. Their number is a run-time value.
    pub(crate) column_groups: ColumnGroups,
    /// The number of ranks with an x to add; 1 in programs without ranks.
    pub(crate) ranks: u32,
}

/// Where a kernel has the groups of columns of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ColumnGroups {
    /// Rows have no groups of columns.
    None,
    /// Each group has blocks of its own.
    Blocks,
    /// Each group is a row, and the groups of a row are a group of rows: `Forward` and
    /// `QuantizedForward`, which then read memory in order.
    Rows,
}

/// One operation to enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Zeroes `bytes` bytes of a tensor, from byte `first` on, with `grid` blocks of the kernel.
    Clear { key: KernelKey, grid: u32, tensor: Tensor, first: usize, bytes: usize },
    /// Launches a kernel. `grid` counts blocks and is a multiple of `cluster`. `cluster` is the
    /// tile's; for `BackwardSplit` it is a multiple of the tile's.
    Launch { key: KernelKey, grid: u32, cluster: u32, threads: u32, shared_bytes: u32 },
}

/// The launches and the workspace of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The steps, in order.
    pub(crate) steps: [Option<Step>; 4],
    /// The layout of the workspace.
    pub(crate) workspace: Workspace,
    /// Sets of rows whose gradients are summed serially; chunk c has the rows c, c + chunks, ...
    pub(crate) chunks: u64,
    /// Rows of partial sums: one per chunk, one per group of `Locks`, or a few; none for a split
    /// call.
    pub(crate) partial_rows: u64,
    /// Groups of columns with blocks of their own: each launch has as many times its blocks, and each
    /// group a workspace of this layout.
    pub(crate) groups: u32,
}

/// Bytes of the widest access.
pub(crate) const WIDEST_ACCESS: usize = 16;

/// Bytes that a thread of `clear.cu` zeroes at a time.
const CLEARED_PIECE: usize = 16;

/// The largest grid of `clear.cu`.
const MOST_CLEARING_BLOCKS: usize = 1024;

impl Step {
    /// Zeroes bytes of a tensor; all calls share one kernel.
    fn clear(tensor: Tensor, first: usize, bytes: usize) -> Self {
        let tile = Tile { pack: 8, packs: 1, threads_per_row: 32, groups: 1, blocks_per_sm: 32, ..Tile::NONE };
        let key = key(&Problem::forward(Norm::Rms, 0, 0, DType::F32, &[]), Program::Clear, tile);
        Step::clear_with(key, tensor, first, bytes)
    }

    fn clear_with(key: KernelKey, tensor: Tensor, first: usize, bytes: usize) -> Self {
        // Each block loops over further pieces.
        let grid = bytes.div_ceil(CLEARED_PIECE * key.tile.threads() as usize).min(MOST_CLEARING_BLOCKS) as u32;
        Step::Clear { key, grid, tensor, first, bytes }
    }

    /// A launch in clusters of the tile's size.
    fn launch(key: KernelKey, grid: u32, shared_bytes: u32) -> Self {
        Step::Launch { key, grid, cluster: key.tile.cluster, threads: key.tile.threads(), shared_bytes }
    }
}

impl Default for Plan {
    fn default() -> Self {
        let (steps, workspace) = ([None; 4], Workspace::default());
        Plan { steps, workspace, chunks: 0, partial_rows: 0, groups: 1 }
    }
}

impl Plan {
    /// The plan of several groups of columns with blocks of their own, from that of one.
    fn of_groups(self, groups: usize) -> Self {
        // Each begins on 16 bytes.
        let of_group = self.workspace.len.next_multiple_of(4);
        let steps = self.steps.map(|step| {
            step.map(|step| match step {
                // From the first group to the last.
                Step::Clear { key, tensor, first, bytes, .. } => {
                    Step::clear_with(key, tensor, first, bytes + (groups - 1) * of_group * size_of::<f32>())
                }
                Step::Launch { key, grid, cluster, threads, shared_bytes } => {
                    let key = KernelKey { column_groups: ColumnGroups::Blocks, ..key };
                    Step::Launch { key, grid, cluster, threads, shared_bytes }
                }
            })
        });
        let workspace = Workspace { len: of_group * groups, of_group, ..self.workspace };
        Plan { steps, workspace, groups: groups as u32, ..self }
    }

    /// The plan of a call whose rows are groups of columns, `groups` of each row, from that of these
    /// rows; `None` where a kernel has no tile for them, or visits columns.
    ///
    /// Blocks with a group of their own visit a matrix once per group, in short pieces. On an H200,
    /// RMS norm of 64 MiB of bf16 in 8 groups, share of a copy's speed:
    ///
    /// | columns of a group | blocks of their own | rows |
    /// |---|---|---|
    /// | 16 | 26 % | 97 % |
    /// | 32 | 63 % | 96 % |
    /// | 512 | 91 % | 95 % |
    /// | 1024 | 85 % | 98 % |
    fn of_rows(mut self, rows: &Problem, groups: usize) -> Option<Self> {
        for step in self.steps.iter_mut().flatten() {
            let Step::Launch { key, grid, .. } = step else { continue };
            if !matches!(key.program, Program::Forward | Program::QuantizedForward) {
                return None;
            }
            // All rows of a thread have the weights of one group.
            if key.tile.unroll > 1 && !(key.tile.groups as usize).is_multiple_of(groups) {
                key.tile.unroll = 1;
                *grid = forward::blocks(rows, &key.tile);
            }
            key.column_groups = ColumnGroups::Rows;
        }
        Some(self)
    }

    /// Whether each group of columns is a row.
    pub(crate) fn has_groups_as_rows(&self) -> bool {
        self.keys().any(|key| key.column_groups == ColumnGroups::Rows)
    }

    /// The kernels of the plan, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = KernelKey> + use<> {
        self.steps.into_iter().flatten().map(|step| match step {
            Step::Clear { key, .. } | Step::Launch { key, .. } => key,
        })
    }
}

/// The layout of the workspace: element offsets from its start, which `launch` rounds up to 16
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Workspace {
    /// Offset of the locks; partial sums come first.
    pub(crate) locks: usize,
    /// Offset of the row sums.
    pub(crate) row_sums: usize,
    /// The number of elements, with room for the rounding.
    pub(crate) len: usize,
    /// Elements from the workspace of one group of columns to the next.
    pub(crate) of_group: usize,
}

/// Up to this many senders, every thread adds the sums of a row itself, in a tree, which is faster
/// than shuffles.
pub(crate) const TREE_SENDERS: u32 = 8;

/// For a streamed row: after this many visits, a thread adds its sum to the sum of the earlier
/// blocks of visits.
pub(crate) const BLOCK_VISITS: u64 = 64;

/// Threads across the packs of a block of columns: 128 bytes of 16-bit elements.
pub(crate) const COLUMN_LANES: u32 = 8;

/// Blocks per multiprocessor that every architecture supports.
const MOST_BLOCKS: u32 = 16;

/// Row counts at which plans of every length change, for the conformance suite: the rows of a block
/// in one step, and one row per block. The row count from which forward reads rows twice depends on
/// the length; for it the suite also runs on [`Tuning::with_large_plans`].
pub(crate) const ROWS_BREAKPOINTS: [usize; 3] = [16, 32, 132];

/// The fewest rows for which backward of an odd length has partial sums, for the conformance suite.
/// Found by planning.
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
    let (groups, shape) = (problem.groups, (problem.rows, problem.cols));
    if groups <= 1 {
        return of_group(problem, shape, access_bytes, caps);
    }
    let as_rows =
        groups_as_rows(problem).and_then(|rows| of_group(&rows, shape, access_bytes, caps).of_rows(&rows, groups));
    as_rows.unwrap_or_else(|| {
        // A group is a problem of its own, on a share of the device.
        let sms = (caps.sms as usize / groups).max(1) as u32;
        of_group(&group(problem), shape, access_bytes, &Caps { sms, ..*caps }).of_groups(groups)
    })
}

/// The problem of one group of columns.
pub(crate) const fn group(problem: &Problem) -> Problem {
    Problem { cols: problem.cols / problem.groups, groups: 1, ..*problem }
}

/// The problem of forward whose rows are the groups of columns, if rows are not grouped otherwise
/// and the kernel can count them.
pub(crate) fn groups_as_rows(problem: &Problem) -> Option<Problem> {
    let rows = problem.rows.checked_mul(problem.groups).filter(|rows| *rows <= u32::MAX as usize)?;
    let is_forward = problem.direction != Direction::Backward && problem.rows_per_group.is_none();
    is_forward.then_some(Problem { rows, rows_per_group: Some(problem.groups), ..group(problem) })
}

/// `shape`: rows and columns of the matrix that the problem is a part of.
fn of_group(problem: &Problem, shape: (usize, usize), access_bytes: u32, caps: &Caps) -> Plan {
    match (problem.direction, &problem.quant) {
        (Direction::QuantizedForward, Some(quant)) => {
            quantized_forward::plan(problem, quant, shape, access_bytes, caps)
        }
        // A quantized problem always has a `quant`.
        (Direction::Forward | Direction::QuantizedForward, _) => forward::plan(problem, access_bytes, caps),
        (Direction::Backward, _) => backward::plan(problem, access_bytes, caps),
    }
}

/// The length of the workspace in f32 elements.
pub(crate) fn workspace_len(problem: &Problem, caps: &Caps) -> usize {
    // It does not depend on the access width.
    plan(problem, 16, caps).workspace.len
}

/// A workspace length, in f32 elements, that suffices for a backward call on any device with up to
/// 256 multiprocessors. Use it when a program is built on a machine without the device that will
/// run it, as with XLA. [`NormBackend::workspace_len`](rmsnorm_spec::NormBackend::workspace_len)
/// gives the smaller length that a present device needs. A call with a workspace that is too short
/// is refused.
pub fn workspace_len_bound(problem: &Problem) -> usize {
    match problem.direction {
        Direction::Backward => match problem.groups {
            0 | 1 => backward::workspace_len_bound(problem),
            groups => backward::workspace_len_bound(&group(problem)).next_multiple_of(4) * groups,
        },
        Direction::Forward | Direction::QuantizedForward => 0,
    }
}

/// Elements of one pack: 16 bytes of the widest matrix.
fn pack(problem: &Problem) -> u32 {
    let DTypes { activation, residual, .. } = problem.dtypes;
    let is_of_stream = problem.direction == Direction::Backward || problem.parts > 1;
    let h = if is_of_stream { residual.size() } else { activation.size() };
    (WIDEST_ACCESS / widest_input(problem).max(h)) as u32
}

/// The tile of a table for rows of this length, if the device supports its cluster.
fn found(ladder: &[Rung<Tile>], cols: usize, pack: u32, caps: &Caps) -> Option<Tile> {
    let packs = cols.div_ceil(pack as usize);
    let tile = find(ladder, packs).filter(|tile| tile.cluster <= caps.max_cluster)?;
    Some(Tile { pack, packs: packs.div_ceil((tile.cluster * tile.threads_per_row) as usize) as u32, ..tile })
}

/// Whether a tile covers more columns than the row has.
fn is_ragged(tile: &Tile, cols: usize) -> bool {
    let owned = [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].into_iter().map(|n| n as usize);
    owned.product::<usize>() != cols
}

fn key(problem: &Problem, program: Program, tile: Tile) -> KernelKey {
    let has_tail = !problem.cols.is_multiple_of(tile.pack as usize);
    let tile = Tile { is_ragged: is_ragged(&tile, problem.cols), has_tail, ..tile };
    let mut call = program.info().key(problem);
    // Without a weight, kernels that compute gradients are still compiled with the weight's dtype
    // for `W`, because the compiler's schedule depends on it.
    if call.tensors.sums_over_rows() > 0 && !program.info().is_reduction {
        call.dtypes.weight = problem.dtypes.weight;
    }
    let key = KernelKey { program, call, tile, column_groups: ColumnGroups::None, ranks: 1 };
    KernelKey { tile: Tile { reads: reads(&key), ..tile }, ..key }
}

impl KernelKey {
    /// The pieces that the program has code for.
    pub(crate) const fn pieces(&self) -> PieceSet {
        self.call.pieces(self.program.info().direction)
    }
}
