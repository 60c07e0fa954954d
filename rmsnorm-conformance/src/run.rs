//! Runs a profile, or one case, and reports it.

pub(crate) mod bad_call;
pub(crate) mod calls;
pub(crate) mod determinism;
pub(crate) mod device;
pub(crate) mod execute;
pub(crate) mod harness;
pub(crate) mod memory;
pub(crate) mod misuse;
pub(crate) mod named_tests;
pub(crate) mod span;
pub(crate) mod workers;

use std::env;
use std::io::{self, Write};
use std::ops::ControlFlow;

use futures_util::{StreamExt, stream};
use pollster::block_on;
use sha2::{Digest, Sha256};
use web_time::Instant;

use crate::Harness;
use crate::case::coverage::Coverage;
use crate::case::profiles::{Profile, breakpoints, shape_breakpoints};
use crate::case::{Case, ParseCaseError};
use crate::finding::{Check, Finding, Status};
use crate::report::summary::Summary;
use crate::report::{CaseReport, Counts};
use crate::run::bad_call::BadCall;
use crate::run::calls::Context;
use crate::run::device::{About, Device};
use crate::run::execute::{caught, micros, run_case};
use crate::run::memory::{hexadecimal, sha256};
use crate::run::misuse::bad_calls;
use crate::selftest::self_test;

/// The cases to run, and how to run them.
#[derive(Clone, Debug)]
pub struct Options {
    /// The list of cases.
    pub profile: Profile,
    /// Seed of [`Profile::Full`].
    pub seed: u64,
    /// Runs at most this many cases, evenly spread over the profile's list, and nothing else.
    pub most_cases: Option<usize>,
    /// Runs only part k of n, as (k, n) with k from 1 to n. The parts are disjoint and cover the
    /// profile, so n processes can share a run.
    pub part: Option<(usize, usize)>,
    /// If not empty, runs only these ids: of cases, of invalid calls, or of the check of spans.
    pub cases: Vec<String>,
    /// Whether the suite first proves that it can fail.
    pub self_test: bool,
    /// Whether the run ends at the first failed case.
    pub fail_fast: bool,
    /// Number of cases that run at once: each on a thread in [`run`], all on the caller's in
    /// [`run_async`]. Most cases wait for compilers, the judge or a copy, not for the device. Cases of
    /// [`Profile::Stress`] need much memory and run one by one.
    pub jobs: usize,
    /// The host, for the report: a browser and its adapter. `None` stands for the operating system
    /// and the processor architecture.
    pub host: Option<String>,
}

impl Default for Options {
    /// The smoke profile with the self-test, one case after the other.
    fn default() -> Self {
        Options {
            profile: Profile::Smoke,
            seed: 0,
            most_cases: None,
            part: None,
            cases: Vec::new(),
            self_test: true,
            fail_fast: false,
            jobs: 1,
            host: None,
        }
    }
}

impl Options {
    /// Whether everything in the profile is run.
    fn is_whole(&self) -> bool {
        self.cases.is_empty() && self.most_cases.is_none() && self.part.is_none()
    }

    fn jobs(&self) -> usize {
        if self.profile == Profile::Stress { 1 } else { self.jobs.max(1) }
    }
}

