//! The bits of the CPU's results, from version to version. They depend on nothing but the call, so one number stands for all
//! machines; a bug that stays within the error bounds changes it too.

use rmsnorm_conformance::{Options, list, run};
use rmsnorm_cpu::{CpuBackend, Isa};

/// SHA-256 of all outputs of the suite's smoke profile whose results are floats, of those of sums after the norm, of sums of parts, of
/// gradients as sums, of those whose results are codes, and of those whose results are codes along columns too. If results change on purpose, so does this, and CHANGELOG.md says so.
const FLOATS: &str = "f419068a01d7fe29a778969ea69440d962ee49c2c1b20eaf48b521ba76cd2e8d";
const SUMS: &str = "978b2e0fa522291abc3a9ef09a6486ea021dcbb8f4a14c077c0da96f6b8a83ce";
const PARTS: &str = "123f25ff6d09675c7d46988f256c80bacea0ca5b040d951ac0a74dde93cb0589";
const GRADIENTS: &str = "6da5ac001fd6a3a8a865ce00ee089d1df6859de4afbf12bce396c3b12264b640";
const CODES: &str = "a465a2ef33c0dce346d9652868bcc2502bfe2c2670af0bc19dd84192e78892c5";
const COLUMNS: &str = "e41bfd588b855908b1e54482e45233bbf116348c04ea8e1b572f48df4b339edf";

/// Whether a case has the copy along columns: by the letters of its tensors, which stand before its offset.
fn is_along_columns(id: &str) -> bool {
    let letters = id.split_once(":offset").and_then(|(before, _)| before.rsplit(':').next());
    id.contains(":quantized_forward:") && letters.is_some_and(|letters| letters.contains('c'))
}

#[test]
fn results_have_the_bits_of_earlier_versions() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with(isa, 2).unwrap();
        let smoke = list(&backend, &Options::default()).unwrap();
        let (codes, floats): (Vec<String>, Vec<String>) =
            smoke.into_iter().partition(|id| id.contains(":quantized_forward:"));
        let (columns, codes): (Vec<String>, Vec<String>) = codes.into_iter().partition(|id| is_along_columns(id));
        let (sums, floats): (Vec<String>, Vec<String>) = floats.into_iter().partition(|id| id.contains("after"));
        let (parts, floats): (Vec<String>, Vec<String>) =
            floats.into_iter().partition(|id| id.contains("forward_parts"));
        let (gradients, floats): (Vec<String>, Vec<String>) =
            floats.into_iter().partition(|id| id.contains("backward_sums"));
        assert!([&columns, &sums, &parts, &gradients].into_iter().all(|ids| !ids.is_empty()));
        for (cases, expected) in
            [(floats, FLOATS), (sums, SUMS), (parts, PARTS), (gradients, GRADIENTS), (codes, CODES), (columns, COLUMNS)]
        {
            let options = Options { cases, self_test: false, ..Options::default() };
            let summary = run(&backend, &options, &mut |_, _| (), None).unwrap();
            assert_eq!(summary.digest, expected, "on {isa}: {summary}");
        }
    }
}
