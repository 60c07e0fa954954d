//! Groups whose ranks are threads.

use std::thread;

use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Sharded, ThreadGroup};

pub type Rank = Sharded<CpuBackend, ThreadGroup>;

/// The answer of each rank, run on a thread each.
pub fn on_ranks<A: Send>(ranks: usize, rank: impl Fn(&Rank) -> A + Sync) -> Vec<A> {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = ThreadGroup::new(ranks)
            .into_iter()
            .map(|group| {
                let (norm, rank) = (Sharded::new(backend.clone(), group), &rank);
                scope.spawn(move || rank(&norm))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
