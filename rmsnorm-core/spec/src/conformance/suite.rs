//! Runs a profile, or one case, and the named tests of the [`conformance!`](macro@crate::conformance) macro.

use std::fmt;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::calls::Context;
use super::cases::{Case, Kind, ParseCaseError, Trial};
use super::device::Device;
use super::misuse::{BadCall, bad_calls};
use super::profiles::{Profile, breakpoints};
use super::report::{CaseReport, Check, Counts, Finding, Status, Summary};
use super::self_test::self_test;
use super::{Harness, determinism, runner};
use crate::{DType, Norm};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The list of cases.
    pub profile: Profile,
    /// Seed of [`Profile::Full`].
    pub seed: u64,
    /// Runs only the case, or the bad call, with this id.
    pub case: Option<String>,
    /// Whether the suite first proves that it can fail.
    pub self_test: bool,
}

impl Default for Options {
    /// Smoke, with the self-test.
    fn default() -> Self {
        Options { profile: Profile::Smoke, seed: 0, case: None, self_test: true }
    }
}

/// The run itself could not be made; a failed case is no such error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// There is no such case.
    #[error(transparent)]
    Case(#[from] ParseCaseError),
    /// The report cannot be written.
    #[error("the report cannot be written: {0}")]
    Report(#[from] io::Error),
}

/// Runs `options` against a backend.
///
/// `progress` is called before each case with the cases done and their total, and once at the end. `jsonl` receives
/// a line of JSON per case and one for the summary.
///
/// # Errors
/// [`RunError`]: an id that is none, or a report that cannot be written. Failed cases are in the [`Summary`].
pub fn run<H: Harness>(
    harness: &H,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    run_device(harness, options, progress, jsonl)
}

fn run_device(
    device: &dyn Device,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    mut jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    let start = Instant::now();
    let arithmetic = device.claims();
    let context = Context { device, arithmetic: &arithmetic };
    let (items, list_hash) = items(device, options)?;
    let mut summary = Summary {
        backend: device.name(),
        device: device.describe(),
        profile: if options.case.is_some() { "case" } else { options.profile.name() },
        seed: options.seed,
        list_hash,
        arithmetic,
        self_test: options.self_test.then(self_test),
        counts: Counts::default(),
        quality: Default::default(),
        not_executed: Default::default(),
        failures: Vec::new(),
        elapsed_us: 0,
    };
    let total = items.len();
    for (done, item) in items.into_iter().enumerate() {
        progress(done, total);
        let report = item.execute(context);
        summary.add(&report);
        if let Some(writer) = &mut jsonl {
            report.write_json(*writer)?;
        }
    }
    progress(total, total);
    summary.elapsed_us = micros(start.elapsed());
    if let Some(writer) = &mut jsonl {
        summary.write_json(*writer)?;
    }
    Ok(summary)
}

/// One line of a report.
enum Item {
    Case(Case),
    Misuse(BadCall),
}

impl Item {
    fn execute(self, context: Context<'_>) -> CaseReport {
        match self {
            Item::Case(case) => execute_case(context, &case),
            Item::Misuse(call) => {
                let id = call.id.clone();
                caught(id, move |_| call.run(context))
            }
        }
    }
}

fn items(device: &dyn Device, options: &Options) -> Result<(Vec<Item>, String), ParseCaseError> {
    if let Some(id) = &options.case {
        let item = match bad_calls(device).into_iter().find(|call| call.id == *id) {
            Some(call) => Item::Misuse(call),
            None => Item::Case(id.parse()?),
        };
        return Ok((vec![item], hash(std::slice::from_ref(id))));
    }
    let cases = options.profile.cases(options.seed);
    let list_hash = hash(&cases.iter().map(Case::to_string).collect::<Vec<_>>());
    let (cols, rows) = device.breakpoints();
    let cases = cases.into_iter().chain(breakpoints(&cols, &rows)).map(Item::Case);
    Ok((bad_calls(device).into_iter().map(Item::Misuse).chain(cases).collect(), list_hash))
}

/// sha256 of the ids, one a line, in hexadecimal.
fn hash(ids: &[String]) -> String {
    let digest = Sha256::digest(ids.join("\n").as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs one case. A panic of the backend is a failure of the case, not of the run.
pub(super) fn execute_case(context: Context<'_>, case: &Case) -> CaseReport {
    caught(case.to_string(), |report| match case.trial {
        Trial::Bounds => runner::run(context, case, &mut report.outputs),
        Trial::Determinism { repeats } => determinism::run(context, case, repeats),
        Trial::Metamorphic => determinism::run_metamorphic(context, case),
    })
}

fn caught(id: String, run: impl FnOnce(&mut CaseReport) -> Status) -> CaseReport {
    let start = Instant::now();
    let mut report = CaseReport { id, status: Status::Pass, outputs: Vec::new(), elapsed_us: 0 };
    report.status = catch_unwind(AssertUnwindSafe(|| run(&mut report))).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
        let detail = text.unwrap_or("no message").to_owned();
        Status::Fail(Finding { check: Check::Panic, output: "the call", detail })
    });
    report.elapsed_us = micros(start.elapsed());
    report
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The failure of a named test. `Debug`, which the test harness prints, is for people.
pub struct TestFailure(String);

impl fmt::Debug for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The self-test, as a named test; prints its table.
///
/// # Errors
/// If a planted bug survives, or something correct is rejected.
pub fn test_self_test() -> Result<(), TestFailure> {
    let result = self_test();
    println!("{result}");
    if result.is_success() { Ok(()) } else { Err(TestFailure(result.to_string())) }
}

/// Every bad call, as a named test.
///
/// # Errors
/// If one is not refused as it must be.
pub fn test_misuse<H: Harness>(harness: &H) -> Result<(), TestFailure> {
    test_items(harness, bad_calls(harness).into_iter().map(Item::Misuse).collect())
}

/// The smoke cases and breakpoints of one kind, norm and dtype, as a named test.
///
/// # Errors
/// If one fails, or none can be executed.
pub fn test_bounds<H: Harness>(harness: &H, kind: Kind, norm: Norm, dtype: DType) -> Result<(), TestFailure> {
    let (cols, rows) = Device::breakpoints(harness);
    let cases = Profile::Smoke.cases(0).into_iter().chain(breakpoints(&cols, &rows));
    let chosen = |case: &Case| {
        case.trial == Trial::Bounds && (case.kind, case.norm, case.dtypes.activation) == (kind, norm, dtype)
    };
    test_items(harness, cases.filter(chosen).map(Item::Case).collect())
}

/// The smoke cases about repetition and batch invariance of one norm, as a named test.
///
/// # Errors
/// If one fails, or none can be executed.
pub fn test_determinism<H: Harness>(harness: &H, norm: Norm) -> Result<(), TestFailure> {
    let chosen = |case: &Case| matches!(case.trial, Trial::Determinism { .. }) && case.norm == norm;
    test_items(harness, Profile::Smoke.cases(0).into_iter().filter(chosen).map(Item::Case).collect())
}

/// The smoke cases about relations between calls of one norm, as a named test.
///
/// # Errors
/// If one fails, or none can be executed.
pub fn test_metamorphic<H: Harness>(harness: &H, norm: Norm) -> Result<(), TestFailure> {
    let chosen = |case: &Case| case.trial == Trial::Metamorphic && case.norm == norm;
    test_items(harness, Profile::Smoke.cases(0).into_iter().filter(chosen).map(Item::Case).collect())
}

fn test_items(device: &dyn Device, items: Vec<Item>) -> Result<(), TestFailure> {
    let arithmetic = device.claims();
    let context = Context { device, arithmetic: &arithmetic };
    let (mut executed, mut other, mut failed) = (0, Vec::new(), Vec::new());
    for item in items {
        let CaseReport { id, status, .. } = item.execute(context);
        match status {
            Status::Pass => executed += 1,
            Status::Fail(finding) => failed.push(format!("{id}\n    {finding}")),
            Status::Unsupported(_) | Status::Vacuous(_) | Status::Skipped(_) => other.push(format!("{id}: {status:?}")),
        }
    }
    println!("{executed} passed, {} failed, {} skipped\n{}", failed.len(), other.len(), other.join("\n"));
    match (failed.is_empty(), executed) {
        (false, _) => Err(TestFailure(failed.join("\n"))),
        (true, 0) => Err(TestFailure(format!("no case was executed\n{}", other.join("\n")))),
        (true, _) => Ok(()),
    }
}

/// The named tests of a backend: put it into a file of `tests/`, with an expression that makes a
/// [`Harness`](crate::conformance::Harness).
///
/// Expands to the self-test, the bad calls, and the smoke profile by kind, norm and dtype. The longer profiles are for
/// the command line, through [`run`](crate::conformance::run).
///
/// # Example
/// ```
/// use rmsnorm_spec::conformance::simulate::SimulatedBackend;
/// rmsnorm_spec::conformance!(SimulatedBackend::new(None));
/// ```
#[macro_export]
macro_rules! conformance {
    ($harness:expr) => {
        #[test]
        fn self_test_catches_every_planted_bug() -> Result<(), $crate::conformance::TestFailure> {
            $crate::conformance::test_self_test()
        }

        #[test]
        fn misuse_is_rejected() -> Result<(), $crate::conformance::TestFailure> {
            $crate::conformance::test_misuse(&$harness)
        }

        $crate::conformance! { @norms $harness;
            Rms determinism_rms_norm_repeats_bits metamorphic_rms_norm_relations_hold;
            Layer determinism_layer_norm_repeats_bits metamorphic_layer_norm_relations_hold;
        }
        $crate::conformance! { @bounds $harness;
            Forward Rms F32 forward_rms_norm_f32_within_bounds;
            Forward Rms F16 forward_rms_norm_f16_within_bounds;
            Forward Rms Bf16 forward_rms_norm_bf16_within_bounds;
            Forward Layer F32 forward_layer_norm_f32_within_bounds;
            Forward Layer F16 forward_layer_norm_f16_within_bounds;
            Forward Layer Bf16 forward_layer_norm_bf16_within_bounds;
            ForwardInPlace Rms F32 forward_in_place_rms_norm_f32_within_bounds;
            ForwardInPlace Rms F16 forward_in_place_rms_norm_f16_within_bounds;
            ForwardInPlace Rms Bf16 forward_in_place_rms_norm_bf16_within_bounds;
            ForwardInPlace Layer F32 forward_in_place_layer_norm_f32_within_bounds;
            ForwardInPlace Layer F16 forward_in_place_layer_norm_f16_within_bounds;
            ForwardInPlace Layer Bf16 forward_in_place_layer_norm_bf16_within_bounds;
            Backward Rms F32 backward_rms_norm_f32_within_bounds;
            Backward Rms F16 backward_rms_norm_f16_within_bounds;
            Backward Rms Bf16 backward_rms_norm_bf16_within_bounds;
            Backward Layer F32 backward_layer_norm_f32_within_bounds;
            Backward Layer F16 backward_layer_norm_f16_within_bounds;
            Backward Layer Bf16 backward_layer_norm_bf16_within_bounds;
            EndToEnd Rms F32 end_to_end_rms_norm_f32_within_bounds;
            EndToEnd Rms F16 end_to_end_rms_norm_f16_within_bounds;
            EndToEnd Rms Bf16 end_to_end_rms_norm_bf16_within_bounds;
            EndToEnd Layer F32 end_to_end_layer_norm_f32_within_bounds;
            EndToEnd Layer F16 end_to_end_layer_norm_f16_within_bounds;
            EndToEnd Layer Bf16 end_to_end_layer_norm_bf16_within_bounds;
        }
    };
    (@norms $harness:expr; $($norm:ident $determinism:ident $metamorphic:ident;)*) => {
        $(
            #[test]
            fn $determinism() -> Result<(), $crate::conformance::TestFailure> {
                $crate::conformance::test_determinism(&$harness, $crate::Norm::$norm)
            }

            #[test]
            fn $metamorphic() -> Result<(), $crate::conformance::TestFailure> {
                $crate::conformance::test_metamorphic(&$harness, $crate::Norm::$norm)
            }
        )*
    };
    (@bounds $harness:expr; $($kind:ident $norm:ident $dtype:ident $name:ident;)*) => {
        $(
            #[test]
            fn $name() -> Result<(), $crate::conformance::TestFailure> {
                use $crate::conformance::Kind;
                $crate::conformance::test_bounds(&$harness, Kind::$kind, $crate::Norm::$norm, $crate::DType::$dtype)
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use super::super::simulate::SimulatedBackend;
    use super::*;

    fn summary(options: &Options) -> (Result<Summary, RunError>, String) {
        let mut lines = Vec::new();
        let mut seen = (0, 0);
        let result =
            run(&SimulatedBackend::new(None), options, &mut |done, total| seen = (done, total), Some(&mut lines));
        assert!(result.is_err() || seen.0 == seen.1);
        (result, String::from_utf8(lines).expect("JSON is UTF-8"))
    }

    #[test]
    fn run_of_one_case_reports_that_case() {
        let id = "bounds:forward:rms_norm:f16,f32,f16:3x17:randn:eps1e-6:ws:offset1:at_store:partials:p1o3:seed9";
        for id in [id, "misuse:backward:no_rstd"] {
            let (result, lines) = summary(&Options { case: Some(id.into()), self_test: false, ..Options::default() });
            let summary = result.expect("the id is valid");
            assert_eq!(summary.counts, Counts { passed: 1, ..Counts::default() }, "{summary}");
            assert!(summary.is_success());
            assert!(summary.to_string().ends_with("\n1 passed, 0 failed, 0 skipped"));
            let lines: Vec<serde_json::Value> =
                lines.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
            assert_eq!(lines.len(), 2);
            assert_eq!((lines[0]["id"].as_str(), lines[0]["status"].as_str()), (Some(id), Some("pass")));
            assert_eq!(lines[1]["success"].as_bool(), Some(true));
        }
    }

    #[test]
    fn run_of_an_unknown_case_is_an_error() {
        let options = Options { case: Some("bounds:forward".into()), self_test: false, ..Options::default() };
        assert!(matches!(summary(&options).0, Err(RunError::Case(_))));
    }

    #[test]
    fn run_without_an_executed_case_is_no_success() {
        let options = Options { case: Some("misuse:backward:no_rstd".into()), self_test: false, ..Options::default() };
        let mut summary = summary(&options).0.expect("the id is valid");
        summary.counts = Counts { unsupported: 5, ..Counts::default() };
        assert!(!summary.is_success());
        summary.counts = Counts { passed: 1000, vacuous: 5, ..Counts::default() };
        assert!(summary.is_success());
        summary.counts.vacuous = 6;
        assert!(!summary.is_success());
    }

    #[test]
    fn failing_case_prints_the_line_that_replays_it() {
        use super::super::planted::Bug;
        let options = Options { self_test: false, ..Options::default() };
        let backend = SimulatedBackend::new(Some(Bug::NoSecond));
        let summary = run(&backend, &options, &mut |_, _| {}, None).expect("nothing is written");
        let (id, finding) = summary.failures.first().expect("dx is wrong");
        assert_eq!((finding.check, finding.output), (Check::Bounds, "dx"));
        assert!(!summary.is_success());
        assert!(summary.to_string().contains(&format!("rmsnorm conformance --backend simulated --case {id}\n")));
    }

    #[test]
    fn panic_of_a_backend_is_a_failed_case() {
        let report = caught("id".into(), |_| panic!("index out of bounds"));
        let finding = Finding { check: Check::Panic, output: "the call", detail: "index out of bounds".into() };
        assert_eq!(report.status, Status::Fail(finding));
    }
}
