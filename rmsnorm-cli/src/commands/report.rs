//! `rmsnorm report check`: checks reports of the suite that others made.

use std::fs;

use rmsnorm_core::conformance::check_report;

use crate::args::{CheckArgs, ReportCommand};
use crate::failure::Failure;
use crate::output::print;

/// Prints a line per report.
pub fn run(command: &ReportCommand) -> Result<(), Failure> {
    let ReportCommand::Check(CheckArgs { files }) = command;
    let mut outcome = Ok(());
    for file in files {
        let name = file.display();
        let text = fs::read_to_string(file)
            .map_err(|error| Failure::Input(format!("{name} cannot be read: {error}; fix: name a saved report")))?;
        let (line, is_good) = match check_report(&text) {
            Ok(report) => (report.to_string(), report.is_success),
            Err(reason) => (format!("refused: {reason}"), false),
        };
        print(&format!("{name}: {line}\n"))?;
        if !is_good {
            outcome = Err(Failure::Check);
        }
    }
    outcome
}
