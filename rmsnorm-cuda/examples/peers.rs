//! How long a norm of a sum over ranks takes: a thread for each GPU of this machine, or streams of one GPU.
//!
//!     cargo run --release -p rmsnorm-cuda --features peers,nccl --example peers [-- --one] [--ranks N]
//!
//! In one kernel; and, with a GPU for each rank and NCCL, composed of NCCL's sends and one norm of sums (the same bits), and as NCCL's
//! all-reduce followed by a norm (a sum that is rounded before the residual is added, in NCCL's order).
//!
//! bf16, RMS norm, residual and weight. Each shape is checked before and after it is timed: the sum bit for bit and y within its bounds on some rows,
//! and all bits of all rows the same on every rank. Times are those of graphs of many calls, the slowest rank's, median of 7.

use std::error::Error;
use std::process::exit;
use std::sync::{Barrier, Mutex, PoisonError};
use std::{env, thread};

use rmsnorm_conformance::Harness;
use rmsnorm_conformance::bounds::{Mode, Model};
use rmsnorm_conformance::testing::{Bits, ForwardTruth, exact, values};
use rmsnorm_cuda::cudarc::driver::CudaSlice;
use rmsnorm_cuda::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_cuda::spec::reference::{ForwardInputs, sum_of_parts};
use rmsnorm_cuda::spec::{DType, Norm, NormSpec, Problem, Tensor, bf16};
use rmsnorm_cuda::{CudaBackend, Forward, NcclComm, NcclId, PeerGroup};
use rmsnorm_dist::{Sharded, ShardedNorm};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROWS: [usize; 6] = [1, 8, 64, 256, 1024, 4096];
const COLS: [usize; 2] = [4096, 8192];
const MOST: usize = ROWS[5] * COLS[1];
const TRIALS: usize = 7;

/// What the threads of all ranks have in common.
struct Meeting {
    barrier: Barrier,
    /// By rank: microseconds of the last trial.
    times: Mutex<Vec<f64>>,
    /// By rank: the sum and y.
    outputs: Mutex<Vec<[Vec<bf16>; 2]>>,
}

/// How a rank's call is made.
enum Way {
    /// In one kernel.
    Fused(PeerGroup),
    /// NCCL's sends, and one norm of sums.
    Composed(Sharded<CudaBackend, NcclComm>),
    /// NCCL's all-reduce, and a norm.
    AllReduce(CudaBackend, NcclComm, CudaSlice<bf16>),
}

