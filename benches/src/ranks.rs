//! Timings of norms that all ranks of a group compute together.
//!
//! Every case is checked before and after it is timed: all ranks must have the same bits of a sum,
//! the sum must have the bits of its definition if the method promises them, and some rows of y
//! must be within their bounds. The slowest rank counts.

mod cpu;
mod cuda;
mod data;
mod meeting;

use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::conformance::testing::Bits;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::{AnyForward, DType, DTypes, Direction, Norm, NormSpec, OutputRows, Source};
use rmsnorm_dist::{GroupCall, RowShares, ShardedNorm};
use serde::Serialize;

use crate::buffer::Buffer;
use crate::pattern::values;
use crate::{BenchError, Measurable, Shape};
use meeting::Meeting;

/// The number of trials. The median counts.
const TRIALS: usize = 7;

/// An operation of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanksOp {
    /// The norm of the sum over ranks and a residual, with the sum stored.
    ForwardReduced,
    /// `ForwardReduced` with the residual divided among ranks by rows, and all of y on every rank.
    ForwardReducedRows,
    /// The norm of rows whose columns are divided among ranks. A case has the columns of one rank.
    ForwardColumns,
}

impl RanksOp {
    /// All operations.
    pub const ALL: [RanksOp; 3] = [RanksOp::ForwardReduced, RanksOp::ForwardReducedRows, RanksOp::ForwardColumns];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            RanksOp::ForwardReduced => "forward_reduced",
            RanksOp::ForwardReducedRows => "forward_reduced_rows",
            RanksOp::ForwardColumns => "forward_columns",
        }
    }
}

/// The default shapes.
pub const SHAPES: [&str; 7] = ["1x4096", "8x4096", "8x8192", "64x8192", "256x8192", "1024x8192", "4096x8192"];

/// A measured call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RanksCase {
    /// The operation.
    pub op: RanksOp,
    /// The norm.
    pub norm: Norm,
    /// The dtype of all tensors.
    pub dtype: DType,
    /// The shape of x on each rank.
    pub shape: Shape,
}

/// The largest number of elements of an x: the host keeps the x of all ranks.
pub const MOST_ELEMENTS: usize = 1 << 28;

/// Whether an x of this shape can be measured.
pub fn is_measurable(shape: Shape) -> bool {
    shape.rows > 0 && shape.cols > 0 && shape.rows.checked_mul(shape.cols).is_some_and(|len| len <= MOST_ELEMENTS)
}

/// The place of the ranks.
#[derive(Clone, Debug)]
pub enum Place {
    /// Threads of this process, each with a single-threaded backend.
    Threads(CpuBackend),
    /// GPUs, one per rank.
    Gpus,
}

/// A measurement.
#[derive(Clone, Debug, Serialize)]
pub struct RanksRow {
    /// The number of ranks.
    pub ranks: usize,
    /// The operation's name.
    pub op: &'static str,
    /// The method of the call.
    pub way: &'static str,
    /// The norm's name.
    pub norm: &'static str,
    /// The dtype's name.
    pub dtype: &'static str,
    /// The rows of x.
    pub rows: usize,
    /// The columns of x.
    pub cols: usize,
    /// Microseconds per call of the slowest rank, the median of seven trials.
    pub us: f64,
    /// The fewest bytes that a rank must send in a call.
    pub sent: usize,
}

/// Measures all cases with every available method. `each` gets each row as soon as it is measured.
///
/// # Errors
/// The first error of any rank: a wrong result, a missing device, a case that a backend does not
/// support.
pub fn measure(
    place: &Place,
    ranks: usize,
    cases: &[RanksCase],
    each: &mut dyn FnMut(&RanksRow),
) -> Result<Vec<RanksRow>, BenchError> {
    match place {
        Place::Threads(backend) => run(cpu::ways(backend, ranks)?, cases, each),
        Place::Gpus => run(cuda::ways(ranks, most_bytes(cases, ranks))?, cases, each),
    }
}

/// The bytes of a peer group's buffer: the largest x, and twice the rows that a rank owns.
fn most_bytes(cases: &[RanksCase], ranks: usize) -> usize {
    let bytes = |case: &RanksCase| {
        let rows = case.shape.rows.max(2 * case.shape.rows.div_ceil(ranks));
        // A row begins at a multiple of 16 bytes.
        rows * (case.shape.cols * case.dtype.size()).next_multiple_of(16)
    };
    cases.iter().map(bytes).max().unwrap_or(0)
}

