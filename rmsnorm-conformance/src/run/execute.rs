//! Runs one case. A panic of the backend fails the case, not the run, where panics unwind.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use pollster::block_on;
use web_time::Instant;

use crate::case::{Case, Trial};
use crate::finding::{Check, Finding, Status};
use crate::judge::trial;
use crate::report::CaseReport;
use crate::run::calls::Context;
use crate::run::determinism;

/// Runs one case.
pub(crate) async fn run_case(context: Context<'_>, case: &Case) -> CaseReport {
    let run = async |report: &mut CaseReport| match case.trial {
        Trial::Bounds => trial::run(context, case, report).await,
        Trial::Determinism { repeats } => determinism::run(context, case, repeats).await,
        Trial::Metamorphic => determinism::run_metamorphic(context, case).await,
    };
    caught(case.to_string(), run).await
}

/// Runs one case, and waits for it.
pub(crate) fn execute_case(context: Context<'_>, case: &Case) -> CaseReport {
    block_on(run_case(context, case))
}

/// The report of `run`, or of its panic.
pub(crate) async fn caught(id: String, run: impl AsyncFnOnce(&mut CaseReport) -> Result<(), Status>) -> CaseReport {
    let start = Instant::now();
    let mut report = CaseReport::new(id);
    report.status = match AssertUnwindSafe(run(&mut report)).catch_unwind().await {
        Ok(outcome) => outcome.err().unwrap_or(Status::Pass),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
            let detail = text.unwrap_or("no message").to_owned();
            Status::Fail(Finding { check: Check::Panic, output: "the call", detail })
        }
    };
    report.elapsed_us = micros(start.elapsed());
    report
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
