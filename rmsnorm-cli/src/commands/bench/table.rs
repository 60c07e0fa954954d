//! The table of speeds: its heading, its lines, and the notes below it.

use std::collections::BTreeMap;

use rmsnorm_bench::document::{Measured, Report};
use rmsnorm_bench::{Operation, Shape, reduction_name};
use rmsnorm_core::GradReduction;

/// The columns, explained for readers who see the table for the first time.
pub const LEGEND: &str = "\
time, us   median time of one call, in microseconds
GB/s       the fewest bytes that the call must read and write, divided by its time; 1 GB is 10^9 bytes
copy GB/s  the same for a plain copy of one matrix on this device, which was timed in turns with the call
of copy    GB/s as a share of copy GB/s: at 100 % the call moves its bytes as fast as the copy
";

/// The line above the measurements.
pub fn heading(width: usize) -> String {
    format!(
        "{:width$} {:>5} {:>12} {:>10} {:>7} {:>9} {:>8}\n",
        "operation", "dtype", "rows x cols", "time, us", "GB/s", "copy GB/s", "of copy"
    )
}

/// The line of a measurement.
pub fn line(row: &Measured, width: usize) -> String {
    let Measured { norm, dtype, rows, cols, us, gbs, copy_gbs, of_copy, .. } = row;
    let (name, shape) = (format!("{norm} {}", row.name()), Shape { rows: *rows, cols: *cols });
    let decimals = if *us < 100.0 { 2 } else { 0 };
    let rates = if row.cold {
        format!("{gbs:7.1} {copy_gbs:9.1} {:7.0}%", 100.0 * of_copy)
    } else {
        format!("{gbs:7.1} {:>9} {:>8}", "-", "*")
    };
    let gaps = if row.has_gaps() { " +" } else { "" };
    format!("{name:width$} {dtype:>5} {shape:>12} {us:10.decimals$} {rates}{gaps}\n")
}

/// The name of an operation, such as `rms_norm backward`. A gradient reduction other than the
/// default follows it.
pub fn name(operation: Operation) -> String {
    let reduction = operation.reduction;
    let reduction = if reduction == GradReduction::default() { "" } else { reduction_name(reduction) };
    format!("{} {} {reduction}", operation.norm.name(), operation.name()).trim_end().to_owned()
}

/// The width of the first column: the longest [`name`], and at least 24.
pub fn width(operations: impl IntoIterator<Item = Operation>) -> usize {
    operations.into_iter().map(|operation| name(operation).len()).max().unwrap_or(0).max(24)
}

/// The meaning of the signs `*` and `+`, where the table has them.
pub fn signs<'r>(rows: impl Iterator<Item = &'r Measured> + Clone) -> String {
    let mut signs = String::new();
    if rows.clone().any(|row| !row.cold) {
        signs += "* the tensors fit into the cache: compare the time, not the rate\n";
    }
    if rows.clone().any(Measured::has_gaps) {
        signs += "+ not captured into a graph: the time includes gaps between launches\n";
    }
    signs
}

/// The least and the median share of the copy, of each operation and dtype.
pub fn shares(rows: &[Measured]) -> String {
    let mut of_operations: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.cold) {
        of_operations.entry((&row.norm, row.name(), &row.dtype)).or_default().push(row);
    }
    let line = |((norm, name, dtype), mut rows): ((_, String, _), Vec<&Measured>)| {
        rows.sort_by(|a, b| a.of_copy.total_cmp(&b.of_copy));
        let (least, median) = (rows[0], rows[rows.len() / 2]);
        let shape = Shape { rows: least.rows, cols: least.cols };
        let [least, median] = [least, median].map(|row| 100.0 * row.of_copy);
        format!(
            "{norm} {name} {dtype}: of copy median {median:.0}%, least {least:.0}% ({shape}), {} shapes\n",
            rows.len()
        )
    };
    of_operations.into_iter().map(line).collect()
}

/// The time of first calls, and the operations and sizes that the table lacks.
pub fn remarks(report: &Report) -> Vec<String> {
    let mut remarks = Vec::new();
    let mut first_calls: Vec<f64> = report.rows.iter().filter_map(|row| row.first_call_us).collect();
    first_calls.sort_by(f64::total_cmp);
    if let Some(most) = first_calls.last() {
        let (count, median) = (first_calls.len(), first_calls[first_calls.len() / 2]);
        remarks.push(format!(
            "first calls, which compile kernels or read them from disk: {count}, median {:.1} ms, most {:.1} ms",
            1e-3 * median,
            1e-3 * most
        ));
    }
    remarks.extend(report.unsupported.iter().map(|rule| format!("unsupported: {rule}")));
    remarks.extend(report.skipped.iter().map(|size| format!("skipped: {size}")));
    remarks
}
