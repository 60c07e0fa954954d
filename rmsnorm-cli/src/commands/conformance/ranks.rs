//! `rmsnorm conformance --ranks`: a group of ranks on one backend.

use rmsnorm_core::AnyBackend;
use rmsnorm_core::conformance::Profile;
use rmsnorm_core::conformance::ranks::{self, Group};
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_dist::{Ranks, Sharded, ThreadGroup};

use crate::backends;
use crate::failure::Failure;
use crate::output::print;
use crate::progress::Progress;

/// Runs the profile's sums of parts on so many ranks, and prints what became of them.
pub fn prove(backend: &AnyBackend, ranks: usize, profile: &str) -> Result<(), Failure> {
    let is_whole =
        backends::one_of("--profile", profile, &[Profile::Smoke, Profile::Core], Profile::name)? == Profile::Core;
    let Some(cpu) = backend.as_cpu() else {
        return Err(Failure::Input("--ranks: expected a backend that has ranks: cpu".into()));
    };
    let group = threads(cpu, ranks)?;
    let bar = Progress::new("conformance");
    let summary = ranks::run(&group, is_whole, &mut |done, total| bar.set(done, total));
    drop(bar);
    print(&format!("{summary}\n"))?;
    if summary.is_success() { Ok(()) } else { Err(Failure::Check) }
}

/// Threads of this process, of which each makes its calls alone.
fn threads(cpu: &CpuBackend, ranks: usize) -> Result<impl Group + use<>, Failure> {
    let backend = CpuBackend::with(cpu.isa(), 1)?;
    let rank = |group: ThreadGroup| (Sharded::new(backend.clone(), group), backend.clone());
    Ok(Ranks::new(ThreadGroup::new(ranks).into_iter().map(rank)))
}
