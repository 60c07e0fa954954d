//! `rmsnorm tune`: searches tile sizes for this device, tests them and keeps them for later
//! processes.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rmsnorm_bench::tune::{Ending, Outcome, Request, Tuned, tune};
use rmsnorm_core::{AnyBackend, DType};
use rmsnorm_tuning::{Kind, choice, file, folder};

use super::conformance::all_threads;
use crate::args::TuneArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output::print;

/// Measures, tests and writes the table. Prints a line for each entry of the table when it is
/// measured, then the changes.
pub fn run(args: &TuneArgs) -> Result<(), Failure> {
    let request = request(args)?;
    let name = args.backend.clone().map_or_else(first_backend, Ok)?;
    let backend = backends::open(&name, &Default::default())?;
    print(&format!("{backend}\ntuning: {}\n", backend.tuning()))?;
    if !args.dry_run && args.output.is_none() && folder::of_user(&name).is_none() {
        return Err(no_folder());
    }
    let start = Instant::now();
    let outcome = measured(&backend, &request)?;
    print(&conclusion(&outcome, start.elapsed()))?;
    if args.dry_run {
        return print("no table was written: --dry-run\n");
    }
    let path = path(args, &outcome)?;
    let made = format!("{:.0}", Timestamp::now());
    let text = outcome.identity.text(&outcome.table, &made);
    file::write(&path, &text).map_err(|error| Failure::Input(format!("cannot write {}: {error}", path.display())))?;
    print(&format!("written: {}\n", path.display()))?;
    if env::var_os(choice::VARIABLE).is_some_and(|value| !value.is_empty()) {
        print(&format!("{} is set: backends use its value, and not this table\n", choice::VARIABLE))?;
    }
    Ok(())
}

fn request(args: &TuneArgs) -> Result<Request, Failure> {
    let minutes = args.minutes;
    if !(minutes.is_finite() && minutes > 0.0 && minutes <= 1440.0) {
        return Err(Failure::Input(format!("--minutes: expected more than 0 and at most 1440, got {minutes}")));
    }
    let some = |names: &[String]| !names.is_empty();
    let (kinds, dtypes) = (&args.only, &args.dtype);
    Ok(Request {
        kinds: if some(kinds) { backends::choose("--only", kinds, &Kind::ALL, Kind::name)? } else { Vec::new() },
        cols: args.cols.iter().map(|cols| cols.get()).collect(),
        dtypes: if some(dtypes) { backends::choose("--dtype", dtypes, &DType::ALL, DType::name)? } else { Vec::new() },
        budget: Duration::from_secs_f64(60.0 * minutes),
        jobs: all_threads(),
    })
}

/// The first GPU of this machine, or cpu without a GPU.
fn first_backend() -> Result<String, Failure> {
    let names = backends::names();
    let gpu = names.iter().find(|name| name.as_str() != "cpu").or(names.first());
    gpu.cloned()
        .ok_or_else(|| Failure::Input("this machine has no device to tune: `rmsnorm devices` prints the reason".into()))
}

/// The file that the table is written to.
fn path(args: &TuneArgs, outcome: &Outcome) -> Result<PathBuf, Failure> {
    let cached = || choice::path_of(&outcome.identity);
    args.output.clone().or_else(cached).ok_or_else(no_folder)
}

fn no_folder() -> Failure {
    Failure::Input("there is no cache folder for the table: set RMSNORM_CACHE_DIR, or pass --output FILE".into())
}

fn measured(backend: &AnyBackend, request: &Request) -> Result<Outcome, Failure> {
    let mut shown = Ok(());
    let outcome = tune(backend, request, &mut |tuned, done, total| {
        if shown.is_ok() {
            shown = print(&format!("{done:>4}/{total} {}\n", line(tuned)));
        }
    })?;
    shown?;
    Ok(outcome)
}

/// The line of an entry: the times of the built-in value and of the best value, and the best value.
fn line(tuned: &Tuned) -> String {
    let Tuned { rung, subject, us: [built_in, best], gain, ending } = tuned;
    let times = if built_in.is_nan() {
        format!("{:>9} {:>9} {:>7}", "-", "-", "-")
    } else {
        format!("{built_in:9.2} {best:9.2} {:6.1}%", 100.0 * (gain - 1.0))
    };
    let ending = match ending {
        Ending::Kept => "built in".to_owned(),
        Ending::Changed(entry) => entry.clone(),
        Ending::PutBack(reason) => format!("put back: {reason}"),
    };
    format!("{rung:40} {subject:52} {times}  {ending}")
}

/// The changed entries, the ones that failed their tests, and the counts.
fn conclusion(outcome: &Outcome, elapsed: Duration) -> String {
    let Outcome { tuned, not_reached, cases, .. } = outcome;
    let changed: Vec<&Tuned> = tuned.iter().filter(|tuned| matches!(tuned.ending, Ending::Changed(_))).collect();
    let put_back = tuned.iter().filter(|tuned| matches!(tuned.ending, Ending::PutBack(_)));
    let mut text = String::new();
    if !changed.is_empty() {
        let head = ("rung", "measured by", "built in", "tuned", "gain");
        text += &format!("\n{:40} {:52} {:>6} us {:>6} us {:>7}\n", head.0, head.1, head.2, head.3, head.4);
        text += &changed.iter().map(|tuned| format!("{}\n", line(tuned))).collect::<String>();
    }
    text += &put_back.map(|tuned| format!("{}\n", line(tuned))).collect::<String>();
    let (measured, seconds) = (tuned.len(), elapsed.as_secs_f64());
    text += &format!(
        "\n{measured} rungs measured in {seconds:.0} s, {} changed and proven by {cases} cases of the suite, {not_reached} not reached\n",
        changed.len()
    );
    text
}
