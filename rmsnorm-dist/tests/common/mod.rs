//! Ranks that are threads, for the tests that ask what each of them answers.

use std::thread;

use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Sharded, ThreadGroup};

pub type Rank = Sharded<CpuBackend, ThreadGroup>;

/// What each rank answers, each on a thread of its own.
pub fn on_ranks<A: Send>(ranks: usize, rank: impl Fn(&Rank) -> A + Sync) -> Vec<A> {
    let backend = CpuBackend::with(Isa::detect(), 1).unwrap();
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
