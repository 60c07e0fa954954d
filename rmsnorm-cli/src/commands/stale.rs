//! `rmsnorm stale`: the recorded figures that are to be measured again, since what they ran has changed. No device is
//! asked: a report holds the capabilities that its plans were made for.

use std::path::{Path, PathBuf};

use rmsnorm_core::measure::record;

use crate::args::StaleArgs;
use crate::document::{Document, Measured, Report};
use crate::failure::Failure;
use crate::figure::read_text;
use crate::output::print;

/// Prints every row that would run otherwise today, then how many there are.
pub fn run(args: &StaleArgs) -> Result<(), Failure> {
    let documents = documents(&args.paths)?;
    let (mut rows, mut stale, mut unrecorded) = (0, 0, 0);
    for (path, document) in &documents {
        for report in &document.reports {
            for row in &report.rows {
                rows += 1;
                match change(report, row) {
                    Change::None => {}
                    Change::Unrecorded => unrecorded += 1,
                    Change::Some(why) => {
                        stale += 1;
                        print(&format!("{}: {}: {why}\n", path.display(), name(report, row)))?;
                    }
                }
            }
        }
    }
    let unrecorded = match unrecorded {
        0 => String::new(),
        count => format!(", {count} were measured before plans were recorded"),
    };
    print(&format!("{stale} of {rows} figures are of other plans or kernels than today's{unrecorded}\n"))
}

/// Whether a row would run what it ran.
enum Change {
    None,
    Unrecorded,
    Some(String),
}

fn change(report: &Report, row: &Measured) -> Change {
    let (Some(caps), Some(plan), Some(sources)) = (&report.caps, &row.plan, &row.sources) else {
        return Change::Unrecorded;
    };
    let Some((operation, dtype, shape)) = row.subject() else {
        return Change::Some("there is no such operation any more".into());
    };
    let today = report.backend.parse().and_then(|device| record(device, caps, operation, dtype, shape));
    match today {
        Err(error) => Change::Some(error.to_string()),
        Ok(today) if today.plan != *plan => Change::Some(format!("the plan was {plan:?}, is {:?}", today.plan)),
        Ok(today) if today.sources != *sources => Change::Some("the kernels have changed".into()),
        Ok(_) => Change::None,
    }
}

fn name(report: &Report, row: &Measured) -> String {
    let Measured { op, norm, dtype, rows, cols, .. } = row;
    row.id.clone().unwrap_or_else(|| format!("{op}/{norm}/{dtype}/{rows}x{cols}/{}", report.backend))
}

/// The documents of these files, and of those in these folders. In a folder, files of peers are passed over.
///
/// # Errors
/// If there is none, or one cannot be read.
fn documents(paths: &[PathBuf]) -> Result<Vec<(PathBuf, Document)>, Failure> {
    let mut documents = Vec::new();
    for path in paths {
        if path.is_dir() {
            let mut files = Vec::new();
            json_files(path, &mut files)?;
            for file in files {
                let text = read_text(&file)?;
                // Lists are peers'.
                if text.trim_start().starts_with('{') {
                    documents.push(parse(file, &text)?);
                }
            }
        } else {
            documents.push(parse(path.clone(), &read_text(path)?)?);
        }
    }
    if documents.is_empty() {
        return Err(Failure::Input("there are no reports of `rmsnorm bench --json`".into()));
    }
    Ok(documents)
}

fn parse(path: PathBuf, text: &str) -> Result<(PathBuf, Document), Failure> {
    match serde_json::from_str(text) {
        Ok(document) => Ok((path, document)),
        Err(error) => {
            let why = format!("it is no report of `rmsnorm bench --json`: {error}");
            Err(Failure::Input(format!("cannot read {}: {why}", path.display())))
        }
    }
}

/// The `.json` files of a folder and those within, in order of their names.
fn json_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let refuse = |error| Failure::Input(format!("cannot read {}: {error}", folder.display()));
    let entries = std::fs::read_dir(folder).map_err(refuse)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>().map_err(refuse)?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            json_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    Ok(())
}
