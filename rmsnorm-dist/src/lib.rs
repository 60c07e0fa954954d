//! Norms over the devices of a group, whose ranks have each a part of what is normalized.
//!
//! Between two layers of a tensor-parallel model every rank has a partial sum. [`ShardedNorm::forward_reduced`] adds those of all ranks,
//! the residual, and normalizes: on every rank, with the same bits on each, whatever the number of rows and whichever algorithm moves the
//! data ([math](rmsnorm_spec::math), equation (1')).
//!
//! Where the residual stream is divided by rows, as in sequence parallelism, [`ShardedNorm::forward_reduced_rows`] adds and normalizes on
//! every rank the rows that it owns, with the same bits of the sum.
//!
//! Where it is the columns of a row that are divided, as those of Q and K norms over all heads, [`ShardedNorm::forward_columns`] and
//! [`backward_columns`](ShardedNorm::backward_columns) normalize by the statistics of whole rows: a rank sends one number a row, or three.
//!
//! - [`Sharded`] composes it of a backend and a [`Collective`], for any of both.
//! - [`ThreadGroup`] is a collective of threads of one process, for backends in host memory.
//!
//! A backend may bring a form of its own, in one kernel: `rmsnorm-cuda` has one over NVLink, with the feature `peers`.
#![forbid(unsafe_code)]

mod any_order;
mod collective;
mod columns;
mod deal;
#[cfg(feature = "conformance")]
mod harness;
mod sharded;
mod sharded_norm;
mod sharded_rows;
mod shares;
mod thread_group;
mod two_ranks;
mod untyped;

pub use collective::{Collective, check_len};
pub use columns::DividedColumns;
#[cfg(feature = "conformance")]
pub use harness::Ranks;
#[doc(no_inline)]
pub use rmsnorm_spec as spec;
pub use sharded::{Order, Sharded};
pub use sharded_norm::{GroupCall, ShardedNorm, check_reduced, check_reduced_rows};
pub use shares::Shares;
pub use thread_group::ThreadGroup;
