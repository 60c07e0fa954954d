//! `PeerGroup` on GPUs: ranks as streams of one GPU, and each on its own GPU if there are several.
//!
//! Without a GPU every test prints why it is skipped and passes, unless `RMSNORM_REQUIRE` names
//! `cuda`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helper functions too")]

mod case;
mod columns;
mod graphs;
mod machine;
mod missing;
mod processes;
mod refused;
mod rows;
mod stress;
mod sums;
mod tensors;
