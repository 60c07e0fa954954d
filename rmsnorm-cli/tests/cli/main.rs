//! Tests of the program `rmsnorm` as a process: its arguments, files, output and exit codes.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod bad_input;
mod commands;
mod definition;
mod figures;
mod gpu;
mod headers;
#[cfg(target_os = "linux")]
mod memory;
mod page;
mod proof;
mod quantized;
mod run;
#[cfg(target_os = "linux")]
mod streams;
mod support;
mod threads;
mod tune;
mod writing;
