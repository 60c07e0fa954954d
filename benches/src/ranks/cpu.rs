//! Ranks that are threads: the CPU backend composed with a group of threads.

use std::time::Instant;

use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_dist::{Sharded, ShardedNorm, ThreadGroup};

use super::data::spec;
use super::meeting::Meeting;
use super::{
    Inputs, Make, Measured, Parameters, Promise, Ranks, RanksCase, RanksOp, TRIALS, Tensors, Way, call_of_group,
};
use crate::BenchError;

/// The approximate duration of a trial, in seconds.
const TRIAL_SECONDS: f64 = 0.02;

/// The only method of a rank.
struct Threads(Sharded<CpuBackend, ThreadGroup>);

pub(super) fn ways(cpu: &CpuBackend, ranks: usize) -> Result<Ranks, BenchError> {
    let backend = CpuBackend::with_isa_and_threads(cpu.isa(), 1)?;
    let rank = |group: ThreadGroup| {
        let backend = backend.clone();
        Box::new(move || Ok(vec![Box::new(Threads(Sharded::new(backend, group))) as Box<dyn Way>])) as Make
    };
    Ok(Ranks { ranks: ThreadGroup::new(ranks).into_iter().map(rank).collect(), arithmetic: backend.arithmetic() })
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

    fn measure(&mut self, case: &RanksCase, inputs: &Inputs, meeting: &Meeting) -> Result<Measured, BenchError> {
        let rank = inputs.rank;
        let (spec, backend, stream) = (spec(case), self.0.backend(), case.of_stream(rank, self.0.ranks()));
        let parameters = Parameters::new(backend, case)?;
        let mut tensors = Tensors::new(backend, case, inputs)?;
        let call = |tensors: &mut Tensors<CpuBackend>| {
            call_of_group(&self.0, case.op, &spec, tensors.args(backend, case, &parameters, stream.clone()))
        };
        call(&mut tensors)?;
        let before = tensors.outputs(backend, case)?;
        meeting.wait(rank)?;
        let start = Instant::now();
        call(&mut tensors)?;
        // All ranks compute the same number of calls.
        let once = meeting.gather(rank, start.elapsed().as_secs_f64())?.into_iter().fold(1e-9, f64::max);
        let calls = (TRIAL_SECONDS / once).clamp(1.0, 1e4) as usize;
        let mut us = [0.0; TRIALS];
        for us in &mut us {
            meeting.wait(rank)?;
            let start = Instant::now();
            for _ in 0..calls {
                call(&mut tensors)?;
            }
            *us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
        }
        Ok(Measured { us, outputs: [before, tensors.outputs(backend, case)?] })
    }
}
