//! Runs one case. A panic of the backend fails the case, not the run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::case::{Case, Trial};
use crate::finding::{Check, Finding, Status};
use crate::judge::trial;
use crate::report::CaseReport;
use crate::run::calls::Context;
use crate::run::determinism;

/// Runs one case.
pub(crate) fn execute_case(context: Context<'_>, case: &Case) -> CaseReport {
    caught(case.to_string(), |report| match case.trial {
        Trial::Bounds => trial::run(context, case, report),
        Trial::Determinism { repeats } => determinism::run(context, case, repeats),
        Trial::Metamorphic => determinism::run_metamorphic(context, case),
    })
}

/// The report of `run`, or of its panic.
pub(crate) fn caught(id: String, run: impl FnOnce(&mut CaseReport) -> Status) -> CaseReport {
    let start = Instant::now();
    let mut report = CaseReport::new(id);
    report.status = catch_unwind(AssertUnwindSafe(|| run(&mut report))).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
        let detail = text.unwrap_or("no message").to_owned();
        Status::Fail(Finding { check: Check::Panic, output: "the call", detail })
    });
    report.elapsed_us = micros(start.elapsed());
    report
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
