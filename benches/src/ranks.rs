//! Norms over the ranks of a group: how long a call takes that all of them make.
//!
//! Every case is checked before and after it is timed: of a sum all ranks have the same bits, those of the definition where a way promises them,
//! and y is within its bounds on some rows. A time is that of the slowest rank.

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

/// Trials of which the median is taken.
const TRIALS: usize = 7;

/// What a group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanksOp {
    /// The norm of the sum over ranks and a residual, with the sum stored.
    ForwardReduced,
    /// The same with the residual stream divided by rows, and all of y on every rank.
    ForwardReducedRows,
    /// The norm of rows whose columns are divided among ranks; a case's columns are those of each.
    ForwardColumns,
}

impl RanksOp {
    /// Every one.
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

/// The shapes that are measured unless others are asked for.
pub const SHAPES: [&str; 7] = ["1x4096", "8x4096", "8x8192", "64x8192", "256x8192", "1024x8192", "4096x8192"];

/// A call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RanksCase {
    /// The operation.
    pub op: RanksOp,
    /// The norm.
    pub norm: Norm,
    /// Of all tensors.
    pub dtype: DType,
    /// Of x on each rank.
    pub shape: Shape,
}

/// Elements of an x at the most: the host has those of all ranks.
pub const MOST_ELEMENTS: usize = 1 << 28;

/// Whether an x of that shape can be measured.
pub fn is_measurable(shape: Shape) -> bool {
    shape.rows > 0 && shape.cols > 0 && shape.rows.checked_mul(shape.cols).is_some_and(|len| len <= MOST_ELEMENTS)
}

/// Where ranks are.
#[derive(Clone, Debug)]
pub enum Place {
    /// Threads of this process, each with one of the backend's.
    Threads(CpuBackend),
    /// GPUs, one for each rank.
    Gpus,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct RanksRow {
    /// The operation's name.
    pub op: &'static str,
    /// How the call was made.
    pub way: &'static str,
    /// The norm's name.
    pub norm: &'static str,
    /// The dtype's name.
    pub dtype: &'static str,
    /// Rows of x.
    pub rows: usize,
    /// Columns of x.
    pub cols: usize,
    /// Microseconds a call, of the slowest rank: the median of seven trials.
    pub us: f64,
    /// Bytes that a rank sends in a call, at the least.
    pub sent: usize,
}

/// Measures all cases, each in every way that there is, and hands out each row as it comes.
///
/// # Errors
/// The first of any rank: a wrong result, a device that is missing, a case that a backend does not take.
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

/// Room for the largest x; where rows have owners, for two of each of theirs.
fn most_bytes(cases: &[RanksCase], ranks: usize) -> usize {
    let bytes = |case: &RanksCase| {
        let rows = case.shape.rows.max(2 * case.shape.rows.div_ceil(ranks));
        // A row begins at a whole slot.
        rows * (case.shape.cols * case.dtype.size()).next_multiple_of(16)
    };
    cases.iter().map(bytes).max().unwrap_or(0)
}

impl RanksCase {
    /// The elements of the residual and of the sum that a rank has.
    fn of_stream(&self, rank: usize, ranks: usize) -> Range<usize> {
        let Shape { rows, cols } = self.shape;
        match self.op {
            RanksOp::ForwardReducedRows => RowShares { units: rows, unit: cols, ranks }.elements(rank),
            RanksOp::ForwardReduced | RanksOp::ForwardColumns => 0..rows * cols,
        }
    }
}

/// How a call is made, by one rank.
trait Way {
    /// In words.
    fn name(&self, op: RanksOp) -> &'static str;

    /// What is promised of its outputs.
    fn promise(&self, op: RanksOp) -> Promise;

    /// Microseconds a call on this rank, of each trial, and what the calls before and after them gave. All ranks are here at once.
    fn measure(&mut self, rank: usize, case: &RanksCase, meeting: &Meeting) -> Result<Measured, BenchError>;
}

/// What a way's outputs must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    /// The sum has the bits of its definition, y is its norm.
    ExactSum,
    /// The same of the rows that each rank owns, and y is that of all.
    ExactRows,
    /// y is the norm of the sum, whatever that is.
    SomeSum,
    /// y of all ranks together is the norm of whole rows.
    WholeRows,
    /// Nothing: what the same call takes on its own.
    Nothing,
}

/// What every call of a rank reads.
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

/// A rank's tensors for one call.
struct Tensors<D: Measurable> {
    x: Buffer<D>,
    residual: Buffer<D>,
    y: Buffer<D>,
    sum: Buffer<D>,
}