/// The error of a run that could not be made. A failed case is not such an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The id of a case cannot be parsed.
    #[error(transparent)]
    Case(#[from] ParseCaseError),
    /// The report cannot be written.
    #[error("the report cannot be written: {0}")]
    Report(#[from] io::Error),
}

/// Runs `options` against a backend, and waits for it.
///
/// `progress` is called with the number of finished cases and the total, before the first case and
/// after each one. `jsonl` receives a line of JSON per case, in the order of the list, and one for
/// the summary.
///
/// # Errors
/// [`RunError`], if an id cannot be parsed or the report cannot be written. Failed cases are in the
/// [`Summary`].
pub fn run<H: Harness>(
    harness: &H,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    run_device(harness, options, progress, jsonl)
}

/// Async form of [`run`], for browsers: all cases run on the caller's thread, which never blocks.
///
/// # Errors
/// As [`run`].
pub async fn run_async<H: Harness>(
    harness: &H,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    run_device_async(harness, options, progress, jsonl).await
}

/// The ids of everything that `options` would run against a backend, in order.
///
/// # Errors
/// [`RunError::Case`], if an id cannot be parsed.
pub fn list<H: Harness>(harness: &H, options: &Options) -> Result<Vec<String>, RunError> {
    Ok(items(harness, options)?.0.iter().map(Item::id).collect())
}

fn run_device(
    device: &dyn Device,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    let context = Context { device, arithmetic: &device.about().arithmetic };
    let (mut run, items) = Run::new(device, options, progress, jsonl.map(|writer| writer as _))?;
    let flow = workers::in_order(items, options.jobs(), |item| block_on(item.run(context)), |done| run.take(done));
    run.end(flow)
}

async fn run_device_async(
    device: &dyn Device,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize),
    jsonl: Option<&mut dyn Write>,
) -> Result<Summary, RunError> {
    let context = Context { device, arithmetic: &device.about().arithmetic };
    let (mut run, items) = Run::new(device, options, progress, jsonl.map(|writer| writer as _))?;
    let mut reports = stream::iter(items).map(|item| item.run(context)).buffered(options.jobs());
    let mut flow = ControlFlow::Continue(());
    while let (ControlFlow::Continue(()), Some(done)) = (&flow, reports.next().await) {
        flow = run.take(done);
    }
    run.end(flow)
}

/// The profile of a run that has not all cases.
const PART: &str = "part";

/// The state of a run.
struct Run<'a> {
    options: &'a Options,
    progress: &'a mut dyn FnMut(usize, usize),
    jsonl: Option<&'a mut dyn Write>,
    start: Instant,
    total: usize,
    done: usize,
    summary: Summary,
    coverage: Coverage,
    digest: Sha256,
    lines: Sha256,
}

impl<'a> Run<'a> {
    /// The run, and its items in order.
    fn new(
        device: &dyn Device,
        options: &'a Options,
        progress: &'a mut dyn FnMut(usize, usize),
        jsonl: Option<&'a mut dyn Write>,
    ) -> Result<(Self, Vec<Item>), ParseCaseError> {
        let start = Instant::now();
        let About { name: backend, device: described, tuning, arithmetic, .. } = device.about();
        let (items, list_hash) = items(device, options)?;
        let summary = Summary {
            backend,
            device: described,
            host: options.host.clone().unwrap_or_else(|| format!("{} {}", env::consts::OS, env::consts::ARCH)),
            tuning,
            profile: match (options.cases.is_empty(), options.is_whole()) {
                (false, _) => "case",
                (true, false) => PART,
                (true, true) => options.profile.name(),
            },
            seed: options.seed,
            list_hash,
            digest: String::new(),
            cases_sha256: String::new(),
            arithmetic,
            self_test: options.self_test.then(|| self_test(options.jobs)),
            counts: Counts::default(),
            missing: Vec::new(),
            quality: Default::default(),
            not_executed: Default::default(),
            failures: Vec::new(),
            elapsed_us: 0,
        };
        let (total, coverage, [digest, lines]) = (items.len(), Coverage::default(), [Sha256::new(), Sha256::new()]);
        progress(0, total);
        Ok((Run { options, progress, jsonl, start, total, done: 0, summary, coverage, digest, lines }, items))
    }

    /// Adds the next report. Breaks if the run ends early, by an error of `jsonl` or a failed case.
    fn take(&mut self, (case, report): (Option<Case>, CaseReport)) -> ControlFlow<io::Result<()>> {
        self.summary.add(&report);
        if let Some(outputs) = &report.digest {
            self.digest.update(format!("{} {outputs}\n", report.id));
        }
        if let Some(case) = case {
            self.coverage.add(&case, &report.status);
        }
        let written = self.jsonl.as_mut().map_or(Ok(()), |writer| {
            let line = report.line()?;
            self.lines.update(&line);
            writer.write_all(line.as_bytes())
        });
        self.done += 1;
        (self.progress)(self.done, self.total);
        match written {
            Ok(()) if self.options.fail_fast && matches!(report.status, Status::Fail(_)) => ControlFlow::Break(Ok(())),
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(Err(error)),
        }
    }

