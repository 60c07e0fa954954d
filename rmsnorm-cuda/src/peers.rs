//! Norms of sums over several devices of one host, in one kernel: [`PeerGroup`].
//!
//! | here | role |
//! |---|---|
//! | `group` | [`PeerGroup`]: a rank, and the trait |
//! | `access` | which backends can be ranks of one group, and peer access between their devices |
//! | `process` | [`PeerSeat`]: a rank in a process of its own, before it knows the others |
//! | `card`, `users` | what such ranks tell each other; which of them have a rank's memory mapped |
//! | `workspace` | the memory that ranks share, and the word by which a kernel reports to the host |
//! | `params` | the second argument of the kernel; numbers that both sides have to agree on |
//! | `launch` | a call to launches |
//! | `rows` | calls whose rows are owned by ranks, and large ones that are sooner done so |
//! | `columns` | calls whose columns are divided: the backend's halves, and the exchange between them |
//!
//! The protocol is told in `kernels/peers.cuh`, what a plan is in `plan/reduce_forward.rs` and `reduce_forward_rows.rs`.

mod access;
mod card;
mod columns;
mod group;
mod launch;
mod params;
mod process;
mod rows;
mod users;
mod workspace;

pub use card::PeerCard;
pub use group::{MissingRank, PeerGroup};
pub(crate) use params::{EMPTY_WORD, MOST_RANKS, Peers, STATE_BYTES};
pub use process::PeerSeat;
