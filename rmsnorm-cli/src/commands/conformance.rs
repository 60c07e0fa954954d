//! `rmsnorm conformance`: the suite of the library, run on one backend, with its report.

use rmsnorm_core::conformance::{self, Harness, Options, Profile, RunError, Summary};
use rmsnorm_core::{AnyBackend, Task};

use crate::args::ConformanceArgs;
use crate::failure::Failure;
use crate::output::{Output, print};
use crate::progress::Progress;

/// Runs the profile, or the one case, and prints the summary. With `--json -` stdout is all JSON.
pub fn run(args: &ConformanceArgs) -> Result<(), Failure> {
    let json = args.json.as_deref().map(Output::new).transpose()?;
    let backend = AnyBackend::open(args.backend.parse()?)?;
    let options = Options {
        profile: parse_profile(&args.profile)?,
        seed: args.seed,
        case: args.case.clone(),
        // Who replays one case knows that the suite can fail.
        self_test: args.case.is_none(),
    };

    let mut lines = Vec::new();
    let summary = prove(&backend, &options, json.is_some().then_some(&mut lines))?;
    if let Some(output) = &json {
        output.write(&lines)?;
    }
    if !matches!(json, Some(Output::Stdout)) {
        print(&format!("{summary}\n"))?;
    }
    if summary.is_success() { Ok(()) } else { Err(Failure::Check) }
}

/// Runs the suite on a backend, under a progress bar. Every case becomes a line of JSON if there is room for it.
pub fn prove(backend: &AnyBackend, options: &Options, lines: Option<&mut Vec<u8>>) -> Result<Summary, Failure> {
    backend.dispatch(Prove { options, lines }).map_err(|error| Failure::Input(error.to_string()))
}

fn parse_profile(name: &str) -> Result<Profile, Failure> {
    let names = || Profile::ALL.map(Profile::name).join(", ");
    let profile = Profile::ALL.into_iter().find(|profile| profile.name() == name);
    profile.ok_or_else(|| Failure::Input(format!("--profile: expected one of {}, got {name:?}", names())))
}

struct Prove<'a> {
    options: &'a Options,
    lines: Option<&'a mut Vec<u8>>,
}

impl Task for Prove<'_> {
    type Output = Result<Summary, RunError>;

    fn run<H: Harness>(self, harness: &H) -> Self::Output {
        let bar = Progress::new("conformance");
        let mut progress = |done, total| bar.set(done, total);
        let lines = self.lines.map(|lines| lines as &mut dyn std::io::Write);
        conformance::run(harness, self.options, &mut progress, lines)
    }
}
