//! A group of ranks through NCCL.
//!
//! | here | role |
//! |---|---|
//! | `id` | what the ranks of one communicator agree on first |
//! | `comm` | the communicator that callers hold: how it is made, what it is |
//! | `handle` | NCCL's own, from the first call to the last, and the first failure |
//! | `exchange` | a pure function of shares and a rank: which bytes go where |
//! | `tensors` | views to addresses |
//! | `collective`, `reduce` | the calls |
//! | `failure` | what NCCL reports, as text |

mod collective;
mod comm;
mod exchange;
mod failure;
mod handle;
mod id;
mod reduce;
mod tensors;

pub use comm::NcclComm;
pub use failure::NcclFailure;
pub use id::NcclId;

/// NCCL's name in errors. Not the backend's: a machine may have one without the other.
pub(crate) const NAME: &str = "nccl";
