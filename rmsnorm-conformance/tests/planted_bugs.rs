//! Prints which check of the suite catches which planted bug, and fails if a bug survives. It is a
//! separate program, because the output of passing named tests is hidden, and this table should be
//! visible.

use std::num::NonZero;
use std::process::ExitCode;
use std::thread::available_parallelism;

fn main() -> ExitCode {
    let result = rmsnorm_conformance::self_test(available_parallelism().map_or(1, NonZero::get));
    println!("{result}\n");
    if result.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
