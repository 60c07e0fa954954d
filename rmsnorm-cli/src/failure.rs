//! Failures of the program: one line on stderr and an exit code. Notes, which are lines there too.

use std::io::{self, Write};
use std::process::ExitCode;

use rmsnorm_bench::BenchError;
use rmsnorm_core::Error;

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// A check failed, and the command has printed which. Exit code 1.
    Check,
    /// A result that was to be measured is wrong; the text names it. Exit code 1.
    Wrong(String),
    /// The input is bad or a device is missing. Exit code 2.
    Input(String),
}

impl Failure {
    /// Prints the line, unless the command has printed the reason, and returns the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Failure::Check => ExitCode::from(1),
            Failure::Wrong(what) => {
                tell(&format!("error: {what}"));
                ExitCode::from(1)
            }
            Failure::Input(message) => {
                tell(&format!("error: {message}"));
                ExitCode::from(2)
            }
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Check => f.write_str("a check failed"),
            Failure::Wrong(message) | Failure::Input(message) => f.write_str(message),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Input(error.to_string())
    }
}

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Wrong(what) => Failure::Wrong(what),
            BenchError::Input(message) => Failure::Input(message),
        }
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Input(message)
    }
}

/// Prints a line to stderr. A closed or full stderr is ignored, as the exit code still reports the
/// outcome.
pub fn tell(line: &str) {
    let _ = io::stderr().write_all(format!("{}\n", one_line(line)).as_bytes());
}

/// The message with its control characters escaped. Names from files may hold any, and these must
/// neither break the line nor reach the terminal.
fn one_line(message: &str) -> String {
    message.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
