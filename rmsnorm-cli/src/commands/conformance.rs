//! `rmsnorm conformance`: runs the test suite on one backend and reports.

mod ranks;

use std::num::NonZero;
use std::thread::available_parallelism;

use rmsnorm_core::conformance::{self, Harness, Options, Profile, RunError, Summary};
use rmsnorm_core::{AnyBackend, HarnessTask};

use crate::args::ConformanceArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output::{Output, print};
use crate::progress::Progress;

/// Runs the profile or the named cases and prints the summary. With `--json -` stdout has JSON
/// only.
pub fn run(args: &ConformanceArgs) -> Result<(), Failure> {
    if let Some(ranks) = args.ranks {
        return ranks::prove(&backends::open(&args.backend, &args.cpu)?, ranks.get(), &args.profile);
    }
    let json = args.json.as_deref().map(Output::new).transpose()?;
    let backend = backends::open(&args.backend, &args.cpu)?;
    let options = Options {
        profile: backends::one_of("--profile", &args.profile, &Profile::ALL, Profile::name)?,
        seed: args.seed,
        most_cases: args.most_cases,
        part: args.part.as_deref().map(part).transpose()?,
        cases: args.case.clone(),
        // A replay of single cases does not need the proof that the suite can fail.
        self_test: args.case.is_empty(),
        fail_fast: args.fail_fast,
        jobs: args.jobs.map_or_else(all_threads, NonZero::get),
        host: None,
    };

    if args.list {
        let ids =
            backend.dispatch_harness(List { options: &options }).map_err(|error| Failure::Input(error.to_string()))?;
        return print(&format!("{}\n", ids.join("\n")));
    }
    let mut lines = Vec::new();
    let summary = prove(&backend, &options, json.is_some().then_some(&mut lines))?;
    if let Some(output) = &json {
        output.write(&lines)?;
    }
    if !matches!(json, Some(Output::Stdout)) {
        print(&format!("{summary}\n"))?;
        let flags = backends::flags(&args.cpu);
        if !(summary.failures.is_empty() || flags.is_empty()) {
            // The suite writes the commands and does not know the options of the cpu backend.
            print(&format!("to replay, add{flags} to the commands above\n"))?;
        }
    }
    if summary.is_success() { Ok(()) } else { Err(Failure::Check) }
}

/// The number of threads of the system.
pub fn all_threads() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Parses `K/N`: the number of a part, and the number of parts.
fn part(text: &str) -> Result<(usize, usize), Failure> {
    let numbers = text.split_once('/').and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)));
    numbers
        .filter(|(part, parts)| (1..=*parts).contains(part))
        .ok_or_else(|| Failure::Input(format!("--part: expected K/N with K from 1 to N, as in 1/16, got {text:?}")))
}

/// Runs the suite on a backend, with a progress bar. Each case adds a line of JSON to `lines`.
pub fn prove(backend: &AnyBackend, options: &Options, lines: Option<&mut Vec<u8>>) -> Result<Summary, Failure> {
    let label = format!("conformance {}", backend.device());
    backend.dispatch_harness(Prove { options, lines, label }).map_err(|error| Failure::Input(error.to_string()))
}

struct List<'a> {
    options: &'a Options,
}

impl HarnessTask for List<'_> {
    type Output = Result<Vec<String>, RunError>;

    fn run<H: Harness>(self, harness: &H) -> Self::Output {
        conformance::list(harness, self.options)
    }
}

struct Prove<'a> {
    options: &'a Options,
    lines: Option<&'a mut Vec<u8>>,
    label: String,
}

impl HarnessTask for Prove<'_> {
    type Output = Result<Summary, RunError>;

    fn run<H: Harness>(self, harness: &H) -> Self::Output {
        let bar = Progress::new(self.label);
        let mut progress = |done, total| bar.set(done, total);
        let lines = self.lines.map(|lines| lines as &mut dyn std::io::Write);
        conformance::run(harness, self.options, &mut progress, lines)
    }
}
