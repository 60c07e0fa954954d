//! Prints which check of the suite catches which planted bug, and fails if one survives. Not one of the named tests:
//! their output is hidden when they pass, and this table is to be seen.

use std::process::ExitCode;

fn main() -> ExitCode {
    let result = rmsnorm_conformance::self_test();
    println!("{result}\n");
    if result.is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
