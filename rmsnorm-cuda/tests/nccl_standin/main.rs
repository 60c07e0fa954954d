//! What is said to NCCL, and what a user is told where it is missing, too old or fails: with a stand-in that says every call, on devices
//! that are none. What NCCL does with it, two GPUs show: tests/nccl.rs.
//!
//! Libraries are loaded once a process, so each case runs in a process of its own: this test, started again.
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

/// Not a test by itself: does what a test of another process asked for.
#[test]
fn child_answers() {
    if let Some(what) = told() {
        library::answer(&what).or_else(|| calls::answer(&what)).or_else(|| failures::answer(&what)).expect("a task");
    }
}

/// Two devices and an NCCL without other ranks; none, with the reason on stdout, where there is no C compiler.
fn whole() -> Option<Machine> {
    has_c_compiler().then(|| {
        let machine = Machine::broken(&[]);
        machine.library("libcuda.so", DRIVER, &[]);
        machine.library("libnccl.so.2", NCCL, &[]);
        machine
    })
}

/// What was called and answered.
fn transcript(machine: &Machine, what: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let text = machine.run(what, &[&[("RMSNORM_NCCL", "")], variables].concat());
    let is_ours = |line: &&str| line.starts_with("call: ") || line.starts_with("answer: ");
    text.lines().filter(is_ours).map(|line| line.strip_prefix("call: ").unwrap_or(line).to_owned()).collect()
}