impl Way {
    fn rank(&self) -> usize {
        match self {
            Way::Fused(group) => group.rank(),
            Way::Composed(rank) => rank.rank(),
            Way::AllReduce(_, comm, _) => comm.rank(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Way::Fused(_) => "one kernel",
            Way::Composed(_) => "composed with NCCL",
            Way::AllReduce(..) => "NCCL's all-reduce, norm",
        }
    }

    /// Whether the sum has the bits of its definition.
    fn is_exact(&self) -> bool {
        matches!(self, Way::Fused(_) | Way::Composed(_))
    }

    /// Bytes that a rank sends, of an x of so many.
    fn sent(&self, ranks: usize, bytes: usize) -> usize {
        match self {
            Way::Fused(_) => (ranks - 1) * bytes,
            Way::Composed(_) | Way::AllReduce(..) => 2 * (ranks - 1) * bytes / ranks,
        }
    }

    /// Compiles, and connects: neither may come into a capture.
    fn prepare(&self, problem: &Problem) -> Outcome<()> {
        let parts = |ranks: usize| Problem { rows: problem.rows.div_ceil(ranks), parts: ranks, ..*problem };
        match self {
            Way::Fused(group) => group.prepare(problem, 16)?,
            Way::Composed(rank) => rank.backend().prepare(&parts(rank.ranks()))?,
            Way::AllReduce(backend, ..) => backend.prepare(problem)?,
        }
        Ok(())
    }

    fn call(&mut self, spec: &NormSpec, weight: &CudaSlice<bf16>, set: &mut Tensors) -> Outcome<()> {
        let (x, y) = (set.x.as_view(), set.y.as_view_mut());
        match self {
            Way::Fused(group) => {
                let args = Forward::new(x, y).weight(weight.as_view());
                group
                    .forward_reduced(spec, args.residual(set.residual.as_view()).residual_out(set.sum.as_view_mut()))?;
            }
            Way::Composed(rank) => {
                let args = Forward::new(x, y).weight(weight.as_view());
                rank.forward_reduced(spec, args.residual(set.residual.as_view()).residual_out(set.sum.as_view_mut()))?;
            }
            Way::AllReduce(backend, comm, reduced) => {
                let len = spec.rows * spec.cols;
                comm.all_reduce_sum(x, reduced.slice_mut(..len))?;
                let args = Forward::new(reduced.slice(..len), y).weight(weight.as_view());
                backend.forward(spec, args.residual(set.residual.as_view()).residual_out(set.sum.as_view_mut()))?;
            }
        }
        Ok(())
    }

    /// After a synchronization: whether all ranks came.
    fn check(&self) -> Outcome<()> {
        match self {
            Way::Fused(group) => group.check()?,
            Way::Composed(_) | Way::AllReduce(..) => {}
        }
        Ok(())
    }
}

/// The data of all ranks, as long as the largest shape.
struct Data {
    x: Vec<Vec<bf16>>,
    residual: Vec<bf16>,
    weight: Vec<bf16>,
}

/// A rank's tensors for one call.
struct Tensors {
    x: CudaSlice<bf16>,
    residual: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
    sum: CudaSlice<bf16>,
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let is_one = arguments.iter().any(|argument| argument == "--one");
    let ranks = arguments.iter().position(|argument| argument == "--ranks").and_then(|at| arguments.get(at + 1));
    let devices = match CudaBackend::device_count() {
        Ok(count) => count,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let ranks = ranks.map_or(Ok(if is_one { 2 } else { devices.min(8) }), |ranks| ranks.parse())?;
    if !is_one && ranks > devices {
        return Err(format!("{ranks} ranks on {devices} GPUs: --one has them all on the first").into());
    }
    if is_one && env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        println!("note: with CUDA_DEVICE_MAX_CONNECTIONS=32 no stream waits for another's queue");
    }
    let first = CudaBackend::new(0)?;
    let backends: Vec<CudaBackend> =
        (0..ranks).map(|rank| on_a_stream(&first, if is_one { 0 } else { rank })).collect::<Outcome<_>>()?;
    println!("{ranks} ranks on {}: {first}", if is_one { "one GPU" } else { "a GPU each" });

