//! The functions and modules on tensors: one program, since each would link all of burn.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking, in its helper functions too")]

mod after;
mod bounds;
mod errors;
mod graphs;
mod kit;
mod modules;
mod orders;
mod slow;
#[cfg(feature = "wgpu")]
mod wgpu;
