//! The bits of the CPU's results, from version to version. They depend on nothing but the call, so one number stands for all
//! machines; a bug that stays within the error bounds changes it too.

use rmsnorm_conformance::{Options, run};
use rmsnorm_cpu::{CpuBackend, Isa};

/// SHA-256 of all outputs of the suite's smoke profile. If results change on purpose, so does this, and CHANGELOG.md says so.
const SMOKE: &str = "f419068a01d7fe29a778969ea69440d962ee49c2c1b20eaf48b521ba76cd2e8d";

#[test]
fn results_have_the_bits_of_earlier_versions() {
    let options = Options { self_test: false, ..Options::default() };
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with(isa, 2).unwrap();
        let summary = run(&backend, &options, &mut |_, _| (), None).unwrap();
        assert_eq!(summary.digest, SMOKE, "on {isa}: {summary}");
    }
}
