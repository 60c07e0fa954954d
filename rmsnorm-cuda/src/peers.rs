//! Norms of sums over several devices of one host, in one kernel: [`PeerGroup`].
//!
//! | module | content |
//! |---|---|
//! | `group` | [`PeerGroup`]: a rank |
//! | `sharded` | its calls: the trait `ShardedNorm` |
//! | `access` | checks that backends can form a group; peer access between their devices |
//! | `process` | [`PeerSeat`]: a rank in its own process, before it joins the group |
//! | `card`, `users` | the data that such ranks exchange; the processes that map a rank's memory |
//! | `workspace` | memory that ranks share; the word through which a kernel reports to the host |
//! | `params` | the second argument of the kernel, and constants that host and kernel share |
//! | `launch` | kernels of a group: loading, and launches of a call |
//! | `reduced` | calls of sums over ranks |
//! | `rows` | calls with the residual divided by rows |
//! | `columns` | calls on column-divided rows: the backend's two phases, the exchange between |
//!
//! For the protocol see `kernels/peers.cuh`; for plans `plan/reduce_forward.rs`,
//! `plan/reduce_forward_packs.rs` and `plan/reduce_forward_rows.rs`.

mod access;
mod card;
mod columns;
mod group;
mod launch;
mod params;
mod process;
mod reduced;
mod rows;
mod sharded;
mod users;
mod workspace;

pub use card::PeerCard;
pub use group::{MissingRank, PeerGroup};
pub(crate) use params::{EMPTY_WORD, MOST_RANKS, Peers, STATE_BYTES};
pub use process::PeerSeat;
