//! Tests that need a device, in addition to the conformance suite: encoders, shared buffers, low
//! limits, errors.
//!
//! Without an adapter every test prints why it is skipped and passes, unless `RMSNORM_REQUIRE`
//! names `wgpu`.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helper functions too")]

mod aliasing;
mod checked;
mod encoders;
mod errors;
mod groups;
mod limits;
mod places;
mod repeats;
mod sums;
mod support;
