//! Ranks on one GPU each, with three methods:
//!
//! - one kernel over peer memory;
//! - NCCL's sends composed with a norm of sums, with the same bits of the sum;
//! - NCCL's all-reduce followed by a norm: the sum is added in NCCL's order and rounded before the
//!   residual is added.
//!
//! Events time CUDA graphs of many calls.

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cuda::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_core::cuda::cudarc::driver::{CudaGraph, DriverError};
use rmsnorm_core::cuda::{CudaBackend, NcclComm, NcclId, PeerGroup};
use rmsnorm_core::{AnyCall, Checked, Norm, NormBackend, NormSpec, Problem, Source, Tensor};
use rmsnorm_dist::{Sharded, ShardedNorm};

use super::data::spec;
use super::meeting::Meeting;
use super::{
    Inputs, Make, Measured, Parameters, Promise, Ranks, RanksCase, RanksOp, TRIALS, Tensors, Way, call_of_group,
};
use crate::BenchError;
use crate::buffer::{Buffer, both};
use crate::devices::cuda::capturable;

/// Calls with fewer rows are small: their graphs have more calls, on fewer sets of tensors.
const FEW_ROWS: usize = 512;

/// A rank with one method.
struct Gpu {
    backend: CudaBackend,
    how: How,
}

enum How {
    OneKernel(PeerGroup),
    AllReduce(NcclComm),
    Composed(Sharded<CudaBackend, NcclComm>),
}

/// The methods of all ranks. `bytes`: the size of the peer group's buffers.
pub(super) fn ways(ranks: usize, bytes: usize) -> Result<Ranks, BenchError> {
    let devices = CudaBackend::device_count()?;
    if ranks > devices {
        let plural = if devices == 1 { "" } else { "s" };
        return Err(BenchError::Input(format!(
            "--ranks: {ranks} ranks need as many GPUs, there are {devices} GPU{plural}"
        )));
    }
    let backend = |ordinal| CudaBackend::new(ordinal).and_then(|backend| capturable(&backend));
    let backends = (0..ranks).map(backend).collect::<Result<Vec<_>, _>>()?;
    let arithmetic = backends[0].arithmetic();
    let groups = PeerGroup::in_process(&backends, bytes)?;
    // One id for each communicator. Without NCCL only the one-kernel method exists.
    let ids = match NcclComm::version() {
        Ok(_) => Some([NcclComm::unique_id()?, NcclComm::unique_id()?]),
        Err(_) => None,
    };
    let rank = |(group, backend): (PeerGroup, CudaBackend)| Box::new(move || make(group, &backend, ids)) as Make;
    Ok(Ranks { ranks: groups.into_iter().zip(backends).map(rank).collect(), arithmetic })
}

/// All available methods of a rank.
fn make(group: PeerGroup, backend: &CudaBackend, ids: Option<[NcclId; 2]>) -> Result<Vec<Box<dyn Way>>, BenchError> {
    let comm = |id| NcclComm::from_rank(backend.stream().clone(), group.rank(), group.ranks(), id);
    let comms = ids.map(|[one, two]| Ok::<_, BenchError>((comm(one)?, comm(two)?))).transpose()?;
    let of = |how| Box::new(Gpu { backend: backend.clone(), how }) as Box<dyn Way>;
    let mut ways = vec![of(How::OneKernel(group))];
    if let Some((reducing, sending)) = comms {
        ways.push(of(How::AllReduce(reducing)));
        ways.push(of(How::Composed(Sharded::new(backend.clone(), sending))));
    }
    Ok(ways)
}

/// The common arguments of all calls of a rank.
struct Common {
    case: RanksCase,
    spec: NormSpec,
    parameters: Parameters<CudaBackend>,
    /// The output of NCCL's all-reduce.
    reduced: Buffer<CudaBackend>,
}

impl Gpu {
    /// Compiles the kernels, which is not possible in a capture or while another rank waits.
    fn prepare(&self, case: &RanksCase, spec: &NormSpec) -> Result<(), BenchError> {
        let RanksCase { op, dtype, .. } = *case;
        if op == RanksOp::ForwardColumns {
            // The first call compiles before its kernel waits for other ranks, and each rank has a
            // separate GPU.
            return Ok(());
        }
        let tensors = [Tensor::Weight, Tensor::Residual, Tensor::ResidualOut];
        let mut problem = Problem::forward(spec.norm, spec.rows, spec.cols, dtype, &tensors);
        problem.tensors = problem.tensors.set(Tensor::Bias, spec.norm == Norm::Layer);
        match &self.how {
            How::OneKernel(group) if op == RanksOp::ForwardReducedRows => group.prepare_rows(&problem, 16)?,
            How::OneKernel(group) => group.prepare(&problem, 16)?,
            How::AllReduce(_) => self.backend.prepare(&problem)?,
            How::Composed(rank) => {
                let parts = rank.ranks();
                // A rank adds the rows that it owns, or all rows.
                for rows in [problem.rows.div_ceil(parts), problem.rows] {
                    self.backend.prepare(&Problem { rows, parts, ..problem })?;
                }
                let tensors = problem.tensors.without(Tensor::Residual).without(Tensor::ResidualOut);
                self.backend.prepare(&Problem { tensors, ..problem })?;
            }
        }
        Ok(())
    }

