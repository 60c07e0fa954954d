//! The named tests of a backend: the [`conformance!`](macro@crate::conformance) macro and its
//! functions.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread::available_parallelism;

use pollster::block_on;
use rmsnorm_spec::{DType, Error, Norm};

use crate::Harness;
use crate::case::coverage::Coverage;
use crate::case::profiles::{Profile, breakpoints, combinations_in_small};
use crate::case::{Case, Kind, Trial};
use crate::finding::Status;
use crate::report::CaseReport;
use crate::report::summary::replay;
use crate::run::Item;
use crate::run::calls::Context;
use crate::run::device::{About, Device};
use crate::run::misuse::bad_calls;
use crate::selftest::{SelfTest, self_test};
use crate::testing::{TestFailure, available, swept};

/// A slow device runs one case in `SWEPT`.
const SWEPT: usize = 32;
/// The same of the cases of one norm, which are fewer.
const SWEPT_OF_NORM: usize = 8;

/// The self-test, as a named test; prints its table. It runs once per process, for any number of
/// backends.
///
/// # Errors
/// If a planted bug survives, or a correct implementation is rejected.
pub fn test_self_test() -> Result<(), TestFailure> {
    static RESULT: OnceLock<SelfTest> = OnceLock::new();
    let result = RESULT.get_or_init(|| self_test(available_parallelism().map_or(1, NonZero::get)));
    println!("{result}");
    if result.is_success() { Ok(()) } else { Err(TestFailure(result.to_string())) }
}

/// Checks the spans of the backend's views, as a named test.
///
/// # Errors
/// If a span is wrong, or a required backend is missing.
pub fn test_spans<H: Harness>(harness: Result<H, Error>) -> Result<(), TestFailure> {
    on_backend(harness, |harness| test_items(harness, std::iter::once(Item::Spans)))
}

/// Makes every invalid call, as a named test.
///
/// # Errors
/// If a call is not refused as required, or a required backend is missing.
pub fn test_misuse<H: Harness>(harness: Result<H, Error>) -> Result<(), TestFailure> {
    on_backend(harness, |harness| test_items(harness, bad_calls(harness).into_iter().map(Item::Misuse)))
}

/// Runs the smoke cases, small combinations and breakpoints of one kind, norm and dtype, as a named
/// test.
///
/// # Errors
/// If a case fails, no case can be executed, or a required backend is missing.
pub fn test_bounds<H: Harness>(
    harness: Result<H, Error>,
    kind: Kind,
    norm: Norm,
    dtype: DType,
) -> Result<(), TestFailure> {
    on_backend(harness, |harness| {
        test_items(harness, bounds_cases(harness, kind, norm, dtype).into_iter().map(Item::Case))
    })
}

fn bounds_cases(device: &dyn Device, kind: Kind, norm: Norm, dtype: DType) -> Vec<Case> {
    let chosen = |case: &Case| {
        case.trial == Trial::Bounds && (case.kind, case.norm, case.dtypes.activation) == (kind, norm, dtype)
    };
    let About { breakpoints: (cols, rows), is_slow, .. } = device.about();
    let more = combinations_in_small().into_iter().chain(breakpoints(&cols, &rows)).filter(chosen);
    let all: Vec<Case> = Profile::Smoke.cases(0).into_iter().filter(chosen).chain(more).collect();
    // A software adapter would compile thousands of shaders.
    if is_slow { swept(&all, SWEPT, |_| ()) } else { all }
}

/// Runs the smoke cases of a norm that most models do not have, in every kind and dtype, as a named
/// test.
///
/// # Errors
/// As [`test_bounds`].
pub fn test_norm<H: Harness>(harness: Result<H, Error>, norm: Norm) -> Result<(), TestFailure> {
    on_backend(harness, |harness| test_items(harness, norm_cases(harness, norm).into_iter().map(Item::Case)))
}