impl<D: Measurable> Tensors<D> {
    fn new(device: &D, rank: usize, case: &RanksCase) -> Result<Self, BenchError> {
        let len = case.shape.elements();
        let matrix = |seed| Buffer::upload(device, &values(case.dtype, seed, 0..len));
        // Neither output is what must come out.
        let unset = || Buffer::nan(device, case.dtype, len);
        Ok(Tensors { x: matrix(rank as u64)?, residual: matrix(data::RESIDUAL)?, y: unset()?, sum: unset()? })
    }

    /// The call that a rank makes on them, of which it has this part of the residual and of the sum, if the case has these.
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
        if case.op != RanksOp::ForwardColumns {
            args.residual = Some(Source::Read(self.residual.view(device, stream.clone()).into()));
            args.residual_out = Some(self.sum.view_mut(device, stream).into());
        }
        args
    }

    fn outputs(&self, device: &D, case: &RanksCase) -> Result<Outputs, BenchError> {
        let all = 0..case.shape.elements();
        Ok([self.sum.download(device, all.clone())?, self.y.download(device, all)?])
    }
}

/// A rank's call on tensors of that shape, which with divided columns are those of one rank.
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

/// The sum, and y.
type Outputs = [Bits; 2];

/// What one rank found.
struct Measured {
    /// Microseconds a call, by trial.
    us: [f64; TRIALS],
    /// Of a call before the trials and of one after.
    outputs: [Outputs; 2],
}

/// The ways that one rank has. Made on its thread: a communicator waits for the others.
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
            // Only one of them reports.
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

/// What a rank's thread has.
struct Seat<'a> {
    rank: usize,
    meeting: &'a Meeting,
    /// Of one rank.
    sender: Option<Sender<RanksRow>>,
    arithmetic: &'a Arithmetic,
}

fn run_rank(ways: &mut [Box<dyn Way>], seat: Seat<'_>, cases: &[RanksCase]) -> Result<(), BenchError> {
    let (rank, meeting, ranks) = (seat.rank, seat.meeting, seat.meeting.ranks());
    for case in DType::ALL.iter().flat_map(|dtype| cases.iter().filter(|case| case.dtype == *dtype)) {
        for way in &mut *ways {
            let Measured { us, outputs } = way.measure(rank, case, meeting)?;
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
                // Whoever listened is gone with the whole.
                sender.send(row).unwrap_or_default();
            }
        }
    }
    Ok(())
}

/// By trial the slowest rank, of these the median.
fn row(case: &RanksCase, way: &dyn Way, ranks: usize, trials: &[[f64; TRIALS]]) -> RanksRow {
    let slowest = |trial: usize| trials.iter().map(|us| us[trial]).fold(0.0, f64::max);
    let mut us: [f64; TRIALS] = std::array::from_fn(slowest);
    us.sort_by(f64::total_cmp);
    let Shape { rows, cols } = case.shape;
    let sent = match case.op {
        RanksOp::ForwardReduced | RanksOp::ForwardReducedRows => {
            // A ring's: on two ranks no other sum sends less or more.
            2 * (ranks - 1) * rows * cols * case.dtype.size() / ranks
        }
        RanksOp::ForwardColumns if way.promise(case.op) == Promise::Nothing => 0,
        RanksOp::ForwardColumns => {
            (ranks - 1) * rows * case.norm.statistics_len(Direction::Forward) * DType::F32.size()
        }
    };
    RanksRow {
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
        // A number of each row to each other rank, or layer norm's three.
        let sent: Vec<_> = rows.iter().map(|row| (row.norm, row.rows, row.sent)).collect();
        assert!(sent.contains(&("layer_norm", 1, 2 * 3 * 4)) && sent.contains(&("rms_norm", 5, 2 * 5 * 4)), "{sent:?}");
        let mut seen = Vec::new();
        let rows = measure(&Place::Threads(backend), 3, &cases, &mut |row| seen.push(row.us)).unwrap();
        assert_eq!(seen, rows.iter().map(|row| row.us).collect::<Vec<_>>());
        let shapes: Vec<_> = rows.iter().map(|row| (row.dtype, row.norm, row.rows, row.cols)).collect();
        // By dtype, in the order of all dtypes.
        let mut expected = vec![("f32", "layer_norm", 1, 7), ("f32", "rms_norm", 5, 64), ("bf16", "rms_norm", 3, 100)];
        expected.sort_by_key(|(dtype, ..)| DType::ALL.iter().position(|it| it.name() == *dtype));
        assert_eq!(shapes, expected);
        assert!(rows.iter().all(|row| row.us > 0.0 && row.sent > 0), "{rows:?}");
        // A ring's: two thirds of x, there and back.
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