    fn call(&self, common: &mut Common, set: &mut Tensors<CudaBackend>) -> Result<(), BenchError> {
        let Common { case, spec, parameters, reduced } = common;
        let is_summed = matches!(self.how, How::AllReduce(_)) && case.op != RanksOp::ForwardColumns;
        if let (How::AllReduce(comm), true) = (&self.how, is_summed) {
            both!((&set.x, &mut *reduced), x, sum => comm.all_reduce_sum(x.as_view(), sum.as_view_mut()))?;
        }
        let stream = match &self.how {
            How::OneKernel(group) => case.of_stream(group.rank(), group.ranks()),
            How::Composed(rank) => case.of_stream(rank.rank(), rank.ranks()),
            // Every rank has the whole sum.
            How::AllReduce(_) => 0..case.shape.elements(),
        };
        let mut args = set.args(&self.backend, case, parameters, stream);
        if is_summed {
            args.x = Some(Source::Read(reduced.view(&self.backend, 0..case.shape.elements()).into()));
        }
        match &self.how {
            How::OneKernel(group) => call_of_group(group, case.op, spec, args),
            How::AllReduce(_) => Ok(self.backend.launch(AnyCall::Forward(Checked::forward(*spec, args)?))?),
            How::Composed(rank) => call_of_group(rank, case.op, spec, args),
        }
    }

    /// Waits for all enqueued work, and checks that all ranks took part.
    fn finish(&self) -> Result<(), BenchError> {
        self.backend.stream().synchronize().map_err(failed)?;
        match &self.how {
            How::OneKernel(group) => Ok(group.check()?),
            How::AllReduce(_) | How::Composed(_) => Ok(()),
        }
    }

    /// A graph of `calls` calls, uploaded to the device.
    fn capture(
        &self,
        calls: usize,
        common: &mut Common,
        sets: &mut [Tensors<CudaBackend>],
    ) -> Result<CudaGraph, BenchError> {
        let (stream, count) = (self.backend.stream(), sets.len());
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
        let captured = (0..calls).try_for_each(|number| self.call(common, &mut sets[number % count]));
        // A capture must end, also after an error, or the stream cannot be used again.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
        captured?;
        let graph = graph?.ok_or_else(|| BenchError::Input("the capture has recorded no call".into()))?;
        graph.upload().and_then(|()| stream.synchronize()).map_err(failed)?;
        Ok(graph)
    }
}

impl Way for Gpu {
    fn name(&self, op: RanksOp) -> &'static str {
        match (&self.how, op) {
            (How::OneKernel(_), _) => "one kernel",
            (How::AllReduce(_), RanksOp::ForwardReduced | RanksOp::ForwardReducedRows) => "NCCL's all-reduce, norm",
            (How::AllReduce(_), RanksOp::ForwardColumns) => "own columns alone, no exchange",
            (How::Composed(_), _) => "composed with NCCL",
        }
    }

    fn promise(&self, op: RanksOp) -> Promise {
        match (&self.how, op) {
            (How::OneKernel(_) | How::Composed(_), RanksOp::ForwardReduced) => Promise::ExactSum,
            (How::OneKernel(_) | How::Composed(_), RanksOp::ForwardReducedRows) => Promise::ExactRows,
            (How::AllReduce(_), RanksOp::ForwardReduced | RanksOp::ForwardReducedRows) => Promise::SomeSum,
            (How::OneKernel(_) | How::Composed(_), RanksOp::ForwardColumns) => Promise::WholeRows,
            (How::AllReduce(_), RanksOp::ForwardColumns) => Promise::Nothing,
        }
    }

    fn measure(&mut self, case: &RanksCase, inputs: &Inputs, meeting: &Meeting) -> Result<Measured, BenchError> {
        let (rank, spec, backend) = (inputs.rank, spec(case), &self.backend);
        let stream = backend.stream();
        let parameters = Parameters::new(backend, case)?;
        let reduced = Buffer::nan(backend, case.dtype, case.shape.elements())?;
        let mut common = Common { case: *case, spec, parameters, reduced };
        // Large calls use four sets, which together exceed the L2.
        let is_small = case.shape.rows < FEW_ROWS;
        let set = |_| Tensors::new(backend, case, inputs);
        let mut sets = (0..if is_small { 2 } else { 4 }).map(set).collect::<Result<Vec<_>, _>>()?;
        self.prepare(case, &spec)?;
        stream.synchronize().map_err(failed)?;
        meeting.wait(rank)?;
        // NCCL connects on the first call of each kind.
        self.call(&mut common, &mut sets[0])?;
        self.finish()?;
        let before = sets[0].outputs(backend, case)?;

        // Enough calls for about a millisecond, so that the launches of the graph do not count.
        let (calls, launches) = if is_small { (64, 3) } else { (16, 2) };
        let graph = self.capture(calls, &mut common, &mut sets)?;
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
        let (begin, end) = (event()?, event()?);
        meeting.wait(rank)?;
        graph.launch().and_then(|()| stream.synchronize()).map_err(failed)?;
        let mut us = [0.0; TRIALS];
        for us in &mut us {
            meeting.wait(rank)?;
            // The first launch, which is not timed, synchronizes the ranks on the device.
            graph.launch().and_then(|()| begin.record(stream)).map_err(failed)?;
            (0..launches).try_for_each(|_| graph.launch()).and_then(|()| end.record(stream)).map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            *us = f64::from(begin.elapsed_ms(&end).map_err(failed)?) * 1e3 / (calls * launches) as f64;
        }
        self.finish()?;
        let after = sets[sets.len() - 1].outputs(backend, case)?;
        // No rank may begin its next call while another rank still waits in this one.
        meeting.wait(rank)?;
        Ok(Measured { us, outputs: [before, after] })
    }
}

fn failed(error: DriverError) -> BenchError {
    BenchError::Input(format!("a device failed: {error}"))
}
