//! `rmsnorm` without a command: lists the devices, proves each one and measures it briefly. Every
//! line is printed as soon as it is known.

use rmsnorm_core::conformance::{Options, Summary};
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyBackend, available};

use super::bench::{self, table};
use super::conformance::{all_threads, prove};
use super::devices;
use crate::failure::Failure;
use crate::output::print;

const DEVICES: &str =
    concat!("rmsnorm ", env!("CARGO_PKG_VERSION"), ": fused RMSNorm and LayerNorm kernels\n\nDEVICES\n");

const RESULTS: &str = "
RESULTS of generated test cases, compared with an f64 reference and its error bounds
";

const SPEEDS: &str = "\nSPEEDS\n";

const NEXT: &str = "
NEXT  rmsnorm conformance checks more, rmsnorm bench measures more, rmsnorm --help lists all commands
";

/// Prints the overview. Software adapters are neither proven nor measured, as that takes minutes.
///
/// # Errors
/// The first device with a wrong result: nothing is measured then.
pub fn run() -> Result<(), Failure> {
    print(DEVICES)?;
    let devices = available();
    print(&devices::table(&devices))?;

    print(RESULTS)?;
    let mut proven = Vec::new();
    for entry in devices.iter().filter(|entry| entry.status.is_ok()) {
        let (backend, name) = (AnyBackend::open(entry.device)?, entry.device);
        if backend.as_wgpu().is_some_and(WgpuBackend::is_software) {
            let command = format!("rmsnorm conformance --backend {name} --profile smoke");
            print(&format!("{name:<6} left out: a software adapter takes minutes; to check it, run {command}\n"))?;
            continue;
        }
        let options = Options { jobs: all_threads(), ..Options::default() };
        let summary = prove(&backend, &options, None)?;
        if !summary.is_success() {
            print(&format!("{name:<6} FAILED: {}\n\n{summary}\n", summary.conclusion()))?;
            return Err(Failure::Check);
        }
        print(&format!("{name:<6} {}\n", proof(&summary)))?;
        proven.push(backend);
    }

    print(SPEEDS)?;
    speeds(&proven)?;
    print(NEXT)
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