    fn end(self, flow: ControlFlow<io::Result<()>>) -> Result<Summary, RunError> {
        let Run { options, progress, mut jsonl, start, total, mut summary, coverage, digest, lines, .. } = self;
        if let ControlFlow::Break(ended) = flow {
            ended?;
            summary.profile = PART;
        }
        progress(total, total);
        coverage.refusals().for_each(|(case, rule, finding)| summary.refuse(case.to_string(), rule, finding));
        if options.is_whole() && options.profile == Profile::Core {
            summary.missing = coverage.missing();
        }
        summary.digest = hexadecimal(&digest.finalize());
        summary.cases_sha256 = hexadecimal(&lines.finalize());
        summary.elapsed_us = micros(start.elapsed());
        if let Some(writer) = &mut jsonl {
            summary.write_json(*writer)?;
        }
        Ok(summary)
    }
}

/// One line of a report.
pub(crate) enum Item {
    Spans,
    Case(Case),
    Misuse(BadCall),
}

impl Item {
    fn case(&self) -> Option<Case> {
        match self {
            Item::Case(case) => Some(*case),
            Item::Spans | Item::Misuse(_) => None,
        }
    }

    fn id(&self) -> String {
        match self {
            Item::Spans => SPANS.into(),
            Item::Case(case) => case.to_string(),
            Item::Misuse(call) => call.id.clone(),
        }
    }

    /// Runs the item. A panic of the backend fails the case, not the run, where panics unwind.
    pub async fn run(self, context: Context<'_>) -> (Option<Case>, CaseReport) {
        let report = match &self {
            Item::Spans => caught(SPANS.into(), async |_| check_spans(context.device).await).await,
            Item::Case(case) => run_case(context, case).await,
            Item::Misuse(call) => caught(call.id.clone(), async |_| call.run(context).await).await,
        };
        (self.case(), report)
    }
}

/// The items to run, and the hash of the ids of the profile's list.
fn items(device: &dyn Device, options: &Options) -> Result<(Vec<Item>, String), ParseCaseError> {
    let (items, hash) = all_items(device, options)?;
    let is_in_part = |index: usize| options.part.is_none_or(|(part, parts)| index % parts.max(1) + 1 == part);
    let items = items.into_iter().enumerate().filter(|(index, _)| is_in_part(*index));
    Ok((items.map(|(_, item)| item).collect(), hash))
}

fn all_items(device: &dyn Device, options: &Options) -> Result<(Vec<Item>, String), ParseCaseError> {
    if !options.cases.is_empty() {
        let item = |id: &String| {
            let call = || bad_calls(device).into_iter().find(|call| call.id == *id);
            Ok(match id.starts_with("misuse:").then(call).flatten() {
                Some(call) => Item::Misuse(call),
                None if id == SPANS => Item::Spans,
                None => Item::Case(id.parse()?),
            })
        };
        return Ok((options.cases.iter().map(item).collect::<Result<_, _>>()?, hash(&options.cases)));
    }
    let mut cases = options.profile.cases(options.seed);
    if let Some(most) = options.most_cases.filter(|most| *most < cases.len()) {
        // Not every n-th case: lists alternate between dtypes.
        cases = (0..most).map(|index| cases[index * cases.len() / most]).collect();
    }
    let list_hash = hash_of(&cases);
    if options.most_cases.is_some() {
        return Ok((cases.into_iter().map(Item::Case).collect(), list_hash));
    }
    // On a GPU most of them compile a program of their own, so the smoke profile leaves them out.
    if options.profile != Profile::Smoke {
        let (cols, rows) = device.about().breakpoints;
        cases.extend(breakpoints(&cols, &rows));
        cases.extend(shape_breakpoints(|dtype| device.shape_breakpoints(dtype)));
    }
    let cases = cases.into_iter().map(Item::Case);
    let items = std::iter::once(Item::Spans).chain(bad_calls(device).into_iter().map(Item::Misuse)).chain(cases);
    Ok((items.collect(), list_hash))
}

