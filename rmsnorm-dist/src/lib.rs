//! RMSNorm and LayerNorm over a group of devices (ranks), each of which has a part of the input.
//!
//! - **Partial sums.** Between two layers of a tensor-parallel model every rank has a partial sum.
//!   [`ShardedNorm::forward_reduced`] adds the partial sums of all ranks and the residual, and
//!   normalizes. Every rank gets the same bits, for any number of rows and any transfer algorithm
//!   ([math](rmsnorm_spec::math), equation (1')).
//! - **Divided rows** (sequence parallelism). [`ShardedNorm::forward_reduced_rows`] adds and
//!   normalizes on every rank the rows that the rank owns. The sum has the same bits.
//! - **Divided columns** (for example Q and K norms over all heads).
//!   [`ShardedNorm::forward_columns`] and [`backward_columns`](ShardedNorm::backward_columns)
//!   normalize with the statistics of whole rows. A rank sends one to three f32 per row.
//!
//! Implementations:
//!
//! - [`Sharded`] combines any backend with any [`Collective`].
//! - [`ThreadGroup`] is a collective of threads in one process, for backends in host memory.
//! - `rmsnorm_cuda::PeerGroup` (feature `peers` of `rmsnorm-cuda`) is one kernel over NVLink.
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
pub use shares::RowShares;
pub use thread_group::ThreadGroup;
