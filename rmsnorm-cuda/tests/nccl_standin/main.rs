//! The calls that NCCL gets, and the errors for an NCCL that is missing, old or failing. A stand-in
//! for NCCL prints every call; the devices are stand-ins too. Tests with the real NCCL:
//! tests/nccl.rs.
//!
//! Libraries are loaded once per process, so each case runs this test again in its own process.
#![cfg(all(target_os = "linux", feature = "nccl"))]
#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, in its helper functions too"
)]

mod calls;
mod failures;
mod library;
#[path = "../machine/mod.rs"]
mod machine;

use machine::{Machine, has_c_compiler, told};

const DRIVER: &str = include_str!("driver.c");
const NCCL: &str = include_str!("nccl.c");

/// Runs in the child process of the other tests; does their task.
#[test]
fn child_answers() {
    if let Some(what) = told() {
        library::answer(&what).or_else(|| calls::answer(&what)).or_else(|| failures::answer(&what)).expect("a task");
    }
}

/// Two devices and an NCCL without other ranks; `None`, with the reason on stdout, without a C
/// compiler.
fn whole() -> Option<Machine> {
    has_c_compiler().then(|| {
        let machine = Machine::broken(&[]);
        machine.library("libcuda.so", DRIVER, &[]);
        machine.library("libnccl.so.2", NCCL, &[]);
        machine
    })
}

/// The calls and answers of a child process.
fn transcript(machine: &Machine, what: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let text = machine.run(what, &[&[("RMSNORM_NCCL", "")], variables].concat());
    let is_ours = |line: &&str| line.starts_with("call: ") || line.starts_with("answer: ");
    text.lines().filter(is_ours).map(|line| line.strip_prefix("call: ").unwrap_or(line).to_owned()).collect()
}
