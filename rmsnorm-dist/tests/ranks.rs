//! The conformance suite on groups of CPU threads.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::ranks::columns::test_columns;
use rmsnorm_conformance::ranks::rows::test_rows;
use rmsnorm_conformance::ranks::test_ranks;
use rmsnorm_cpu::{CpuBackend, Isa};
use rmsnorm_dist::{Ranks, Sharded, ThreadGroup};

fn group(ranks: usize) -> Ranks<Sharded<CpuBackend, ThreadGroup>, CpuBackend> {
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 1).unwrap();
    Ranks::new(ThreadGroup::new(ranks).into_iter().map(|rank| (Sharded::new(backend.clone(), rank), backend.clone())))
}

/// All cases with sums of parts in the core profile, one part per rank.
#[test]
fn every_rank_gives_the_same_within_the_bounds_of_one_device() {
    for ranks in [1, 2, 3, 4, 8] {
        let passed = test_ranks(&group(ranks), ranks == 2).unwrap();
        assert!(passed >= if ranks == 2 { 100 } else { 30 }, "{ranks} ranks: {passed}");
    }
}

/// The sum has the same bits as without divided rows.
#[test]
fn own_rows_are_those_of_the_whole() {
    for ranks in [1, 2, 3, 4, 8] {
        let passed = test_rows(&group(ranks), false).unwrap();
        assert!(passed >= 70, "{ranks} ranks: {passed}");
    }
}

#[test]
fn divided_columns_are_within_the_bounds_of_whole_rows() {
    for ranks in [1, 2, 3, 4, 8] {
        let passed = test_columns(&group(ranks), ranks == 3).unwrap();
        assert!(passed >= if ranks == 3 { 300 } else { 80 }, "{ranks} ranks: {passed}");
    }
}