impl RanksCase {
    /// The elements of the residual and of the sum on a rank.
    fn of_stream(&self, rank: usize, ranks: usize) -> Range<usize> {
        let Shape { rows, cols } = self.shape;
        match self.op {
            RanksOp::ForwardReducedRows => RowShares { units: rows, unit: cols, ranks }.elements(rank),
            RanksOp::ForwardReduced | RanksOp::ForwardColumns => 0..rows * cols,
        }
    }
}

/// A method to make a call, on one rank.
trait Way {
    /// The method's name in reports.
    fn name(&self, op: RanksOp) -> &'static str;

    /// The guarantee of its outputs.
    fn promise(&self, op: RanksOp) -> Promise;

    /// Measures the microseconds per call of each trial on this rank, and the outputs of a call
    /// before and after the trials. All ranks must call it at once.
    fn measure(&mut self, case: &RanksCase, inputs: &Inputs, meeting: &Meeting) -> Result<Measured, BenchError>;
}

/// The guarantee of a method's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    /// The sum has the bits of its definition, and y is its norm.
    ExactSum,
    /// As `ExactSum`, but each rank has the sum of the rows that it owns, and y of all rows.
    ExactRows,
    /// y is the norm of the sum that the call has stored; the sum may differ from the definition.
    SomeSum,
    /// y of all ranks together is the norm of whole rows.
    WholeRows,
    /// No guarantee: the call without an exchange, for comparison.
    Nothing,
}

/// The weight and bias of all calls of a rank.
struct Parameters<D: Measurable> {
    weight: Buffer<D>,
    bias: Option<Buffer<D>>,
}

impl<D: Measurable> Parameters<D> {
    fn new(device: &D, case: &RanksCase) -> Result<Self, BenchError> {
        let vector = |seed| Buffer::upload(device, &values(case.dtype, seed, 0..case.shape.cols));
        let bias = (case.norm == Norm::Layer).then(|| vector(data::BIAS)).transpose()?;
        Ok(Parameters { weight: vector(data::WEIGHT)?, bias })
    }
}

/// The values of a rank's matrices, for all methods and sets of tensors.
struct Inputs {
    rank: usize,
    x: Bits,
    /// `None` where columns are divided: the case has no residual.
    residual: Option<Bits>,
}

impl Inputs {
    fn new(rank: usize, case: &RanksCase) -> Self {
        let matrix = |seed| values(case.dtype, seed, 0..case.shape.elements());
        let residual = (case.op != RanksOp::ForwardColumns).then(|| matrix(data::RESIDUAL));
        Inputs { rank, x: matrix(rank as u64), residual }
    }
}

/// A rank's tensors for one call.
struct Tensors<D: Measurable> {
    x: Buffer<D>,
    y: Buffer<D>,
    /// The residual and the sum.
    stream: Option<[Buffer<D>; 2]>,
}

impl<D: Measurable> Tensors<D> {
    fn new(device: &D, case: &RanksCase, inputs: &Inputs) -> Result<Self, BenchError> {
        // Outputs are NaN, so that elements that are not written fail.
        let unset = || Buffer::nan(device, case.dtype, case.shape.elements());
        let stream = |residual| Ok::<_, BenchError>([Buffer::upload(device, residual)?, unset()?]);
        let stream = inputs.residual.as_ref().map(stream).transpose()?;
        Ok(Tensors { x: Buffer::upload(device, &inputs.x)?, y: unset()?, stream })
    }

    /// The arguments of a rank's call. `stream`: the elements of the residual and the sum that the
    /// rank has, if the case has a residual.
    fn args<'a>(
        &'a mut self,
        device: &D,
        case: &RanksCase,
        parameters: &'a Parameters<D>,
        stream: Range<usize>,
    ) -> AnyForward<'a, D::Backend> {
        let (matrix, row) = (0..case.shape.elements(), 0..case.shape.cols);
        let (x, y) = (self.x.view(device, matrix.clone()), self.y.view_mut(device, matrix));
        let mut args = AnyForward::<D::Backend>::new(x, y);
        args.dtypes = DTypes::uniform(case.dtype);
        args.weight = Some(parameters.weight.view(device, row.clone()));
        args.bias = parameters.bias.as_ref().map(|bias| bias.view(device, row));
        if let Some([residual, sum]) = &mut self.stream {
            args.residual = Some(Source::Read(residual.view(device, stream.clone()).into()));
            args.residual_out = Some(sum.view_mut(device, stream).into());
        }
        args
    }

    fn outputs(&self, device: &D, case: &RanksCase) -> Result<Outputs, BenchError> {
        let all = 0..case.shape.elements();
        let none = Bits { storage: case.dtype.into(), bits: Vec::new() };
        let sum = self.stream.as_ref().map_or(Ok(none), |[_, sum]| sum.download(device, all.clone()))?;
        Ok([sum, self.y.download(device, all)?])
    }
}

