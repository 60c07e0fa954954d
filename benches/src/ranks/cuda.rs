//! Ranks on a GPU each: in one kernel over memory that all reach; and with NCCL, composed of its sends and one norm of sums (the same bits of
//! the sum), and as its all-reduce followed by a norm (a sum that is rounded before the residual is added, in NCCL's order).
//!
//! Times are those of graphs of many calls, between two events.

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cuda::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use rmsnorm_core::cuda::cudarc::driver::{CudaGraph, DriverError};
use rmsnorm_core::cuda::{CudaBackend, NcclComm, NcclId, PeerGroup};
use rmsnorm_core::{AnyCall, Checked, Norm, NormBackend, NormSpec, Problem, Source, Tensor};
use rmsnorm_dist::{Sharded, ShardedNorm};

use super::data::spec;
use super::meeting::Meeting;
use super::{Make, Measured, Parameters, Promise, Ranks, RanksCase, RanksOp, TRIALS, Tensors, Way, call_of_group};
use crate::BenchError;
use crate::buffer::{Buffer, both};
use crate::devices::cuda::capturable;

/// Rows up to which a call is small: there are more of them in a graph, on fewer sets of tensors.
const FEW_ROWS: usize = 512;

/// A rank, with one way.
struct Gpu {
    backend: CudaBackend,
    how: How,
}

enum How {
    OneKernel(PeerGroup),
    AllReduce(NcclComm),
    Composed(Sharded<CudaBackend, NcclComm>),
}

/// `bytes`: of the largest x.
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
    // One for each communicator. Without NCCL there is one way.
    let ids = match NcclComm::version() {
        Ok(_) => Some([NcclComm::unique_id()?, NcclComm::unique_id()?]),
        Err(_) => None,
    };
    let rank = |(group, backend): (PeerGroup, CudaBackend)| Box::new(move || make(group, &backend, ids)) as Make;
    Ok(Ranks { ranks: groups.into_iter().zip(backends).map(rank).collect(), arithmetic })
}

/// All ways that there are to make a rank's call.
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

/// What every call of a rank has in common.
struct Common {
    case: RanksCase,
    spec: NormSpec,
    parameters: Parameters<CudaBackend>,
    /// Room for what NCCL's all-reduce gives.
    reduced: Buffer<CudaBackend>,
}

impl Gpu {
    /// Compiles: that may not come into a capture, nor while another rank waits.
    fn prepare(&self, case: &RanksCase, spec: &NormSpec) -> Result<(), BenchError> {
        let RanksCase { op, dtype, .. } = *case;
        if op == RanksOp::ForwardColumns {
            // The first call compiles, before the ranks' kernels meet: each has a GPU of its own.
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
                // A rank adds its own rows, or all.
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
            // It has all of the sum.
            How::AllReduce(_) => 0..case.shape.elements(),
        };
        let mut args = set.args(&self.backend, case, parameters, stream);
        if is_summed {
            args.x = Source::Read(reduced.view(&self.backend, 0..case.shape.elements()).into());
        }
        match &self.how {
            How::OneKernel(group) => call_of_group(group, case.op, spec, args),
            How::AllReduce(_) => Ok(self.backend.launch(AnyCall::Forward(Checked::forward(*spec, args)?))?),
            How::Composed(rank) => call_of_group(rank, case.op, spec, args),
        }
    }

    /// Waits for what was enqueued, and asks whether all ranks came.
    fn finish(&self) -> Result<(), BenchError> {
        self.backend.stream().synchronize().map_err(failed)?;
        match &self.how {
            How::OneKernel(group) => Ok(group.check()?),
            How::AllReduce(_) | How::Composed(_) => Ok(()),
        }
    }

    /// A graph of so many calls, ready on the device.
    fn capture(
        &self,
        calls: usize,
        common: &mut Common,
        sets: &mut [Tensors<CudaBackend>],
    ) -> Result<CudaGraph, BenchError> {
        let (stream, count) = (self.backend.stream(), sets.len());
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
        let captured = (0..calls).try_for_each(|number| self.call(common, &mut sets[number % count]));
        // Ended in any case, or the stream would be of no further use.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
        captured?;
        let graph = graph?.ok_or_else(|| BenchError::Input("nothing was captured".into()))?;
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

    fn measure(&mut self, rank: usize, case: &RanksCase, meeting: &Meeting) -> Result<Measured, BenchError> {
        let (spec, backend) = (spec(case), &self.backend);
        let stream = backend.stream();
        let parameters = Parameters::new(backend, case)?;
        let reduced = Buffer::nan(backend, case.dtype, case.shape.elements())?;
        let mut common = Common { case: *case, spec, parameters, reduced };
        // More than the L2 has room for, where a call nearly fills it.
        let is_small = case.shape.rows < FEW_ROWS;
        let set = |_| Tensors::new(backend, rank, case);
        let mut sets = (0..if is_small { 2 } else { 4 }).map(set).collect::<Result<Vec<_>, _>>()?;
        self.prepare(case, &spec)?;
        stream.synchronize().map_err(failed)?;
        meeting.wait(rank)?;
        // NCCL connects at the first call of a kind.
        self.call(&mut common, &mut sets[0])?;
        self.finish()?;
        let before = sets[0].outputs(backend, case)?;

        // As many calls as take about a millisecond or more, but for the launches of the graph itself.
        let (calls, launches) = if is_small { (64, 3) } else { (16, 2) };
        let graph = self.capture(calls, &mut common, &mut sets)?;
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
        let (begin, end) = (event()?, event()?);
        meeting.wait(rank)?;
        graph.launch().and_then(|()| stream.synchronize()).map_err(failed)?;
        let mut us = [0.0; TRIALS];
        for us in &mut us {
            meeting.wait(rank)?;
            // Here the ranks meet on the device.
            graph.launch().and_then(|()| begin.record(stream)).map_err(failed)?;
            (0..launches).try_for_each(|_| graph.launch()).and_then(|()| end.record(stream)).map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            *us = f64::from(begin.elapsed_ms(&end).map_err(failed)?) * 1e3 / (calls * launches) as f64;
        }
        self.finish()?;
        let after = sets[sets.len() - 1].outputs(backend, case)?;
        // No rank is in its next call while another still waits for one of this.
        meeting.wait(rank)?;
        Ok(Measured { us, outputs: [before, after] })
    }
}

fn failed(error: DriverError) -> BenchError {
    BenchError::Input(format!("a device fails: {error}"))
}
