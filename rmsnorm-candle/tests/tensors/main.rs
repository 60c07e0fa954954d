//! The functions and modules on tensors: one program, since each would link all of candle.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking, in its helper functions too")]

mod bounds;
#[cfg(feature = "cuda")]
mod cuda;
mod errors;
mod graphs;
mod in_place;
mod kit;
mod modules;
mod orders;
mod slow;
