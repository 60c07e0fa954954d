//! `rmsnorm conformance --ranks`: tests a group of ranks on one backend.

use rmsnorm_core::AnyBackend;
use rmsnorm_core::conformance::Profile;
use rmsnorm_core::conformance::ranks::{self, Group, RanksSummary};
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::cuda::{CudaBackend, PeerGroup};
use rmsnorm_dist::{Ranks, Sharded, ThreadGroup};

use crate::backends;
use crate::failure::Failure;
use crate::output::print;
use crate::progress::Progress;

/// Runs all cases or the smoke cases on a group, and reports its progress.
type Run = fn(&dyn Group, bool, &mut dyn FnMut(usize, usize)) -> RanksSummary;

/// Runs three lists of cases on `ranks` ranks and prints a line for each: norms of a sum over the
/// ranks, the same with the residual divided by rows, and norms of rows whose columns are divided.
pub fn prove(backend: &AnyBackend, ranks: usize, profile: &str) -> Result<(), Failure> {
    let is_whole =
        backends::one_of("--profile", profile, &[Profile::Smoke, Profile::Core], Profile::name)? == Profile::Core;
    let group: Box<dyn Group> = match (backend.as_cpu(), backend.as_cuda()) {
        (Some(cpu), _) => Box::new(threads(cpu, ranks)?),
        (None, Some(_)) => Box::new(gpus(ranks)?),
        (None, None) => {
            return Err(Failure::Input("--ranks: expected cpu or cuda, the only backends with ranks".into()));
        }
    };
    let run = |what: &str, run: Run| {
        let bar = Progress::new("conformance");
        let summary = run(&*group, is_whole, &mut |done, total| bar.set(done, total));
        drop(bar);
        print(&format!("{what}: {summary}\n")).map(|()| summary)
    };
    let reduced = run("sums over ranks", ranks::run)?;
    let rows = run("rows divided among ranks", ranks::rows::run)?;
    let columns = run("columns divided among ranks", ranks::columns::run)?;
    if [reduced, rows, columns].iter().all(RanksSummary::is_success) { Ok(()) } else { Err(Failure::Check) }
}

/// A group of threads of this process. Each rank computes with one thread.
fn threads(cpu: &CpuBackend, ranks: usize) -> Result<impl Group + use<>, Failure> {
    let backend = CpuBackend::with_isa_and_threads(cpu.isa(), 1)?;
    let rank = |group: ThreadGroup| (Sharded::new(backend.clone(), group), backend.clone());
    Ok(Ranks::new(ThreadGroup::new(ranks).into_iter().map(rank)))
}

/// Bytes of the shared memory for one rank's x. A larger x is exchanged in blocks of rows.
const ROOM: usize = 16 << 20;

/// A group of GPUs, one for each rank, with peer access to each other's memory.
fn gpus(ranks: usize) -> Result<impl Group + use<>, Failure> {
    let devices = CudaBackend::device_count()?;
    if ranks > devices {
        let plural = if devices == 1 { "" } else { "s" };
        return Err(Failure::Input(format!(
            "--ranks: {ranks} ranks need as many GPUs, there are {devices} GPU{plural}"
        )));
    }
    let backends = (0..ranks).map(CudaBackend::new).collect::<Result<Vec<_>, _>>()?;
    Ok(Ranks::new(PeerGroup::in_process(&backends, ROOM)?.into_iter().zip(backends)))
}
