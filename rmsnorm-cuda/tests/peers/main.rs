//! `PeerGroup`: ranks as streams of one GPU, and as GPUs where there are several. What only a GPU can show.
//!
//! Without a GPU every test prints why it is skipped and passes, unless `RMSNORM_REQUIRE` names `cuda`.
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
