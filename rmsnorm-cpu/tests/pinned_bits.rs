//! Pins the bits of the CPU's results across versions. They depend only on the call, so one hash
//! covers all machines. A bug within the error bounds changes it too.

use rmsnorm_conformance::{Case, Harness, Options, breakpoints, list, run};
use rmsnorm_cpu::{CpuBackend, Isa};

/// SHA-256 of all outputs of the suite's smoke profile and of the backend's breakpoints: of results in floats, sums after the norm,
/// sums of parts, gradients as sums, codes, columnwise codes, gates, groups of columns, and of L2
/// norms, later cast orders and casts. A deliberate change of results updates these hashes and
/// CHANGELOG.md.
const FLOATS: &str = "45d3ace671d62d55a706e7ea70ac58ff240a5db9730b51709200e47a25e6ded9";
const SUMS: &str = "9c285fac0863443526d72cc54e79d270836769d01e9b4d3a1718353c34a3248b";
const PARTS: &str = "aae0ae6e27424470f8247ef3b7c75e090568d94f2369d214a4aa468840d102e0";
const GRADIENTS: &str = "6da5ac001fd6a3a8a865ce00ee089d1df6859de4afbf12bce396c3b12264b640";
const CODES: &str = "ea6efd3b6a109adfd62e31423bee16848c2e227263f47027009ea789f2d9c81e";
const COLUMNS: &str = "e399c157bdd4813a95de34a559a3504116aab5fdf1f020c39c7c46cb7b979fe4";
/// Without NaN: of the product of two, the one that remains depends on the order of the factors.
const GATES: &str = "2c9fdc3021be956eac970e03c11cebf610a14a5357749ab898ddfc6409be2fb3";
const GROUPS: &str = "a1298b3167c3d51e2090ca07168e72a43227b257583d08cf4bbd01d43206aadf";

const KINDS: &str = "f9f24abac217b518d4b2df864d6fc767778d113cc26e7ce89b8085710dd1eb0d";

/// Whether a case came after groups of columns.
fn is_of_kinds(id: &str) -> bool {
    ["l2_norm", "rstd_first", "weight_first", "cast"].iter().any(|part| id.contains(part))
}

/// Whether a case has the columnwise copy: its id has the letters of the tensors before the offset.
fn is_along_columns(id: &str) -> bool {
    let letters = id.split_once(":offset").and_then(|(before, _)| before.rsplit(':').next());
    id.contains(":quantized_forward:") && letters.is_some_and(|letters| letters.contains('c'))
}

#[test]
fn results_have_the_bits_of_earlier_versions() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let backend = CpuBackend::with_isa_and_threads(isa, 2).unwrap();
        let breakpoints = breakpoints(&backend.cols_breakpoints(), &backend.rows_breakpoints());
        let smoke = list(&backend, &Options::default()).unwrap();
        let all = smoke.into_iter().chain(breakpoints.iter().map(Case::to_string));
        let (kinds, plain): (Vec<String>, Vec<String>) = all.partition(|id| is_of_kinds(id));
        let kinds: Vec<String> = kinds.into_iter().filter(|id| !id.contains(":nonfinite:")).collect();
        let (groups, plain): (Vec<String>, Vec<String>) = plain.into_iter().partition(|id| id.contains(":colgroups"));
        let (gates, plain): (Vec<String>, Vec<String>) = plain.into_iter().partition(|id| id.contains("gate"));
        let gates: Vec<String> = gates.into_iter().filter(|id| !id.contains(":nonfinite:")).collect();
        let (codes, floats): (Vec<String>, Vec<String>) =
            plain.into_iter().partition(|id| id.contains(":quantized_forward:"));
        let (columns, codes): (Vec<String>, Vec<String>) = codes.into_iter().partition(|id| is_along_columns(id));
        let (sums, floats): (Vec<String>, Vec<String>) = floats.into_iter().partition(|id| id.contains("after"));
        let (parts, floats): (Vec<String>, Vec<String>) =
            floats.into_iter().partition(|id| id.contains("forward_parts"));
        let (gradients, floats): (Vec<String>, Vec<String>) =
            floats.into_iter().partition(|id| id.contains("backward_sums"));
        assert!([&columns, &sums, &parts, &gradients, &gates, &groups, &kinds].into_iter().all(|ids| !ids.is_empty()));
        let digests = [floats, sums, parts, gradients, codes, columns, gates, groups, kinds].map(|cases| {
            let options = Options { cases, self_test: false, ..Options::default() };
            run(&backend, &options, &mut |_, _| (), None).unwrap().digest
        });
        assert_eq!(digests, [FLOATS, SUMS, PARTS, GRADIENTS, CODES, COLUMNS, GATES, GROUPS, KINDS], "on {isa}");
    }
}
