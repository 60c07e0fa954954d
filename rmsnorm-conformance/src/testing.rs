//! The test kit: what tests of a backend, of its measurements and of programs that use it need beside the suite.
//!
//! | of these there is one | for |
//! |---|---|
//! | [`values`] | data without structure, the same everywhere |
//! | [`Guarded`] | a tensor amid memory that must stay as it was; a [`Call`] is made of them |
//! | [`available`], [`skip_or_fail`] | a device that a machine lacks: skipped, or a failure where `RMSNORM_REQUIRE` names it |
//! | [`ForwardTruth`], [`BackwardTruth`] | what a call must give: reference, derived bounds, and the judge of its outputs |

mod require;
mod values;

pub use crate::judge::truth::{BackwardTruth, ForwardTruth};
pub use crate::run::device::{Answer, TransferError};
pub use crate::run::memory::{Access, Bits, Call, Fill, Guarded, Outputs, Placement, Poison};
pub use require::{TestFailure, available, skip_or_fail};
pub use values::{bits, exact, splitmix, value, values};
