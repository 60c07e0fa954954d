//! The document that `rmsnorm bench --json` writes, and that `compare` reads.
//!
//! What documents did not always have is optional, so that old ones can still be read.

use rmsnorm_core::{AnyBackend, Device, GradReduction};
use serde::{Deserialize, Serialize};

use crate::selection::Row;
use crate::{Op, Operation, reduction_name};

/// The commit that the program was built from, with a `+` if files had changed since; `unknown` outside a repository.
pub const REVISION: &str =
    git_version::git_version!(args = ["--always", "--dirty=+", "--abbrev=12", "--match="], fallback = "unknown");

/// All measurements of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    /// Program and version.
    pub suite: String,
    /// What they ran on.
    pub machine: Machine,
    /// A report for each backend.
    pub reports: Vec<Report>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The devices that were measured, with their drivers and other versions. Older documents have them in the reports.
    #[serde(default)]
    pub devices: Vec<String>,
    /// The operating system.
    pub os: String,
    /// The processor's architecture.
    pub arch: String,
    /// The processor's own name, where the system tells it.
    pub processor: Option<String>,
    /// Threads that the system offers.
    pub threads: usize,
}

/// The measurements of one backend.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// Its name, such as `cuda:1`.
    pub backend: String,
    /// What it ran on.
    pub device: String,
    /// The measurements.
    pub rows: Vec<Measured>,
    /// Each rule by which the backend refused a row.
    #[serde(default)]
    pub unsupported: Vec<String>,
    /// The sizes that it does not take, and why.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// What ended the measurement before its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// One measurement.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// As criterion has it: `forward/rms_norm/bf16/4096x1024/cpu`; a reduction that is not the default follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `forward`, `add_forward` or `backward`.
    pub op: String,
    /// `rms_norm` or `layer_norm`.
    pub norm: String,
    /// How backward sums the gradients of parameters; none in forward.
    pub reduction: Option<String>,
    /// The dtype of all tensors.
    pub dtype: String,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// How time was taken.
    #[serde(default)]
    pub mode: String,
    /// Input sets that were visited in turn.
    #[serde(default)]
    pub sets: usize,
    /// Whether they exceed the caches.
    pub cold: bool,
    /// The fewest bytes a call must move.
    pub bytes: usize,
    /// Microseconds of a call, the median.
    pub us: f64,
    /// The same, 5 % of the samples are below.
    pub us_p5: f64,
    /// The same, 5 % of the samples are above.
    pub us_p95: f64,
    /// GB/s, from the median.
    pub gbs: f64,
    /// GB/s of the device's copy, which alternated with the calls: one matrix read and one written.
    pub copy_gbs: f64,
    /// Microseconds of that copy, the median. Older documents lack it.
    #[serde(default)]
    pub copy_us: f64,
    /// Their ratio.
    pub of_copy: f64,
    /// The commit it was measured at, for the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The plan that ran, in a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Every sample, in microseconds.
    #[serde(default)]
    pub samples_us: Vec<f64>,
}

impl Machine {
    /// This machine, with the devices of these backends.
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

fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = info.lines().find(|line| line.starts_with("model name"))?.split_once(':')?.1;
    Some(name.trim().to_owned())
}

impl Measured {
    /// A row that was measured on that device.
    pub fn new(row: &Row, device: Device) -> Self {
        let Operation { norm, op, reduction } = row.operation;
        // Criterion has the default reduction alone.
        let is_default = reduction == GradReduction::default();
        let behind = if is_default { String::new() } else { format!("/{}", reduction_name(reduction)) };
        let id = format!("{}/{device}{behind}", row.operation.id(row.dtype, row.shape));
        Measured {
            id: Some(id),
            op: op.name().into(),
            norm: norm.name().into(),
            reduction: (op == Op::Backward).then(|| reduction_name(reduction).into()),
            dtype: row.dtype.name().into(),
            rows: row.shape.rows,
            cols: row.shape.cols,
            mode: row.mode.name().into(),
            sets: row.sets,
            cold: row.is_cold,
            bytes: row.bytes,
            us: row.samples.median() * 1e6,
            us_p5: row.samples.quantile(0.05) * 1e6,
            us_p95: row.samples.quantile(0.95) * 1e6,
            gbs: row.rate(),
            copy_gbs: row.copy_rate(),
            copy_us: row.copy.median() * 1e6,
            of_copy: row.rate() / row.copy_rate(),
            revision: Some(REVISION.into()),
            plan: Some(row.plan.clone()),
            samples_us: row.samples.all().iter().map(|seconds| seconds * 1e6).collect(),
        }
    }
}
