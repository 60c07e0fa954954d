//! The JSON document that `rmsnorm bench --json` writes and `compare` reads.
//!
//! Fields that older documents do not have are optional.

use std::fmt;
use std::path::Path;

use rmsnorm_core::{AnyBackend, DType, Device, GradReduction};
use serde::{Deserialize, Serialize};

use crate::{BenchError, Form, Mode, Op, Operation, Samples, Shape, Timing, reduction_name};

/// The commit that the program was built from, with a `+` if the tree had uncommitted changes;
/// `unknown` outside a repository.
pub const REVISION: &str =
    git_version::git_version!(args = ["--always", "--dirty=+", "--abbrev=12", "--match="], fallback = "unknown");

/// All measurements of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    /// Program and version.
    pub suite: String,
    /// The day of the run, as in `2026-11-27`. Older documents lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// The machine of the run.
    pub machine: Machine,
    /// A report for each backend.
    pub reports: Vec<Report>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The measured devices, with their drivers and other versions. Older documents have them only
    /// in the reports.
    #[serde(default)]
    pub devices: Vec<String>,
    /// The operating system.
    pub os: String,
    /// The processor's architecture.
    pub arch: String,
    /// The processor's name; `None` if the system does not report it.
    pub processor: Option<String>,
    /// The number of hardware threads.
    pub threads: usize,
}

/// The measurements of one backend.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// The backend's name, such as `cuda:1`.
    pub backend: String,
    /// The device's description.
    pub device: String,
    /// The tuning table of its plans. Older documents do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<String>,
    /// The measurements.
    pub rows: Vec<Measured>,
    /// The rules of `Unsupported` errors.
    #[serde(default)]
    pub unsupported: Vec<String>,
    /// The sizes that were skipped, and the reasons.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// The error that ended the measurement early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// One measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The criterion id, `forward/rms_norm/bf16/4096x1024/cpu`, followed by a reduction that is not
    /// the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `forward`, `add_forward` or `backward`.
    pub op: String,
    /// `rms_norm` or `layer_norm`.
    pub norm: String,
    /// The reduction of the parameters' gradients in backward; `None` in forward.
    pub reduction: Option<String>,
    /// The dtype of all tensors.
    pub dtype: String,
    /// The number of rows.
    pub rows: usize,
    /// The number of elements of a row.
    pub cols: usize,
    /// The timer: a name of [`Mode`].
    #[serde(default)]
    pub mode: String,
    /// The number of input sets that were visited in turn.
    #[serde(default)]
    pub sets: usize,
    /// Whether the sets exceed the caches.
    pub cold: bool,
    /// The fewest bytes that a call must move.
    pub bytes: usize,
    /// The median time of a call, in microseconds.
    pub us: f64,
    /// The 5 % quantile of the time, in microseconds.
    pub us_p5: f64,
    /// The 95 % quantile of the time, in microseconds.
    pub us_p95: f64,
    /// GB/s, from the median.
    pub gbs: f64,
    /// GB/s of the device's copy (one matrix read and one written), which alternated with the
    /// calls.
    pub copy_gbs: f64,
    /// The median time of the copy, in microseconds. Older documents do not have it.
    #[serde(default)]
    pub copy_us: f64,
    /// `gbs / copy_gbs`.
    pub of_copy: f64,
    /// The commit that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The plan that ran, in a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Host time of the first call of these kernels, in microseconds: it compiled them or read them
    /// from disk. `None` if an earlier row ran the same kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_call_us: Option<f64>,
    /// All samples, in microseconds.
    #[serde(default)]
    pub samples_us: Vec<f64>,
}

impl Document {
    /// Reads the document of a file.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a document.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let refuse = |error| {
            BenchError::Input(format!(
                "cannot read {}: it is no report of `rmsnorm bench --json`: {error}",
                path.display()
            ))
        };
        serde_json::from_str(&read_text(path)?).map_err(refuse)
    }

    /// Adds a later run on the same machine. One report has all rows of a backend, device and
    /// tuning table, sorted by operation, columns and rows. A row that was measured again replaces
    /// the earlier one.
    pub fn append(&mut self, later: Document) {
        let devices = &mut self.machine.devices;
        let new = |device: &String| !devices.contains(device);
        let new: Vec<String> = later.machine.devices.into_iter().filter(new).collect();
        devices.extend(new);
        for report in later.reports {
            let of = |report: &Report| (report.backend.clone(), report.device.clone(), report.tuning.clone());
            let is_same = |known: &&mut Report| of(known) == of(&report);
            match self.reports.iter_mut().find(is_same) {
                Some(known) => known.append(report),
                None => self.reports.push(report),
            }
        }
    }
}

