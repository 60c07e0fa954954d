//! Ranks that are threads: composed of the CPU backend and a group of threads.

use std::time::Instant;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cpu::{CpuBackend, Forward};
use rmsnorm_core::{Norm, NormSpec};
use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};

use super::data::{Data, spec};
use super::meeting::Meeting;
use super::{Measured, Number, Promise, Ranks, RanksCase, RanksOp, TRIALS, Way, call_of_group};
use crate::BenchError;

/// Seconds of one trial, about.
const TRIAL_SECONDS: f64 = 0.02;

/// A rank's only way.
pub(super) struct Threads(Sharded<CpuBackend, ThreadGroup>);

/// A rank's ways, to be made on its thread.
type Make = Box<dyn FnOnce() -> Result<Vec<Threads>, BenchError> + Send>;

pub(super) fn ways(cpu: &CpuBackend, ranks: usize) -> Result<Ranks<Make>, BenchError> {
    let backend = CpuBackend::with(cpu.isa(), 1)?;
    let rank = |group: ThreadGroup| {
        let backend = backend.clone();
        Box::new(move || Ok(vec![Threads(Sharded::new(backend, group))])) as Make
    };
    Ok(Ranks { ranks: ThreadGroup::new(ranks).into_iter().map(rank).collect(), arithmetic: backend.arithmetic() })
}

/// A rank's tensors.
struct Tensors<'a, T> {
    x: &'a [T],
    residual: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    y: Vec<T>,
    sum: Vec<T>,
}

impl Threads {
    fn call<T: Number>(
        &self,
        case: &RanksCase,
        spec: &NormSpec,
        tensors: &mut Tensors<'_, T>,
    ) -> Result<(), BenchError> {
        let Tensors { x, residual, weight, bias, y, sum } = tensors;
        let mut args = Forward::new(*x, &mut y[..]).weight(*weight);
        args.bias = *bias;
        if case.op != RanksOp::ForwardColumns {
            let stream = case.of_stream(self.0.rank(), self.0.ranks());
            args = args.residual(&residual[stream.clone()]).residual_out(&mut sum[stream]);
        }
        call_of_group(&self.0, case.op, spec, args)
    }
}

impl Way for Threads {
    fn name(&self, _: RanksOp) -> &'static str {
        "threads"
    }

    fn promise(&self, op: RanksOp) -> Promise {
        match op {
            RanksOp::ForwardReduced => Promise::ExactSum,
            RanksOp::ForwardReducedRows => Promise::ExactRows,
            RanksOp::ForwardColumns => Promise::WholeRows,
        }
    }

    fn measure<T: Number>(
        &mut self,
        rank: usize,
        case: &RanksCase,
        data: &Data<T>,
        meeting: &Meeting,
    ) -> Result<Measured<T>, BenchError> {
        let (spec, cols) = (spec(case), case.shape.cols);
        let len = case.shape.rows * cols;
        let mut tensors = Tensors {
            x: &data.x[rank][..len],
            residual: &data.residual[..len],
            weight: &data.weight[..cols],
            bias: (case.norm == Norm::Layer).then_some(&data.bias[..cols]),
            // Neither is what must come out.
            y: vec![T::from_f32(f32::NAN); len],
            sum: vec![T::from_f32(f32::NAN); len],
        };
        self.call(case, &spec, &mut tensors)?;
        let before = [tensors.sum.clone(), tensors.y.clone()];
        meeting.wait(rank)?;
        let start = Instant::now();
        self.call(case, &spec, &mut tensors)?;
        // The same number on all ranks.
        let once = meeting.gather(rank, start.elapsed().as_secs_f64())?.into_iter().fold(1e-9, f64::max);
        let calls = (TRIAL_SECONDS / once).clamp(1.0, 1e4) as usize;
        let mut us = [0.0; TRIALS];
        for us in &mut us {
            meeting.wait(rank)?;
            let start = Instant::now();
            for _ in 0..calls {
                self.call(case, &spec, &mut tensors)?;
            }
            *us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
        }
        Ok(Measured { us, outputs: [before, [tensors.sum, tensors.y]] })
    }
}
