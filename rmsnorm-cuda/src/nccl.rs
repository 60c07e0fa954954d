//! A group of ranks through NCCL.
//!
//! | module | content |
//! |---|---|
//! | `id` | the identifier that the ranks of a new communicator share |
//! | `comm` | the communicator of callers: creation and properties |
//! | `handle` | NCCL's handle, from creation to destruction, and its first failure |
//! | `exchange` | a pure function of shares and a rank: the bytes to send and to receive |
//! | `tensors` | views to addresses |
//! | `collective`, `reduce` | the calls |
//! | `failure` | NCCL's errors as text |

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