/// Makes a rank's call. `spec` has the shape of the rank's tensors; with divided columns these are
/// its own columns.
fn call_of_group<N: ShardedNorm>(
    rank: &N,
    op: RanksOp,
    spec: &NormSpec,
    args: AnyForward<'_, N::Backend>,
) -> Result<(), BenchError> {
    match op {
        RanksOp::ForwardReduced => rank.launch(spec, GroupCall::Reduced(args))?,
        RanksOp::ForwardReducedRows => rank.launch(spec, GroupCall::ReducedRows(OutputRows::All, args))?,
        RanksOp::ForwardColumns => {
            let columns = vec![spec.cols; rank.ranks()];
            rank.launch(&spec.cols(spec.cols * columns.len()), GroupCall::ForwardColumns(&columns, args))?;
        }
    }
    Ok(())
}

/// The sum and y.
type Outputs = [Bits; 2];

/// The measurements of one rank.
struct Measured {
    /// Microseconds per call, by trial.
    us: [f64; TRIALS],
    /// The outputs of a call before the trials and of a call after them.
    outputs: [Outputs; 2],
}

/// Makes the methods of one rank, on the rank's thread: making a communicator waits for the other
/// ranks.
type Make = Box<dyn FnOnce() -> Result<Vec<Box<dyn Way>>, BenchError> + Send>;

struct Ranks {
    ranks: Vec<Make>,
    arithmetic: Arithmetic,
}

fn run(group: Ranks, cases: &[RanksCase], each: &mut dyn FnMut(&RanksRow)) -> Result<Vec<RanksRow>, BenchError> {
    let Ranks { ranks, arithmetic } = group;
    let meeting = Meeting::new(ranks.len());
    let (sender, receiver) = channel();
    let rows = thread::scope(|scope| {
        for (rank, make) in ranks.into_iter().enumerate() {
            let (meeting, arithmetic) = (&meeting, &arithmetic);
            // Only rank 0 reports.
            let sender = (rank == 0).then(|| sender.clone());
            scope.spawn(move || {
                let outcome =
                    make().and_then(|mut ways| run_rank(&mut ways, Seat { rank, meeting, sender, arithmetic }, cases));
                if let Err(error) = outcome {
                    meeting.fail(error);
                }
            });
        }
        drop(sender);
        let mut rows = Vec::new();
        for row in receiver {
            each(&row);
            rows.push(row);
        }
        rows
    });
    match meeting.into_failure() {
        None => Ok(rows),
        Some(error) => Err(error),
    }
}

/// The state of a rank's thread.
struct Seat<'a> {
    rank: usize,
    meeting: &'a Meeting,
    /// Only on rank 0.
    sender: Option<Sender<RanksRow>>,
    arithmetic: &'a Arithmetic,
}

fn run_rank(ways: &mut [Box<dyn Way>], seat: Seat<'_>, cases: &[RanksCase]) -> Result<(), BenchError> {
    let (rank, meeting, ranks) = (seat.rank, seat.meeting, seat.meeting.ranks());
    for case in DType::ALL.iter().flat_map(|dtype| cases.iter().filter(|case| case.dtype == *dtype)) {
        let inputs = Inputs::new(rank, case);
        for way in &mut *ways {
            let Measured { us, outputs } = way.measure(case, &inputs, meeting)?;
            for outputs in outputs {
                let of_ranks = meeting.gather(rank, outputs)?;
                if rank == 0 {
                    data::judge(case, seat.arithmetic, &of_ranks, way.promise(case.op)).map_err(|what| {
                        BenchError::Wrong(format!("{}, {}: {what}", describe(case), way.name(case.op)))
                    })?;
                }
            }
            let trials = meeting.gather(rank, us)?;
            if let Some(sender) = &seat.sender {
                let row = row(case, &**way, ranks, &trials);
                // The receiver is dropped only if the measurement ends.
                sender.send(row).unwrap_or_default();
            }
        }
    }
    Ok(())
}