impl Report {
    fn append(&mut self, later: Report) {
        let subject = |row: &Measured| {
            let plain = row.op.rsplit_once('.').filter(|(_, name)| Form::ALL.iter().any(|form| form.name() == *name));
            let op = plain.map_or(&*row.op, |(op, _)| op);
            let op = Op::all().iter().position(|known| known.name() == op);
            (row.norm.clone(), op, row.op.clone(), row.dtype.clone(), row.cols, row.rows, row.reduction.clone())
        };
        let again: Vec<_> = later.rows.iter().map(subject).collect();
        self.rows.retain(|row| !again.contains(&subject(row)));
        self.rows.extend(later.rows);
        self.rows.sort_by_cached_key(subject);
        for (known, more) in [(&mut self.unsupported, later.unsupported), (&mut self.skipped, later.skipped)] {
            for line in more {
                if !known.contains(&line) {
                    known.push(line);
                }
            }
        }
        self.failed = later.failed.or(self.failed.take());
    }
}

impl Machine {
    /// Whether both are the same machine, so that one document may have both runs. Devices may
    /// differ.
    pub fn is_same(&self, other: &Machine) -> bool {
        let Machine { devices: _, os, arch, processor, threads } = self;
        (os, arch, processor, threads) == (&other.os, &other.arch, &other.processor, &other.threads)
    }

    /// The current machine, with the devices of these backends.
    pub fn this(backends: &[AnyBackend]) -> Self {
        Machine {
            devices: backends.iter().map(ToString::to_string).collect(),
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            processor: processor(),
            threads: std::thread::available_parallelism().map_or(0, usize::from),
        }
    }
}

/// The machine without its devices: `linux, x86_64, AMD EPYC, 2 threads`.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { devices: _, os, arch, processor, threads } = self;
        write!(f, "{os}, {arch}, {}, {threads} threads", processor.as_deref().unwrap_or("processor unknown"))
    }
}

fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = info.lines().find(|line| line.starts_with("model name"))?.split_once(':')?.1;
    Some(name.trim().to_owned())
}

impl Measured {
    /// The row of an operation with this timing, next to the samples of the copy of one matrix.
    /// Sets, plan and first call are not set.
    pub fn new(
        operation: Operation,
        (dtype, shape): (DType, Shape),
        device: Device,
        timing: &Timing,
        copy: &Samples,
    ) -> Self {
        let (Operation { norm, op, reduction, .. }, samples) = (operation, &timing.samples);
        // Criterion measures the default reduction only, so its ids do not name it.
        let is_default = reduction == GradReduction::default();
        let behind = if is_default { String::new() } else { format!("/{}", reduction_name(reduction)) };
        let bytes = operation.bytes(dtype, shape);
        // One matrix read, one written.
        let copy_bytes = 2 * shape.bytes(dtype);
        let gbs = bytes as f64 / samples.median() * 1e-9;
        let copy_gbs = copy_bytes as f64 / copy.median() * 1e-9;
        Measured {
            id: Some(format!("{}/{device}{behind}", operation.id(dtype, shape))),
            op: operation.name(),
            norm: norm.name().into(),
            reduction: (op == Op::Backward).then(|| reduction_name(reduction).into()),
            dtype: dtype.name().into(),
            rows: shape.rows,
            cols: shape.cols,
            mode: timing.mode.name().into(),
            sets: 1,
            cold: false,
            bytes,
            us: samples.median() * 1e6,
            us_p5: samples.quantile(0.05) * 1e6,
            us_p95: samples.quantile(0.95) * 1e6,
            gbs,
            copy_gbs,
            copy_us: copy.median() * 1e6,
            of_copy: gbs / copy_gbs,
            revision: Some(REVISION.into()),
            plan: None,
            first_call_us: None,
            samples_us: samples.all().iter().map(|seconds| seconds * 1e6).collect(),
        }
    }

