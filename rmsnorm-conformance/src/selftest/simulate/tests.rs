//! Compares the correct kernel with the definition, and every bug with the correct kernel, in the
//! suite's calls.

use pollster::block_on;
use rmsnorm_spec::{DType, DTypes, Norm, Slot, Tensor};

use super::SimulatedBackend;
use crate::Arithmetic;
use crate::case::presence::OPTIONAL;
use crate::case::{Case, Kind, Layout, Trial};
use crate::finding::Status;
use crate::pieces;
use crate::run::calls::{Context, Scenario};
use crate::run::execute::execute_case;
use crate::run::memory::{Bits, Outputs, Poison};
use crate::selftest::cases;
use crate::selftest::planted::Bug;

fn on<T>(bug: Option<Bug>, run: impl FnOnce(Context<'_>) -> T) -> T {
    run(Context { device: &SimulatedBackend::new(bug), arithmetic: &Arithmetic::IEEE })
}

/// The bits of a call's outputs, or the finding if it changed other memory.
type AnyElement = Result<Vec<(Tensor, Bits)>, Status>;

/// Two calls with the same inputs on the same backend.
fn two_calls(bug: Option<Bug>, scenario: &Scenario) -> [AnyElement; 2] {
    on(bug, |context| {
        [Poison::Nan, Poison::Huge].map(|poison| block_on(scenario.run(context, poison)).map(|outputs| outputs.tensors))
    })
}

#[test]
fn a_bug_changes_a_result_exactly_where_it_applies() {
    for norm in Norm::ALL {
        for kind in Kind::first_calls() {
            // Only the cases before the lists of families, which show no other bug.
            let cases = cases(norm, kind).into_iter().take_while(|case| case.trial == Trial::Bounds);
            let scenarios: Vec<Scenario> = cases.map(|case| Scenario::new(&case)).collect();
            let right: Vec<_> = scenarios.iter().map(|scenario| two_calls(None, scenario)).collect();
            assert!(right.iter().flatten().all(AnyElement::is_ok));
            for bug in pieces::bugs() {
                // A sum of one part is a call without parts. `Call::new` plants no other bug, and
                // one scenario is enough to show that.
                let is_planted = bug.applies_to(norm, kind) || kind.has_parts() && bug.applies_to(norm, Kind::FORWARD);
                let tried = if is_planted { scenarios.len() } else { 1 };
                let differs = |(scenario, right): (&Scenario, &_)| two_calls(Some(bug), scenario) != *right;
                let shows = scenarios.iter().zip(&right).take(tried).any(differs);
                assert_eq!(shows, bug.applies_to(norm, kind), "{bug} in {} {}", norm.name(), kind.name());
            }
        }
    }
}

#[test]
fn bug_names_are_unique_and_every_bug_applies_somewhere() {
    let mut names: Vec<String> = pieces::bugs().map(|bug| bug.to_string()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), pieces::bugs().count());
    assert!(names.len() >= 90, "bugs were lost: {}", names.len());
    for bug in pieces::bugs() {
        assert!(Norm::ALL.iter().any(|&norm| Kind::first_calls().any(|kind| bug.applies_to(norm, kind))), "{bug}");
    }
}

/// A case with every tensor that the kind of call may have.
fn full(kind: Kind, norm: Norm, dtypes: DTypes, rows: usize, cols: usize) -> Case {
    Case { present: OPTIONAL.with(Tensor::Dgate), dtypes, ..Case::plain(kind, norm, dtypes.activation, rows, cols) }
        .normalized()
}

/// Shapes that leave lanes and blocks empty, fill them exactly, and overfill them; every tensor has
/// different gaps.
#[test]
fn correct_kernel_is_within_bounds_and_writes_every_result_and_no_gap() {
    for norm in Norm::ALL {
        for kind in Kind::ALL {
            for (rows, cols) in [(0, 33), (1, 1), (3, 7), (64, 32), (65, 33), (200, 96), (5000, 5)] {
                // The gradient of one column is lost in the error of a gated x, and so is that of
                // two in layer norm. That of one column of the clamped L2 norm is zero.
                let is_lost = kind.gate() == Some(Slot::Before) || norm == Norm::L2Clamped;
                let cols = if is_lost { cols.max(3) } else { cols };
                let case = full(kind, norm, DTypes::uniform(DType::F32), rows, cols);
                let case = Case { weight_offset: 1.0, layout: Layout::Mixed(4), ..case };
                assert_eq!(on(None, |context| execute_case(context, &case)).status, Status::Pass, "{case}");
            }
        }
    }
}

fn outputs(case: &Case) -> Outputs {
    on(None, |context| block_on(Scenario::new(case).run(context, Poison::Nan))).unwrap()
}

#[test]
fn in_place_form_has_the_bits_of_the_other_one() {
    let dtypes = DTypes::uniform(DType::Bf16).widened(true, true);
    for norm in Norm::ALL {
        let [apart, over] =
            [Kind::FORWARD, Kind::FORWARD_IN_PLACE].map(|kind| outputs(&full(kind, norm, dtypes, 70, 33)));
        for tensor in [Tensor::Y, Tensor::ResidualOut, Tensor::Rstd] {
            assert!(apart.get(tensor).is_some() && apart.get(tensor) == over.get(tensor), "{tensor}");
        }
    }
}

#[test]
fn workspace_of_the_callers_changes_no_bit() {
    let given = full(Kind::BACKWARD, Norm::Rms, DTypes::uniform(DType::F32), 70, 33);
    let absent = Case { present: given.present.without(Tensor::Workspace), ..given };
    assert_ne!(given.present, absent.present);
    assert_eq!(outputs(&given).tensors, outputs(&absent).tensors);
}
