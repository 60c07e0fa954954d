//! GPU tests that the conformance suite does not cover: graphs, streams, contexts, sizes past 32
//! bits, repeated bits.
//!
//! Without a GPU every test prints why it is skipped and passes, unless `RMSNORM_REQUIRE` names
//! `cuda`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

mod codes;
mod errors;
mod graphs;
mod interop;
mod invariance;
mod large;
mod memory;
mod reductions;
mod repeats;
mod rows;
mod streams;
mod sums;
mod support;
