//! The conformance suite: what a backend must do, proven on the device at hand.
//!
//! A backend brings a [`Harness`] (a way to move test data, and claims about its arithmetic) and gets named tests from
//! the [`conformance!`](macro@crate::conformance) macro, or a whole profile with a report from [`run`]. A machine may lack
//! the backend: its named tests then say so and pass, unless the environment variable `RMSNORM_REQUIRE` names it.
//!
//! The flow of a case:
//!
//! ```text
//! profiles -> Case -> data -> calls + memory -> device (the backend) -> runner: reference, bounds, judge -> report
//! ```
//!
//! Outputs are judged by acceptance intervals that follow from the declared arithmetic (docs/math.md, sections 5 and
//! 6); there is no tolerance to tune. Before a run the suite proves on [`planted`] bugs that it can fail.

mod arithmetic;
pub mod bounds;
mod calls;
mod cases;
mod coverage;
mod data;
mod determinism;
mod device;
#[cfg(test)]
mod faulty;
mod harness;
pub mod judge;
mod memory;
mod misuse;
mod named_tests;
pub mod planted;
mod profiles;
mod record;
mod report;
mod runner;
mod self_test;
pub mod simulate;
mod span;
mod suite;

pub use arithmetic::{Arithmetic, NonFinite, StoreRounding, policy_depth_cols, policy_depth_rows};
pub use cases::{Case, Dtypes, Kind, Layout, ParseCaseError, Trial};
pub use data::Family;
pub use harness::Harness;
pub use named_tests::{
    TestFailure, test_bounds, test_determinism, test_metamorphic, test_misuse, test_self_test, test_spans,
};
pub use profiles::Profile;
pub use record::{Record, Recorded, read_caps, write_caps};
pub use report::{CaseReport, Check, Counts, Finding, OutputReport, Quality, SUITE_VERSION, Status, Summary};
pub use self_test::{Caught, SelfTest, self_test};
pub use suite::{Options, RunError, list, run};