    let data = Data {
        x: (0..ranks).map(|rank| values(rank as u64, MOST)).collect(),
        residual: values(100, MOST),
        weight: values(101, COLS[1]),
    };
    let meeting = Meeting {
        barrier: Barrier::new(ranks),
        times: Mutex::new(vec![0.0; ranks]),
        outputs: Mutex::new(vec![[vec![], vec![]]; ranks]),
    };
    let groups = PeerGroup::in_process(&backends, MOST * size_of::<bf16>())?;
    // NCCL takes no two ranks on a GPU.
    let id = match NcclComm::version() {
        Ok(_) if is_one => None,
        Ok((major, minor, patch)) => {
            println!("NCCL {major}.{minor}.{patch}");
            Some(NcclComm::unique_id()?)
        }
        Err(error) => {
            println!("without NCCL: {error}");
            None
        }
    };
    println!("{:>6} {:>6} {:<24} {:>10} {:>12}  check", "rows", "cols", "", "us", "GB/s sent");
    thread::scope(|scope| {
        for (group, backend) in groups.into_iter().zip(&backends) {
            let (data, meeting) = (&data, &meeting);
            scope.spawn(move || {
                let rank = group.rank();
                if let Err(error) = ways(group, backend, id).and_then(|mut ways| run(&mut ways, backend, data, meeting))
                {
                    // The others wait for this one.
                    eprintln!("rank {rank}: {error}");
                    exit(1);
                }
            });
        }
    });
    Ok(())
}

/// All ways that there are to make a rank's call.
fn ways(group: PeerGroup, backend: &CudaBackend, id: Option<NcclId>) -> Outcome<Vec<Way>> {
    let (rank, ranks, mut ways) = (group.rank(), group.ranks(), vec![Way::Fused(group)]);
    if let Some(id) = id {
        let stream = backend.stream().clone();
        let comm = NcclComm::from_rank(stream.clone(), rank, ranks, id)?;
        // The owner of what the other way borrows: it outlives it in this list.
        // SAFETY:
        // - library: the one that made it;
        // - life: the borrowed one stands behind its owner in the list, and is dropped first;
        // - sharing: both make their calls on this thread.
        let borrowed = unsafe { NcclComm::from_raw(comm.as_raw(), stream.clone()) }?;
        ways.push(Way::AllReduce(backend.clone(), borrowed, stream.alloc_zeros(MOST)?));
        ways.push(Way::Composed(Sharded::new(backend.clone(), comm)));
    }
    Ok(ways)
}

/// A backend on a new stream of that device.
fn on_a_stream(first: &CudaBackend, ordinal: usize) -> Outcome<CudaBackend> {
    let device = if ordinal == 0 { first.clone() } else { CudaBackend::new(ordinal)? };
    let context = device.stream().context();
    // SAFETY:
    // - streams: the tensors of a rank are used on its own stream only.
    unsafe { context.disable_event_tracking() };
    Ok(device.on(context.new_stream()?)?)
}

/// All shapes, on one rank.
fn run(ways: &mut [Way], backend: &CudaBackend, data: &Data, meeting: &Meeting) -> Outcome<()> {
    for cols in COLS {
        for rows in ROWS {
            let tensors = [Tensor::Weight, Tensor::Residual, Tensor::ResidualOut];
            for way in &mut *ways {
                way.prepare(&Problem::forward(Norm::Rms, rows, cols, DType::Bf16, &tensors))?;
                let (us, check) = measure(way, backend, data, meeting, (rows, cols))?;
                if way.rank() == 0 {
                    let sent = way.sent(data.x.len(), rows * cols * size_of::<bf16>());
                    let name = way.name();
                    println!("{rows:>6} {cols:>6} {name:<24} {us:>10.2} {:>12.1}  {check}", sent as f64 / us / 1e3);
                }
            }
        }
    }
    Ok(())
}

/// Microseconds of one call of that shape, and what its check found.
fn measure(
    way: &mut Way,
    backend: &CudaBackend,
    data: &Data,
    meeting: &Meeting,
    (rows, cols): (usize, usize),
) -> Outcome<(f64, &'static str)> {
    let (stream, spec, len) = (backend.stream(), NormSpec::rms(rows, cols, 1e-6), rows * cols);
    let weight = stream.clone_htod(&data.weight[..cols])?;
    // More than the L2 has room for, where a call nearly fills it.
    let mut sets = Vec::new();
    for _ in 0..if rows < 1024 { 2 } else { 4 } {
        sets.push(Tensors {
            x: stream.clone_htod(&data.x[way.rank()][..len])?,
            residual: stream.clone_htod(&data.residual[..len])?,
            y: stream.alloc_zeros(len)?,
            sum: stream.alloc_zeros(len)?,
        });
    }
    stream.synchronize()?;
    meeting.barrier.wait();
    way.call(&spec, &weight, &mut sets[0])?;
    let before = check(way, backend, data, meeting, (&spec, &sets[0]))?;

    // As many calls as take about a millisecond or more, but for the launches of the graph itself.
    let (calls, launches) = if rows <= 256 { (64, 3) } else { (16, 2) };
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let count = sets.len();
    for number in 0..calls {
        way.call(&spec, &weight, &mut sets[number % count])?;
    }
    let graph = stream.end_capture(CUgraphInstantiate_flags(0))?.ok_or("nothing was captured")?;
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let (begin, end) = (event()?, event()?);
    // Else the first launch would, while a kernel of another rank may be waiting on the same device.
    graph.upload()?;
    stream.synchronize()?;
    meeting.barrier.wait();
    graph.launch()?;
    stream.synchronize()?;
    let mut trials = Vec::new();
    for _ in 0..TRIALS {
        meeting.barrier.wait();
        // Here the ranks meet on the device.
        graph.launch()?;
        begin.record(stream)?;
        for _ in 0..launches {
            graph.launch()?;
        }
        end.record(stream)?;
        stream.synchronize()?;
        let us = f64::from(begin.elapsed_ms(&end)?) * 1e3 / (calls * launches) as f64;
        meeting.times.lock().unwrap_or_else(PoisonError::into_inner)[way.rank()] = us;
        meeting.barrier.wait();
        let times = meeting.times.lock().unwrap_or_else(PoisonError::into_inner);
        trials.push(times.iter().copied().fold(0.0, f64::max));
        drop(times);
        meeting.barrier.wait();
    }
    trials.sort_by(f64::total_cmp);
    let after = check(way, backend, data, meeting, (&spec, &sets[count - 1]))?;
    Ok((trials[TRIALS / 2], if before == "ok" { after } else { before }))
}

/// What is wrong with what is there, or `ok`. All ranks meet here, and rank 0 says it.
fn check(
    way: &Way,
    backend: &CudaBackend,
    data: &Data,
    meeting: &Meeting,
    (spec, set): (&NormSpec, &Tensors),
) -> Outcome<&'static str> {
    let stream = backend.stream();
    stream.synchronize()?;
    way.check()?;
    let outputs = [stream.clone_dtoh(&set.sum)?, stream.clone_dtoh(&set.y)?];
    stream.synchronize()?;
    meeting.outputs.lock().unwrap_or_else(PoisonError::into_inner)[way.rank()] = outputs;
    meeting.barrier.wait();
    let verdict = if way.rank() == 0 {
        let outputs = meeting.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        judge(backend, data, spec, (&outputs, way.is_exact()))
    } else {
        "ok"
    };
    meeting.barrier.wait();
    Ok(verdict)
}