fn norm_cases(device: &dyn Device, norm: Norm) -> Vec<Case> {
    let chosen = |case: &Case| case.trial == Trial::Bounds && case.norm == norm;
    let all: Vec<Case> = Profile::Smoke.cases(0).into_iter().filter(chosen).collect();
    if device.about().is_slow { swept(&all, SWEPT_OF_NORM, |_| ()) } else { all }
}

/// Runs the smoke cases about repeated calls and batch invariance of one norm, as a named test.
///
/// # Errors
/// As [`test_bounds`].
pub fn test_determinism<H: Harness>(harness: Result<H, Error>, norm: Norm) -> Result<(), TestFailure> {
    test_trial(harness, norm, |trial| matches!(trial, Trial::Determinism { .. }))
}

/// Runs the smoke cases about relations between calls of one norm, as a named test.
///
/// # Errors
/// As [`test_bounds`].
pub fn test_metamorphic<H: Harness>(harness: Result<H, Error>, norm: Norm) -> Result<(), TestFailure> {
    test_trial(harness, norm, |trial| trial == Trial::Metamorphic)
}

fn test_trial<H: Harness>(harness: Result<H, Error>, norm: Norm, is: fn(Trial) -> bool) -> Result<(), TestFailure> {
    let cases = Profile::Smoke.cases(0).into_iter().filter(|case| is(case.trial) && case.norm == norm);
    on_backend(harness, |harness| test_items(harness, cases.map(Item::Case)))
}

/// Runs a test on a backend, if the machine has it.
fn on_backend<H>(
    harness: Result<H, Error>,
    test: impl FnOnce(&H) -> Result<(), TestFailure>,
) -> Result<(), TestFailure> {
    available(harness)?.map_or(Ok(()), |harness| test(&harness))
}

fn test_items(device: &dyn Device, items: impl Iterator<Item = Item>) -> Result<(), TestFailure> {
    let About { name, arithmetic, .. } = device.about();
    let context = Context { device, arithmetic: &arithmetic };
    let (mut executed, mut other, mut failed) = (0, Vec::new(), Vec::new());
    // A backend may lack whole operations: quantization, sums after the norm, sums of parts,
    // gradients as f32 sums, gates.
    let mut lacks_operation = true;
    let mut coverage = Coverage::default();
    for item in items {
        let (case, CaseReport { id, status, .. }) = block_on(item.run(context));
        if let Some(case) = case {
            coverage.add(&case, &status);
        }
        match status {
            Status::Pass => executed += 1,
            Status::Fail(finding) => failed.push(format!("{finding}\n    {}", replay(name, &id))),
            Status::Unsupported(_) | Status::Vacuous(_) | Status::Skipped(_) => {
                let may_be_lacking = case.is_some_and(|case| !Kind::BEFORE.contains(&case.kind));
                lacks_operation &= may_be_lacking && matches!(status, Status::Unsupported(_));
                other.push(format!("{id}: {status:?}"));
            }
        }
    }
    let refusals = coverage.refusals();
    failed.extend(refusals.map(|(case, _, finding)| format!("{finding}\n    {}", replay(name, &case.to_string()))));
    println!("{executed} passed, {} failed, {} proved nothing\n{}", failed.len(), other.len(), other.join("\n"));
    match (failed.is_empty(), executed) {
        (false, _) => Err(TestFailure(failed.join("\n"))),
        (true, 0) if lacks_operation && !other.is_empty() => Ok(()),
        (true, 0) => Err(TestFailure(format!("no case was executed\n{}", other.join("\n")))),
        (true, _) => Ok(()),
    }
}

