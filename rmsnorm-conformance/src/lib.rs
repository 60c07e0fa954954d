//! The conformance suite: tests that prove a backend correct on the device at hand.
//!
//! A backend implements [`Harness`] (copies test data to the device, and states the properties of
//! its arithmetic). It gets named tests from the [`conformance!`](macro@crate::conformance) macro,
//! or a whole profile with a report from [`run`]. On a machine without the device, the named tests
//! say so and pass, unless the environment variable `RMSNORM_REQUIRE` names the backend.
//!
//! The flow of a case:
//!
//! ```text
//! profiles -> Case -> data -> calls + memory -> device (the backend)
//!          -> trial: truth (reference, bounds), judge -> report
//! ```
//!
//! [`testing`] has helpers for other tests: values, guarded memory, missing devices, the judge of
//! one call.
//!
//! An output is accepted if it lies in an interval that follows from the declared arithmetic
//! ([math](rmsnorm_spec::math), sections 5 and 6); no tolerance is tuned. Before a run, the suite
//! proves on [`planted`] bugs that it can fail.

#![forbid(unsafe_code)]

mod case;
mod finding;
pub mod judge;
mod names;
mod pieces;
pub mod ranks;
mod report;
mod run;
mod selftest;
pub mod testing;

pub use case::profiles::{Profile, breakpoints};
pub use case::{Case, Family, Kind, Layout, ParseCaseError, Trial};
pub use finding::{Check, Finding, Status};
pub use judge::arithmetic::{Arithmetic, NonFinite, StoreRounding};
pub use judge::bounds;
pub use report::check::{CheckedReport, ReportError, check_report, read_report};
pub use report::summary::{SUITE_VERSION, Summary};
pub use report::{CaseReport, Counts, OutputReport, Quality};
#[doc(no_inline)]
pub use rmsnorm_spec as spec;
pub use run::harness::Harness;
pub use run::named_tests::{
    test_bounds, test_determinism, test_metamorphic, test_misuse, test_norm, test_self_test, test_spans,
};
pub use run::{Options, RunError, list, run, run_async};
pub use selftest::{Caught, SelfTest, planted, self_test, simulate};
pub use testing::TestFailure;
