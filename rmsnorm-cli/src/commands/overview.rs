//! `rmsnorm` without a command: lists the devices, proves each one and measures it briefly. Lines are
//! printed in order, each as soon as it is known.

use std::panic::resume_unwind;
use std::thread;

use rmsnorm_core::conformance::{Options, Summary};
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyBackend, available};

use super::bench::{self, table};
use super::conformance::{all_threads, prove};
use super::devices;
use crate::failure::Failure;
use crate::output::print;
use crate::progress::hidden;

const DEVICES: &str =
    concat!("rmsnorm ", env!("CARGO_PKG_VERSION"), ": fused RMSNorm and LayerNorm kernels\n\nDEVICES\n");

const RESULTS: &str = "
RESULTS of generated test cases, compared with an f64 reference and its error bounds
";

/// Cases of the suite's profile smoke that each device runs. On a GPU most of them compile a program,
/// which takes a third of a second of CPU time.
const MOST_CASES: usize = 256;

const SPEEDS: &str = "\nSPEEDS\n";

const NEXT: &str = "
NEXT  rmsnorm conformance checks more, rmsnorm bench measures more, rmsnorm --help lists all commands
";

/// Prints the overview. Software adapters are neither proven nor measured, as that takes minutes.
///
/// # Errors
/// A device with a wrong result, after all are tested: nothing is measured then.
pub fn run() -> Result<(), Failure> {
    print(DEVICES)?;
    let devices = available();
    print(&devices::table(&devices))?;

    print(RESULTS)?;
    let ready = devices.iter().filter(|entry| entry.status.is_ok());
    let backends = ready.map(|entry| AnyBackend::open(entry.device)).collect::<Result<Vec<_>, _>>()?;
    let (left_out, backends): (Vec<_>, Vec<_>) =
        backends.into_iter().partition(|backend| backend.as_wgpu().is_some_and(WgpuBackend::is_software));
    prove_all(&backends)?;
    for name in left_out.iter().map(AnyBackend::device) {
        let command = format!("rmsnorm conformance --backend {name} --profile smoke");
        print(&format!("{name:<6} left out: a software adapter takes minutes; to check it, run {command}\n"))?;
    }

    print(SPEEDS)?;
    speeds(&backends)?;
    print(NEXT)
}

/// Proves all backends at the same time: one waits for compilers while another computes. Prints
/// their results in order.
///
/// # Errors
/// A backend with a wrong result, after all are tested.
fn prove_all(backends: &[AnyBackend]) -> Result<(), Failure> {
    thread::scope(|scope| {
        let start = |(index, backend)| {
            // The suite is the same for all, so it proves once that it can fail.
            let (self_test, most_cases) = (index == 0, Some(MOST_CASES));
            let options = Options { self_test, most_cases, jobs: all_threads(), ..Options::default() };
            scope.spawn(move || prove(backend, &options, None))
        };
        let started: Vec<_> = backends.iter().enumerate().map(start).collect();
        let shown = backends.iter().zip(started).map(|(backend, thread)| {
            let summary = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            let name = backend.device();
            if summary.is_success() {
                return hidden(|| print(&format!("{name:<6} {}\n", proof(&summary))));
            }
            hidden(|| print(&format!("{name:<6} FAILED: {}\n\n{summary}\n", summary.conclusion())))?;
            Err(Failure::Check)
        });
        shown.fold(Ok(()), Result::and)
    })
}

/// The number of results that were compared with their bounds.
fn proof(summary: &Summary) -> String {
    let results: usize = summary.quality.values().map(|quality| quality.checked).sum();
    let (results, cases) = (grouped(results), grouped(summary.counts.passed));
    format!("proved: {results} results within their bounds, in {cases} test cases")
}

/// A number with a comma before each group of three digits.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let comma = |place: usize| if place > 0 && (digits.len() - place).is_multiple_of(3) { "," } else { "" };
    digits.char_indices().map(|(place, digit)| format!("{}{digit}", comma(place))).collect()
}

/// One table of all devices, and the meaning of its columns.
fn speeds(backends: &[AnyBackend]) -> Result<(), Failure> {
    let selection = bench::brief();
    let width = table::width(selection.operations());
    print(&format!("{:<6} {}", "device", table::heading(width)))?;
    let mut reports = Vec::new();
    for backend in backends {
        let (name, mut report) = (backend.device(), bench::report(backend));
        bench::fill(backend, &selection, &mut report, &mut |row| {
            print(&format!("{name:<6} {}", table::line(row, width)))
        })?;
        reports.push(report);
    }
    let rows = reports.iter().flat_map(|report| &report.rows);
    let mut notes = format!("\n{}{}", table::LEGEND, table::signs(rows));
    for report in &reports {
        for remark in table::remarks(report) {
            notes += &format!("{}: {remark}\n", report.backend);
        }
    }
    print(&notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 12, 999, 1444, 9403211].map(grouped), ["0", "12", "999", "1,444", "9,403,211"]);
    }
}