/// The named tests of a backend. Put it into a file of `tests/`, or into one module per variant of
/// the backend. The argument is an expression of type `Result<H, `[`Error`](rmsnorm_spec::Error)`>`
/// that creates a [`Harness`](crate::Harness), `Ok(..)` if it cannot fail. Every test evaluates the
/// expression again.
///
/// Expands to the self-test (which needs no backend), the spans, the invalid calls, and the smoke
/// profile by kind, norm and dtype. The longer profiles are run from the command line, through
/// [`run`](crate::run).
///
/// If the expression returns [`Error::Unavailable`](rmsnorm_spec::Error::Unavailable), the machine
/// lacks the backend: each test prints `skipped: <reason>` and passes. It fails if the environment
/// variable `RMSNORM_REQUIRE`, a comma-separated list of backend names or `all`, names the backend.
/// Any other error is always a failure.
///
/// # Example
/// ```
/// use rmsnorm_conformance::simulate::SimulatedBackend;
/// rmsnorm_conformance::conformance!(Ok(SimulatedBackend::new(None)));
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! conformance {
    ($harness:expr) => {
        fn backend_under_test() -> Result<impl $crate::Harness, $crate::spec::Error> {
            $harness
        }

        #[test]
        fn self_test_catches_every_planted_bug() -> Result<(), $crate::TestFailure> {
            $crate::test_self_test()
        }

        #[test]
        fn spans_say_where_views_lie() -> Result<(), $crate::TestFailure> {
            $crate::test_spans(backend_under_test())
        }

        #[test]
        fn misuse_is_rejected() -> Result<(), $crate::TestFailure> {
            $crate::test_misuse(backend_under_test())
        }

        $crate::conformance! { @norms
            Rms determinism_rms_norm_repeats_bits metamorphic_rms_norm_relations_hold;
            Layer determinism_layer_norm_repeats_bits metamorphic_layer_norm_relations_hold;
            L2 determinism_l2_norm_repeats_bits metamorphic_l2_norm_relations_hold;
            L2Clamped determinism_l2_norm_clamped_repeats_bits metamorphic_l2_norm_clamped_relations_hold;
        }
        $crate::conformance! { @others
            L2 l2_norm_within_bounds;
            L2Clamped l2_norm_clamped_within_bounds;
        }
        $crate::conformance! { @kinds
            FORWARD forward;
            FORWARD_IN_PLACE forward_in_place;
            BACKWARD backward;
            END_TO_END end_to_end;
            QUANTIZED_FORWARD quantized_forward;
            FORWARD_AFTER forward_after;
            FORWARD_AFTER_IN_PLACE forward_after_in_place;
            AFTER_END_TO_END after_end_to_end;
            FORWARD_PARTS forward_parts;
            BACKWARD_SUMS backward_sums;
            FORWARD_GATE_AFTER forward_gate_after;
            FORWARD_GATE_AFTER_IN_PLACE forward_gate_after_in_place;
            BACKWARD_GATE_AFTER backward_gate_after;
            GATE_AFTER_END_TO_END gate_after_end_to_end;
            BACKWARD_GATE_AFTER_SUMS backward_gate_after_sums;
            QUANTIZED_FORWARD_GATE_AFTER quantized_forward_gate_after;
            FORWARD_GATE_BEFORE forward_gate_before;
            FORWARD_GATE_BEFORE_IN_PLACE forward_gate_before_in_place;
            BACKWARD_GATE_BEFORE backward_gate_before;
            GATE_BEFORE_END_TO_END gate_before_end_to_end;
            BACKWARD_GATE_BEFORE_SUMS backward_gate_before_sums;
            QUANTIZED_FORWARD_GATE_BEFORE quantized_forward_gate_before;
        }
    };
    (@norms $($norm:ident $determinism:ident $metamorphic:ident;)*) => {
        $(
            #[test]
            fn $determinism() -> Result<(), $crate::TestFailure> {
                $crate::test_determinism(backend_under_test(), $crate::spec::Norm::$norm)
            }

            #[test]
            fn $metamorphic() -> Result<(), $crate::TestFailure> {
                $crate::test_metamorphic(backend_under_test(), $crate::spec::Norm::$norm)
            }
        )*
    };
    (@others $($norm:ident $name:ident;)*) => {
        $(
            #[test]
            fn $name() -> Result<(), $crate::TestFailure> {
                $crate::test_norm(backend_under_test(), $crate::spec::Norm::$norm)
            }
        )*
    };
    (@kinds $($kind:ident $name:ident;)*) => {
        $(
            mod $name {
                $crate::conformance! { @bounds $kind
                    Rms F32 rms_norm_f32_within_bounds;
                    Rms F16 rms_norm_f16_within_bounds;
                    Rms Bf16 rms_norm_bf16_within_bounds;
                    Layer F32 layer_norm_f32_within_bounds;
                    Layer F16 layer_norm_f16_within_bounds;
                    Layer Bf16 layer_norm_bf16_within_bounds;
                }
            }
        )*
    };
    (@bounds $kind:ident $($norm:ident $dtype:ident $name:ident;)*) => {
        $(
            #[test]
            fn $name() -> Result<(), $crate::TestFailure> {
                let (norm, dtype) = ($crate::spec::Norm::$norm, $crate::spec::DType::$dtype);
                $crate::test_bounds(super::backend_under_test(), $crate::Kind::$kind, norm, dtype)
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::memory::Call;
    use crate::selftest::faulty::Faulty;

    /// The bounds cases of the smoke profile, the small combinations and the breakpoints are each
    /// in one test.
    #[test]
    fn named_tests_have_every_case_once() {
        let mut device = Faulty::correct();
        device.breakpoints = (vec![1234], vec![99]);
        let mut all: Vec<String> = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|kind| !Kind::PAIRS.contains(kind)) {
            for norm in Norm::USUAL {
                for dtype in DType::ALL {
                    let cases = bounds_cases(&device, kind, norm, dtype);
                    assert!(!cases.is_empty(), "{} of {} and {dtype:?} has no case", kind.name(), norm.name());
                    all.extend(cases.iter().map(Case::to_string));
                }
            }
        }
        for norm in Norm::ALL.into_iter().filter(|norm| !Norm::USUAL.contains(norm)) {
            all.extend(norm_cases(&device, norm).iter().map(Case::to_string));
        }
        let smoke = Profile::Smoke.cases(0).into_iter().filter(|case| case.trial == Trial::Bounds);
        let due = smoke.chain(combinations_in_small()).chain(breakpoints(&[1234], &[99]));
        let mut due: Vec<String> = due.map(|case| case.to_string()).collect();
        all.sort();
        due.sort();
        assert_eq!(all, due);
        assert!(due.iter().any(|id| id.contains(":3x1235:")) && due.iter().any(|id| id.contains(":98x33:")));
    }

    fn cases() -> impl Iterator<Item = Item> {
        [5, 6, 7].map(|cols| Item::Case(Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, cols))).into_iter()
    }

    #[test]
    fn named_test_fails_if_one_case_does_or_none_was_executed() {
        assert!(test_items(&Faulty::correct(), cases()).is_ok());
        let spoil = |n: usize, _: &rmsnorm_spec::NormSpec, call: &mut Call| {
            if n == 2 {
                call.tensors.iter_mut().for_each(|tensor| tensor.after[0] ^= 1);
            }
        };
        let failure = test_items(&Faulty::new(spoil), cases()).expect_err("the second case fails");
        assert!(failure.0.contains("3x6") && !failure.0.contains("3x5"), "{failure:?}");
        let mut refusing = Faulty::correct();
        refusing.refusal = Some(Box::new(|_| Some(Error::Unsupported { rule: "nothing".into() })));
        let failure = test_items(&refusing, cases()).expect_err("nothing was executed");
        assert!(failure.0.starts_with("no case was executed"), "{failure:?}");
        assert!(test_items(&Faulty::correct(), std::iter::empty()).is_err());
        // A refusal of one case of several is a failure.
        refusing.refusal = Some(Box::new(|call| {
            let is_fifth = call.get(rmsnorm_spec::Tensor::X).is_some_and(|x| x.view.len() == 15);
            is_fifth.then(|| Error::Unsupported { rule: "5 columns".into() })
        }));
        let failure = test_items(&refusing, cases()).expect_err("an everyday call is refused");
        assert!(failure.0.contains("5 columns") && failure.0.contains("3x5"), "{failure:?}");
    }
}