/// The row of a case: the slowest rank of each trial, then the median of the trials.
fn row(case: &RanksCase, way: &dyn Way, ranks: usize, trials: &[[f64; TRIALS]]) -> RanksRow {
    let slowest = |trial: usize| trials.iter().map(|us| us[trial]).fold(0.0, f64::max);
    let mut us: [f64; TRIALS] = std::array::from_fn(slowest);
    us.sort_by(f64::total_cmp);
    let Shape { rows, cols } = case.shape;
    let sent = match case.op {
        RanksOp::ForwardReduced | RanksOp::ForwardReducedRows => {
            // The bytes of a ring all-reduce. On two ranks every all-reduce sends as many.
            2 * (ranks - 1) * rows * cols * case.dtype.size() / ranks
        }
        RanksOp::ForwardColumns if way.promise(case.op) == Promise::Nothing => 0,
        RanksOp::ForwardColumns => {
            (ranks - 1) * rows * case.norm.statistics_len(Direction::Forward) * DType::F32.size()
        }
    };
    RanksRow {
        ranks,
        op: case.op.name(),
        way: way.name(case.op),
        norm: case.norm.name(),
        dtype: case.dtype.name(),
        rows,
        cols,
        us: us[TRIALS / 2],
        sent,
    }
}

fn describe(case: &RanksCase) -> String {
    format!("{} {} {} {}", case.norm.name(), case.op.name(), case.dtype.name(), case.shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_measured_and_each_row_is_handed_out() {
        let backend = CpuBackend::new();
        let op = RanksOp::ForwardReduced;
        let case = |norm, dtype, rows, cols| RanksCase { op, norm, dtype, shape: Shape { rows, cols } };
        let cases = [
            case(Norm::Rms, DType::Bf16, 3, 100),
            case(Norm::Layer, DType::F32, 1, 7),
            case(Norm::Rms, DType::F32, 5, 64),
        ];
        let by_rows = cases.map(|case| RanksCase { op: RanksOp::ForwardReducedRows, ..case });
        let rows = measure(&Place::Threads(backend.clone()), 3, &by_rows, &mut |_| {}).unwrap();
        assert!(rows.iter().all(|row| row.us > 0.0 && row.op == "forward_reduced_rows"), "{rows:?}");
        let columns = cases.map(|case| RanksCase { op: RanksOp::ForwardColumns, ..case });
        let rows = measure(&Place::Threads(backend.clone()), 3, &columns, &mut |_| {}).unwrap();
        assert!(rows.iter().all(|row| row.us > 0.0 && row.op == "forward_columns"), "{rows:?}");
        // One number per row to each other rank; layer norm sends three.
        let sent: Vec<_> = rows.iter().map(|row| (row.norm, row.rows, row.sent)).collect();
        assert!(sent.contains(&("layer_norm", 1, 2 * 3 * 4)) && sent.contains(&("rms_norm", 5, 2 * 5 * 4)), "{sent:?}");
        let mut seen = Vec::new();
        let rows = measure(&Place::Threads(backend), 3, &cases, &mut |row| seen.push(row.us)).unwrap();
        assert_eq!(seen, rows.iter().map(|row| row.us).collect::<Vec<_>>());
        let shapes: Vec<_> = rows.iter().map(|row| (row.dtype, row.norm, row.rows, row.cols)).collect();
        // Sorted by dtype, in the order of `DType::ALL`.
        let mut expected = vec![("f32", "layer_norm", 1, 7), ("f32", "rms_norm", 5, 64), ("bf16", "rms_norm", 3, 100)];
        expected.sort_by_key(|(dtype, ..)| DType::ALL.iter().position(|it| it.name() == *dtype));
        assert_eq!(shapes, expected);
        assert!(rows.iter().all(|row| row.us > 0.0 && row.sent > 0), "{rows:?}");
        // A ring all-reduce sends two thirds of x twice.
        assert_eq!(rows.iter().find(|row| row.rows == 3).map(|row| row.sent), Some(2 * 2 * 600 / 3));
    }

    #[test]
    fn the_median_is_that_of_the_slowest_ranks() {
        let trials = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]];
        let shape = Shape { rows: 1, cols: 2 };
        let case = RanksCase { op: RanksOp::ForwardReduced, norm: Norm::Rms, dtype: DType::F32, shape };
        let ways = (cpu::ways(&CpuBackend::new(), 1).unwrap().ranks.pop().unwrap())().unwrap();
        assert_eq!(row(&case, &*ways[0], 1, &trials).us, 6.0);
    }
}