/// y by the sum that was stored, where that is not the one of the definition.
fn judge(
    backend: &CudaBackend,
    data: &Data,
    spec: &NormSpec,
    (outputs, is_exact): (&[[Vec<bf16>; 2]], bool),
) -> &'static str {
    let bits = |values: &[bf16]| Bits::of(values).bits;
    if outputs.iter().any(|[sum, y]| bits(sum) != bits(&outputs[0][0]) || bits(y) != bits(&outputs[0][1])) {
        return "ranks differ";
    }
    let (rows, cols) = (spec.rows, spec.cols);
    let sampled = [0, rows / 3, rows / 2, rows - 1];
    let of_rows = |values: &[bf16]| sampled.map(|row| values[row * cols..(row + 1) * cols].to_vec()).concat();
    let x: Vec<f64> = data.x.iter().flat_map(|x| exact(&of_rows(x))).collect();
    let sum = sum_of_parts(&x, data.x.len(), Some(&exact(&of_rows(&data.residual))), DType::Bf16);
    let [got_sum, got_y] = outputs[0].each_ref().map(|output| of_rows(output));
    let sum = if is_exact { sum } else { exact(&got_sum) };
    if bits(&got_sum) != Bits::rounded(&sum, DType::Bf16).bits {
        return "the sum is wrong";
    }
    let (weight, arithmetic) = (exact(&data.weight[..cols]), backend.arithmetic());
    let inputs = ForwardInputs { x: &sum, residual: None, weight: Some(&weight), bias: None };
    let model = Model { arithmetic: &arithmetic, mode: Mode::Worst };
    let spec = NormSpec::rms(sampled.len(), cols, spec.eps);
    let truth = ForwardTruth::of_sum(&spec, inputs, (DType::Bf16, DType::Bf16), model);
    if truth.judge(Tensor::Y, &got_y).is_pass() { "ok" } else { "y is out of its bounds" }
}
