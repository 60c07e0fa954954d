//! The program `rmsnorm`: lists the devices of a machine (`devices`), tests (`conformance`) and
//! measures (`bench`) them, compares measurements (`compare`), compiles kernels in advance
//! (`warm`), searches tile sizes (`tune`), normalizes files (`run`) and checks reports (`report`).
//! Without a command it does the first three in brief.
//!
//! Exit codes: 0 done; 1 a check failed; 2 bad input or a missing device, with one line on stderr.
#![forbid(unsafe_code)]

mod args;
mod backends;
mod commands;
mod failure;
mod memory;
mod output;
mod progress;
mod tensors;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let outcome = match Cli::try_parse() {
        Ok(cli) => execute(&cli),
        // Wrong arguments: clap prints the error. A closed stderr does not change the exit code.
        Err(answer) if answer.use_stderr() => {
            let _ = answer.print();
            return ExitCode::from(2);
        }
        // Help or the version: output like any other.
        Err(answer) => output::printed(answer.print()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn execute(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        None => commands::overview::run(),
        Some(Command::Devices(args)) => commands::devices::run(args),
        Some(Command::Conformance(args)) => commands::conformance::run(args),
        Some(Command::Bench(args)) => commands::bench::run(args),
        Some(Command::Compare(args)) => commands::compare::run(args),
        Some(Command::Warm(args)) => commands::warm::run(args),
        Some(Command::Tune(args)) => commands::tune::run(args),
        Some(Command::Run(args)) => commands::run::run(args),
        Some(Command::Report(command)) => commands::report::run(command),
    }
}
