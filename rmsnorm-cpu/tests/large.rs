//! Cases of the core profile that the named tests leave out, on four threads. Some have so many
//! partial rows that the second stage is split repeatedly, and more than an 8-bit index can count.
//! Others have rows more than 2^32 elements apart; the address space between them is never
//! accessed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

use rmsnorm_conformance::{Case, Kind, Layout, Options, Profile, run};
use rmsnorm_cpu::{CpuBackend, Isa};

/// Runs the cases of a profile that `chosen` accepts. There must be `count` of them, and all must
/// pass.
fn pass(profile: Profile, count: usize, chosen: fn(&Case) -> bool) {
    let cases: Vec<Case> = profile.cases(0).into_iter().filter(chosen).collect();
    assert_eq!(cases.len(), count);
    let backend = CpuBackend::with_isa_and_threads(Isa::detect(), 4).unwrap();
    for case in cases {
        let options = Options { cases: vec![case.to_string()], self_test: false, ..Options::default() };
        let summary = run(&backend, &options, &mut |_, _| {}, None).unwrap();
        assert_eq!(summary.counts.passed, 1, "{summary}");
    }
}

#[test]
fn many_partial_rows_are_added_up() {
    let is_large =
        |case: &Case| case.kind == Kind::BACKWARD && [(65, 70_003), (140_001, 1)].contains(&(case.rows, case.cols));
    pass(Profile::Core, 4, is_large);
}

#[test]
fn rows_more_than_32_bits_apart_are_found() {
    pass(Profile::Stress, 48, |case| matches!(case.layout, Layout::Far(_)));
}