/// The id of the check of spans.
const SPANS: &str = "spans";

async fn check_spans(device: &dyn Device) -> Result<(), Status> {
    let checked = device.check_spans().await.map_err(|error| error.status("a view"))?;
    checked.map_err(|detail| Status::Fail(Finding { check: Check::Span, output: "a view", detail }))
}

/// The hash of the cases' ids.
pub(crate) fn hash_of(cases: &[Case]) -> String {
    hash(&cases.iter().map(Case::to_string).collect::<Vec<_>>())
}

/// SHA-256 of the ids, one per line, in hexadecimal.
fn hash(ids: &[String]) -> String {
    sha256(ids.join("\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{CastOrder, Norm};

    use super::*;
    use crate::case::Kind;
    use crate::run::memory::Call;
    use crate::selftest::faulty::Faulty;
    use crate::selftest::simulate::SimulatedBackend;
    use rmsnorm_spec::{DType, Error, NormSpec, Tensor};

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
        for id in [id, "misuse:backward:no_mean", "spans"] {
            let (result, lines) = summary(&Options { cases: vec![id.into()], self_test: false, ..Options::default() });
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

    /// This list defines "conformant". A change of the list needs a new version of the suite.
    #[test]
    fn list_of_the_core_profile_is_fixed() {
        let cases = Profile::Core.cases(0);
        let ids: Vec<String> = cases.iter().map(Case::to_string).collect();
        assert_eq!(hash(&ids), "ae4e34fe3e945f43c0aadd7b80826cf1ffe3712143749cdb10e83ce4ae54d8d2");
        // Cases with gates or groups of columns follow those that were there before, and L2 norms, later
        // cast orders and casts follow these.
        fn is_newest(case: &Case) -> bool {
            let is_usual = matches!(case.cast_order, CastOrder::AtStore | CastOrder::BeforeWeight);
            case.casts || !is_usual || !Norm::USUAL.contains(&case.norm)
        }
        let is_new = |case: &Case| is_newest(case) || case.kind.gate().is_some() || case.groups > 1;
        let digest_before = |is_later: &dyn Fn(&Case) -> bool| {
            let before = cases.iter().take_while(|case| !is_later(case)).count();
            assert!(cases[before..].iter().all(is_later));
            hash(&ids[..before])
        };
        assert_eq!(digest_before(&is_new), "45e21d528c87f084676ba55cc42a6625c4af39785e9db0dd0e7501efee14bb29");
        assert_eq!(digest_before(&is_newest), "d698d837b3c36944eb441c0151aad35b523c670a044c8bfba85af7e9dbc7399e");
    }

    /// The digest of a rebuilt kernel must be the same. A changed bit of an output changes the
    /// digest; nothing else does.
    #[test]
    fn digest_of_a_run_is_that_of_its_bits() {
        let options = Options { most_cases: Some(40), self_test: false, ..Options::default() };
        let digest = |device: &Faulty| {
            let mut lines = Vec::new();
            let summary = run_device(device, &options, &mut |_, _| {}, Some(&mut lines)).expect("a list");
            let text = String::from_utf8(lines).expect("JSON is UTF-8");
            let cases: Vec<serde_json::Value> =
                text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
            assert_eq!(cases.last().expect("a summary")["digest"], summary.digest);
            assert!(summary.to_string().contains(&format!("bits        sha256 {}\n", summary.digest)));
            (summary.digest, cases.into_iter().map(|case| case["digest"].clone()).collect::<Vec<_>>())
        };
        let (right, cases) = digest(&Faulty::correct());
        assert_eq!(digest(&Faulty::correct()), (right.clone(), cases.clone()));
        // Flips the last bit of one element of every y.
        let (other, changed) = digest(&Faulty::new(|_, _, call| {
            if let Some(y) = call.tensors.iter_mut().find(|tensor| tensor.name == Tensor::Y) {
                let first = y.view.start;
                y.after[first] ^= 1;
            }
        }));
        assert_ne!(other, right);
        let differ = (0..cases.len() - 1).filter(|&case| cases[case] != changed[case]).count();
        assert!(differ > 10, "{differ}");
    }

    #[test]
    fn several_cases_run_in_the_order_they_are_named() {
        let ids = ["spans".to_owned(), "misuse:backward:no_mean".into()];
        let (result, lines) = summary(&Options { cases: ids.to_vec(), self_test: false, ..Options::default() });
        assert_eq!(result.expect("the ids are valid").counts.passed, 2);
        for (id, line) in ids.iter().zip(lines.lines()) {
            assert!(line.contains(&format!(r#""id":"{id}""#)), "{line}");
        }
    }

    #[test]
    fn parts_are_disjoint_and_together_the_whole() {
        let ids = |part| {
            let (_, lines) = summary(&Options { part, self_test: false, ..Options::default() });
            let cases = lines.lines().filter_map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
                line["id"].as_str().map(str::to_owned)
            });
            cases.collect::<Vec<_>>()
        };
        let whole = ids(None);
        assert_eq!(list(&SimulatedBackend::new(None), &Options::default()).expect("a profile"), whole);
        let parts: Vec<Vec<String>> = (1..=7).map(|part| ids(Some((part, 7)))).collect();
        assert!(parts.iter().all(|part| part.len().abs_diff(whole.len() / 7) <= 1));
        let mut together = parts.concat();
        assert_eq!(together.len(), whole.len());
        together.sort();
        let mut sorted = whole;
        sorted.sort();
        assert_eq!(together, sorted);
    }

    #[test]
    fn run_of_an_unknown_case_is_an_error() {
        let options = Options { cases: vec!["bounds:forward".into()], self_test: false, ..Options::default() };
        assert!(matches!(summary(&options).0, Err(RunError::Case(_))));
    }

    #[test]
    fn run_without_an_executed_case_is_no_success() {
        let options = Options { cases: vec!["misuse:backward:no_mean".into()], self_test: false, ..Options::default() };
        let mut summary = summary(&options).0.expect("the id is valid");
        summary.counts = Counts { unsupported: 5, ..Counts::default() };
        assert!(!summary.is_success());
        summary.counts = Counts { passed: 1000, vacuous: 5, ..Counts::default() };
        assert!(summary.is_success());
        summary.counts.vacuous = 6;
        assert!(!summary.is_success());
    }

    #[test]
    fn run_with_gaps_says_how_many_and_core_with_skips_is_incomplete() {
        let options = Options { cases: vec!["spans".into()], self_test: false, ..Options::default() };
        let mut summary = summary(&options).0.expect("the id is valid");
        summary.counts = Counts { passed: 1000, unsupported: 30, skipped: 2, ..Counts::default() };
        let text = summary.to_string();
        assert!(summary.is_success());
        assert!(text.contains("\n30 unsupported, 0 vacuous; both are listed above\n"), "{text}");
        assert!(text.ends_with("\n1000 passed, 0 failed, 2 skipped"), "{text}");

        summary.profile = Profile::Core.name();
        assert_eq!(summary.conclusion(), "incomplete: the self-test was left out");
        summary.self_test = Some(self_test(1));
        assert!(!summary.is_success());
        assert!(summary.to_string().contains("incomplete: 2 cases were skipped on this machine"));
        summary.counts.skipped = 0;
        assert_eq!((summary.is_success(), summary.conclusion().as_str()), (true, "conformant"));
        summary.missing = vec!["bias"];
        assert!(!summary.is_success());
        assert_eq!(summary.conclusion(), "incomplete: no case with bias passed, which is mandatory");
    }

    /// Every backend with a backward pass can make a call without parameter gradients.
    #[test]
    fn everyday_call_that_is_refused_alone_is_a_failure() {
        let has_gradients = |call: &Call| call.get(Tensor::Dweight).or(call.get(Tensor::Dbias)).is_some();
        let refuses_lone_dx = move |call: &Call| {
            (call.kind == Kind::BACKWARD && !has_gradients(call))
                .then(|| Error::Unsupported { rule: "a workspace, which is not given".into() })
        };
        let mut device = Faulty::correct();
        device.refusal = Some(Box::new(refuses_lone_dx));
        let options = Options { self_test: false, ..Options::default() };
        let summary = run_device(&device, &options, &mut |_, _| {}, None).expect("a list");
        assert!(!summary.is_success());
        // Refusals with mixed dtypes or other reductions may be gaps.
        assert!(summary.counts.failed > 3 && summary.counts.unsupported > 0, "{summary}");
        assert_eq!(summary.counts.failed, summary.failures.len());
        let listed: usize = summary.not_executed.values().sum();
        assert_eq!(listed, summary.counts.unsupported + summary.counts.vacuous + summary.counts.skipped, "{summary}");
        assert!(
            summary.to_string().contains("kind, norm and dtype pass: a workspace, which is not given"),
            "{summary}"
        );
        assert_eq!(run_device(&Faulty::correct(), &options, &mut |_, _| {}, None).expect("a list").failures, []);
    }

    #[test]
    fn part_of_a_list_is_spread_over_it_and_does_not_conclude() {
        let backend = SimulatedBackend::new(None);
        let options =
            |most_cases| Options { profile: Profile::Core, most_cases, self_test: false, ..Options::default() };
        let (items, _) = items(&backend, &options(Some(3))).expect("a list");
        let all = Profile::Core.cases(0);
        let cases = items.iter().filter_map(Item::case).collect::<Vec<_>>();
        assert_eq!(cases, [all[0], all[all.len() / 3], all[2 * all.len() / 3]]);
        assert_eq!(items.len(), 3);
        let summary = run(&backend, &options(Some(3)), &mut |_, _| {}, None).expect("nothing is written");
        assert_eq!((summary.profile, summary.conclusion().as_str()), ("part", "passed"));
    }

    #[test]
    fn failing_case_prints_the_line_that_replays_it() {
        use crate::selftest::planted::{BugList, NormBug};
        let options = Options { self_test: false, ..Options::default() };
        let backend = SimulatedBackend::new(Some(NormBug::NoSecond.bug()));
        let summary = run(&backend, &options, &mut |_, _| {}, None).expect("nothing is written");
        let (id, finding) = summary.failures.first().expect("dx is wrong");
        assert_eq!((finding.check, finding.output), (Check::Bounds, "dx"));
        assert!(!summary.is_success());
        assert!(summary.to_string().contains(&format!("rmsnorm conformance --backend simulated --case {id}\n")));
    }

    /// Everything except the times and their digests is equal.
    #[test]
    fn report_does_not_depend_on_the_jobs() {
        let report = |jobs| {
            let options = Options { most_cases: Some(60), self_test: false, jobs, ..Options::default() };
            let (summary, lines) = summary(&options);
            let cases: Vec<serde_json::Value> = lines
                .lines()
                .map(|line| {
                    let mut case: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
                    case.as_object_mut()
                        .expect("an object")
                        .retain(|name, _| !name.contains("elapsed") && !name.contains("sha256"));
                    case
                })
                .collect();
            (summary.expect("nothing fails").digest, cases)
        };
        let one = report(1);
        assert!(one.1.len() > 40, "{}", one.1.len());
        for jobs in [2, 5] {
            assert!(report(jobs) == one, "{jobs} jobs");
        }
    }

    /// As many cases as there are jobs are begun before one is done.
    #[test]
    fn awaited_run_has_the_report_of_the_other_one() {
        let case = |cols| Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, cols).to_string();
        let device = Faulty::correct();
        let run = |jobs, is_awaited| {
            let (mut lines, mut begun) = (Vec::new(), Vec::new());
            let cases = [3, 4, 5, 6].map(case).to_vec();
            let options = Options { cases, self_test: false, jobs, ..Options::default() };
            let before = device.calls();
            let progress = &mut |_, _| begun.push(device.calls() - before);
            let summary = match is_awaited {
                true => block_on(run_device_async(&device, &options, progress, Some(&mut lines))),
                false => run_device(&device, &options, progress, Some(&mut lines)),
            };
            let Summary { digest, counts, .. } = summary.expect("the ids are valid");
            let lines = String::from_utf8(lines).expect("JSON is UTF-8");
            let line = |line| serde_json::from_str::<serde_json::Value>(line).expect("a line is JSON");
            let ids: Vec<_> = lines.lines().map(|text| line(text)["id"].clone()).collect();
            (digest, counts, ids, begun)
        };
        let (digest, counts, ids, begun) = run(1, false);
        assert_eq!((counts.passed, begun), (4, vec![0, 2, 4, 6, 8, 8]));
        for jobs in [1, 3] {
            let awaited = run(jobs, true);
            assert_eq!((&awaited.0, awaited.1, &awaited.2), (&digest, counts, &ids));
            assert_eq!(awaited.3[1] > 2, jobs > 1, "{jobs} jobs: {:?}", awaited.3);
        }
    }

    #[test]
    fn panic_of_a_backend_is_a_failed_case() {
        let report = block_on(caught("id".into(), async |_| panic!("index out of bounds")));
        let finding = Finding { check: Check::Panic, output: "the call", detail: "index out of bounds".into() };
        assert_eq!(report.status, Status::Fail(finding));
    }

    /// A run has all items of its profile: spans, invalid calls, the list, and beyond smoke the
    /// breakpoints of both kinds.
    #[test]
    fn run_has_every_item_of_its_profile() {
        let mut device = Faulty::correct();
        device.breakpoints = (vec![1234], vec![99]);
        for profile in [Profile::Smoke, Profile::Core, Profile::Stress] {
            let (items, _) = items(&device, &Options { profile, ..Options::default() }).expect("a list");
            let spans = items.iter().filter(|item| matches!(item, Item::Spans)).count();
            let misuse = items.iter().filter(|item| matches!(item, Item::Misuse(_))).count();
            assert_eq!((spans, misuse), (1, bad_calls(&device).len()), "{}", profile.name());
            let cases: Vec<Case> = items.iter().filter_map(Item::case).collect();
            assert!(profile.cases(0).iter().all(|case| cases.contains(case)));
            let has = |rows: Option<usize>, cols: Option<usize>| {
                cases.iter().any(|case| rows.is_none_or(|n| case.rows == n) && cols.is_none_or(|n| case.cols == n))
            };
            let cols = [1233, 1234, 1235].map(|cols| has(None, Some(cols)));
            let rows = [98, 99, 100].map(|rows| has(Some(rows), Some(33)));
            let shapes = [6, 7].map(|rows| has(Some(rows), Some(11)));
            let is_there = profile != Profile::Smoke;
            assert_eq!((cols, rows, shapes), ([is_there; 3], [is_there; 3], [is_there; 2]), "{}", profile.name());
        }
    }

    #[test]
    fn run_that_fails_fast_ends_with_the_first_failure() {
        // The first calls are the invalid ones, which are refused.
        let bad = bad_calls(&Faulty::correct()).len();
        let spoil = move |n: usize, _: &NormSpec, call: &mut Call| {
            if n == bad + 4 {
                call.tensors.iter_mut().for_each(|tensor| tensor.after[0] ^= 1);
            }
        };
        for (fail_fast, most_calls) in [(true, bad + 5), (false, usize::MAX)] {
            let device = Faulty::new(spoil);
            let options = Options { self_test: false, fail_fast, ..Options::default() };
            let summary = run_device(&device, &options, &mut |_, _| {}, None).expect("nothing is written");
            assert_eq!(summary.counts.failed, 1, "{summary}");
            assert!(!summary.is_success());
            assert!(device.calls() > bad && device.calls() <= most_calls, "{}", device.calls());
            assert_eq!(device.calls() > bad + 5, !fail_fast);
        }
    }
}