    /// The operation, followed by a reduction that is not the default: `backward locks`.
    pub fn name(&self) -> String {
        let default = reduction_name(GradReduction::default());
        let reduction = self.reduction.as_deref().filter(|&reduction| reduction != default);
        reduction.map_or(self.op.clone(), |reduction| format!("{} {reduction}", self.op))
    }

    /// Whether the time includes gaps between launches.
    pub fn has_gaps(&self) -> bool {
        self.mode == Mode::Events.name()
    }
}

/// The text of a file.
///
/// # Errors
/// If it cannot be read as text.
pub(crate) fn read_text(path: &Path) -> Result<String, BenchError> {
    std::fs::read_to_string(path).map_err(|error| BenchError::Input(format!("cannot read {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use rmsnorm_core::Norm;

    use super::*;

    fn row(op: &str, rows: usize, us: f64) -> Measured {
        let text = format!(
            r#"{{"op": "{op}", "norm": "rms_norm", "reduction": null, "dtype": "f32", "rows": {rows}, "cols": 8, "cold": true,
            "bytes": 1, "us": {us}, "us_p5": 1, "us_p95": 1, "gbs": 1, "copy_gbs": 1, "of_copy": 1}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn document(device: &str, rows: Vec<Measured>, skipped: &str) -> Document {
        let report = Report {
            backend: "cuda".into(),
            device: device.into(),
            tuning: None,
            rows,
            unsupported: vec![],
            skipped: vec![skipped.into()],
            failed: None,
        };
        let machine = Machine {
            devices: vec![device.into()],
            os: "linux".into(),
            arch: "x86_64".into(),
            processor: None,
            threads: 2,
        };
        Document { suite: "rmsnorm".into(), date: None, machine, reports: vec![report] }
    }

    #[test]
    fn runs_are_joined_by_device_in_order_and_the_later_row_counts() {
        let mut joined = document("H200", vec![row("backward", 1, 1.0), row("forward", 4, 2.0)], "a");
        joined.append(document(
            "H200",
            vec![row("forward", 4, 3.0), row("add_forward", 1, 4.0), row("forward", 2, 5.0)],
            "a",
        ));
        joined.append(document("A100", vec![row("forward", 1, 6.0)], "b"));
        assert_eq!(joined.machine.devices, ["H200", "A100"]);
        let [first, second] = &joined.reports[..] else { panic!("{:?}", joined.reports) };
        let told: Vec<_> = first.rows.iter().map(|row| (row.op.as_str(), row.rows, row.us)).collect();
        assert_eq!(told, [("forward", 2, 5.0), ("forward", 4, 3.0), ("add_forward", 1, 4.0), ("backward", 1, 1.0)]);
        assert_eq!((first.skipped.len(), second.rows.len()), (1, 1));
    }

    /// Both rates count bytes read and bytes written.
    #[test]
    fn rates_are_of_bytes_that_move() {
        let shape = Shape { rows: 10, cols: 3 };
        let operation = Operation::new(Norm::Rms, Op::Forward);
        let (samples, mode) = (Samples::new(vec![1e-6, 2e-6, 3e-6]), Mode::Wall);
        let copy = Samples::new(vec![1e-6]);
        let row = Measured::new(operation, (DType::F32, shape), Device::Cpu, &Timing { samples, mode }, &copy);
        // x and y, weight, rstd: 292 bytes in 2 us; 240 in 1 us.
        assert!((row.gbs - 0.146).abs() < 1e-9 && (row.copy_gbs - 0.24).abs() < 1e-9, "{row:?}");
        assert!((row.of_copy - 0.146 / 0.24).abs() < 1e-9 && (row.us_p95 - 3.0).abs() < 1e-9, "{row:?}");
    }

    #[test]
    fn machines_are_told_apart_by_all_but_their_devices() {
        let machine = document("H200", vec![], "").machine;
        assert!(machine.is_same(&Machine { devices: vec![], ..machine.clone() }));
        assert!(!machine.is_same(&Machine { threads: 3, ..machine.clone() }));
    }
}
