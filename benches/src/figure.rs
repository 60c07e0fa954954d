//! Measured figures of any source, ours or a published kernel's, as `compare` puts them side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use rmsnorm_core::DType;
use serde::Deserialize;

use crate::BenchError;
use crate::document::{Document, Measured, Report, read_text};
use crate::shapes::MOST_ELEMENTS;
use crate::{Operation, Shape};

/// What is measured: figures of equal subjects compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// `rms_norm` or `layer_norm`; empty for a measurement that only others make, such as a model's training step.
    pub norm: String,
    /// `forward`, `add_forward` or `backward`, followed by the way gradients are summed unless it is the default.
    pub op: String,
    /// The dtype of all tensors.
    pub dtype: String,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl Subject {
    /// Operation and norm as in the ids of criterion: `forward/rms_norm`.
    pub fn operation(&self) -> String {
        format!("{}/{}", self.op, self.norm).trim_end_matches('/').to_owned()
    }

    /// Rows and columns: `4096x1024`.
    pub fn shape(&self) -> String {
        format!("{}x{}", self.rows, self.cols)
    }

    /// The operation in words: `residual + RMS forward`.
    pub fn title(&self) -> String {
        let norm = match self.norm.as_str() {
            "rms_norm" => "RMS",
            "l2_norm" => "L2",
            "l2_norm_clamped" => "clamped L2",
            "layer_norm" => "LayerNorm",
            other => other,
        };
        let (residual, op) = self.op.strip_prefix("add_").map_or(("", self.op.as_str()), |op| ("residual + ", op));
        let op = match op.split_once('.') {
            Some(("quantized_forward", kind)) => format!("to codes, {kind}"),
            Some(_) | None => op.replace("forward_add", "forward + residual").replace('_', " "),
        };
        format!("{residual}{norm} {op}").trim_start().to_owned()
    }
}

/// A figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What is measured.
    pub subject: Subject,
    /// Whose it is: a backend or a library.
    pub source: String,
    /// Whether that is a backend of ours, whose copy alternated with its calls.
    pub is_ours: bool,
    /// What it ran on, where that is told.
    pub device: Option<String>,
    /// Microseconds of a call.
    pub us: f64,
    /// GB/s over the fewest bytes that the operation must move.
    pub gbs: f64,
    /// GB/s of the copy that it is compared with, where the source tells one.
    pub copy_gbs: Option<f64>,
    /// Whether the tensors were outside the caches.
    pub is_cold: bool,
    /// Whether the time holds gaps between launches, so that it is not compared with.
    pub has_gaps: bool,
}

/// An entry of a list of peers' figures. docs/benchmarks.md describes these files.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Machine { machine: PeersMachine },
    Row(Peer),
}

/// What the figures of a list were measured on.
#[derive(Deserialize)]
struct PeersMachine {
    device: String,
    driver: String,
    date: String,
    commit: String,
    versions: BTreeMap<String, String>,
}

/// A figure of a published kernel.
#[derive(Deserialize)]
struct Peer {
    op: String,
    dtype: String,
    #[serde(rename = "M")]
    rows: usize,
    #[serde(rename = "N")]
    cols: usize,
    provider: String,
    ms: Option<f64>,
    gbps: Option<f64>,
    mode: Option<String>,
    error: Option<serde_json::Value>,
}

/// The contents of a file.
#[derive(Debug, Default)]
pub struct Found {
    /// Its figures.
    pub figures: Vec<Figure>,
    /// The machine and the programs that it names.
    pub conditions: Conditions,
}

/// Machines and programs of measurements, in a line: `measured on 2026-11-27 at commit c1b774e: NVIDIA H200; torch 2.11.0`.
#[derive(Debug, Default)]
pub struct Conditions {
    dates: BTreeSet<String>,
    commits: BTreeSet<String>,
    devices: BTreeSet<String>,
    versions: BTreeSet<String>,
}

impl Conditions {
    /// Adds those of another file.
    pub fn extend(&mut self, other: Conditions) {
        let Conditions { dates, commits, devices, versions } = other;
        self.dates.extend(dates);
        self.commits.extend(commits);
        self.devices.extend(devices);
        self.versions.extend(versions);
    }

    fn of_document(document: &Document) -> Self {
        let mut told = Conditions::default();
        told.dates.extend(document.date.clone());
        for report in &document.reports {
            told.devices.insert(format!("{} ({})", report.device, report.backend));
            told.commits.extend(report.rows.iter().filter_map(|row| row.revision.as_deref()).map(short));
        }
        told
    }

    fn of_peers(machine: PeersMachine) -> Self {
        let PeersMachine { device, driver, date, commit, versions } = machine;
        Conditions {
            dates: [date].into(),
            commits: [short(&commit)].into(),
            devices: [format!("{device}, driver {driver} (peers)")].into(),
            versions: versions.into_iter().map(|(name, version)| format!("{name} {version}")).collect(),
        }
    }
}

/// A commit as pages write it. The `+` of a changed tree stays.
fn short(commit: &str) -> String {
    let changed = if commit.ends_with('+') { "+" } else { "" };
    format!("{}{changed}", commit.get(..7).unwrap_or(commit))
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |set: &BTreeSet<String>, by: &str| set.iter().cloned().collect::<Vec<_>>().join(by);
        let Conditions { dates, commits, devices, versions } = self;
        // Older documents lack the date.
        let day = if dates.is_empty() { String::new() } else { format!(" on {}", join(dates, ", ")) };
        let mut lines = vec![format!("measured{day} at commit {}", join(commits, ", "))];
        lines.push(join(devices, "; "));
        if !versions.is_empty() {
            lines.push(join(versions, ", "));
        }
        f.write_str(&lines.join(". "))
    }
}

/// The figures of a file: a document of ours, or a list of peers' rows.
///
/// # Errors
/// If the file cannot be read or is neither of them.
pub fn read(path: &Path) -> Result<Found, BenchError> {
    let text = read_text(path)?;
    let refuse = |why: String| BenchError::Input(format!("cannot read {}: {why}", path.display()));
    let found = parse(&text).map_err(refuse)?;
    match found.figures.iter().find(|figure| !figure.is_sound()) {
        Some(figure) => Err(refuse(format!(
            "its figure of {} by {} has a size or a time that is impossible: {figure:?}",
            figure.subject.operation(),
            figure.source
        ))),
        None => Ok(found),
    }
}

/// The figures of a text, or why there are none.
fn parse(text: &str) -> Result<Found, String> {
    match text.trim_start().chars().next() {
        Some('[') => {
            let refuse = |why: String| format!("it starts as a list of peers' rows, but {why}");
            let entries = serde_json::from_str(text).map_err(|error| refuse(error.to_string()))?;
            of_peers(entries).map_err(refuse)
        }
        Some('{') => {
            let document = serde_json::from_str(text);
            document
                .map(|document| Found {
                    figures: of_document(&document),
                    conditions: Conditions::of_document(&document),
                })
                .map_err(|error| format!("it starts as a report of `rmsnorm bench --json`, but {error}"))
        }
        _ => Err("it is neither a report of `rmsnorm bench --json` nor peers' results".into()),
    }
}

impl Figure {
    /// A figure that is yet to be measured.
    pub fn planned(source: &str, operation: Operation, dtype: DType, shape: Shape) -> Self {
        let Shape { rows, cols } = shape;
        let (norm, op) = (operation.norm.name().into(), operation.name());
        let subject = Subject { norm, op, dtype: dtype.name().into(), rows, cols };
        let (us, gbs, copy_gbs) = (1.0, 1.0, Some(1.0));
        let (source, device) = (source.to_owned(), None);
        Figure { subject, source, is_ours: true, device, us, gbs, copy_gbs, is_cold: true, has_gaps: false }
    }

    /// Whether sizes and numbers are such as a measurement gives.
    fn is_sound(&self) -> bool {
        let Subject { rows, cols, .. } = self.subject;
        let is_positive = |number: f64| number.is_finite() && number > 0.0;
        rows.checked_mul(cols).is_some_and(|elements| (1..=MOST_ELEMENTS).contains(&elements))
            && [Some(self.us), self.copy_gbs].into_iter().flatten().all(is_positive)
            && (is_positive(self.gbs) || self.subject.norm.is_empty())
    }
}

/// The figures of a document.
pub fn of_document(document: &Document) -> Vec<Figure> {
    let of_report = |report: &Report| -> Vec<Figure> {
        // A device's own words do not tell machines apart.
        let device = format!("{}, {}", report.device, document.machine);
        report.rows.iter().map(|row| of_measured(row, &report.backend, &device)).collect()
    };
    document.reports.iter().flat_map(of_report).collect()
}

fn of_measured(row: &Measured, backend: &str, device: &str) -> Figure {
    Figure {
        subject: Subject {
            norm: row.norm.clone(),
            op: row.name(),
            dtype: row.dtype.clone(),
            rows: row.rows,
            cols: row.cols,
        },
        source: backend.into(),
        is_ours: true,
        device: Some(device.into()),
        us: row.us,
        gbs: row.gbs,
        copy_gbs: Some(row.copy_gbs),
        is_cold: row.cold,
        has_gaps: row.has_gaps(),
    }
}

fn of_peers(entries: Vec<Entry>) -> Result<Found, String> {
    let mut found = Found::default();
    let mut rows = Vec::new();
    for entry in entries {
        match entry {
            Entry::Machine { machine } => found.conditions.extend(Conditions::of_peers(machine)),
            Entry::Row(row) => rows.push(row),
        }
    }
    let copy_of = |row: &Peer| {
        let is_copy = |other: &&Peer| {
            other.op == "copy" && (&other.dtype, other.rows, other.cols) == (&row.dtype, row.rows, row.cols)
        };
        rows.iter().find(is_copy).and_then(|copy| copy.gbps)
    };
    // Other figures are compared with the copies, which are no subject themselves.
    for row in rows.iter().filter(|row| row.op != "copy") {
        let subject = row.subject();
        // An operation that we lack may have no bytes to count.
        let gbps = row.gbps.or(subject.norm.is_empty().then_some(0.0));
        let (ms, gbs) = match (row.ms, gbps, &row.error) {
            (Some(ms), Some(gbs), None) => (ms, gbs),
            (_, _, Some(_)) => continue,
            _ => {
                return Err(format!("a row of {} by {} has neither ms and gbps nor an error", row.op, row.provider));
            }
        };
        found.figures.push(Figure {
            subject,
            source: row.provider.clone(),
            is_ours: false,
            device: None,
            us: ms * 1e3,
            gbs,
            copy_gbs: copy_of(row),
            is_cold: true,
            has_gaps: !matches!(row.mode.as_deref(), Some("graph" | "wall")),
        });
    }
    Ok(found)
}

impl Peer {
    /// What it measures. Operations and dtypes that we have get our names.
    fn subject(&self) -> Subject {
        let (norm, op) = match self.op.as_str() {
            "rms_static" => ("rms_norm", "quantized_forward.tensor"),
            "rms_delayed" => ("rms_norm", "quantized_forward.delayed"),
            "rms_static_t" => ("rms_norm", "quantized_forward.transposed"),
            "rms_row" => ("rms_norm", "quantized_forward.row"),
            "rms_block128" => ("rms_norm", "quantized_forward.block128"),
            "rms_mx" => ("rms_norm", "quantized_forward.mx"),
            "rms_current" => ("rms_norm", "quantized_forward.current"),
            "add_rms_static" => ("rms_norm", "add_quantized_forward.tensor"),
            "ln_static" => ("layer_norm", "quantized_forward.tensor"),
            "rms_fwd" => ("rms_norm", "forward"),
            "rms_bwd" => ("rms_norm", "backward"),
            "add_rms_fwd" => ("rms_norm", "add_forward"),
            "ln_fwd" => ("layer_norm", "forward"),
            "ln_bwd" => ("layer_norm", "backward"),
            other => ("", other),
        };
        let dtype = match self.dtype.as_str() {
            "float32" => "f32",
            "float16" => "f16",
            "bfloat16" => "bf16",
            other => other,
        };
        let Peer { rows, cols, .. } = *self;
        Subject { norm: norm.into(), op: op.into(), dtype: dtype.into(), rows, cols }
    }
}

/// Figures of several files. Where a later file has a subject of a source again, or the source on another device, the
/// source gets the file's name behind it, so that a run can be compared with an earlier one. Of a subject that a file has
/// twice, the first counts.
pub fn join(files: Vec<(String, Vec<Figure>)>) -> Vec<Figure> {
    let mut joined: Vec<Figure> = Vec::new();
    for (file, figures) in files {
        for mut own in runs(figures) {
            let Some(source) = own.first().map(|figure| figure.source.clone()) else { continue };
            let clashes = |name: &str| {
                joined.iter().filter(|known| known.source == name).any(|known| {
                    own.iter().any(|figure| known.subject == figure.subject || known.device != figure.device)
                })
            };
            let behind = std::iter::once(format!("{source} ({file})"));
            let counted = (2..).map(|number| format!("{source} ({file} {number})"));
            let mut candidates = std::iter::once(source.clone()).chain(behind).chain(counted);
            let name = candidates.find(|name| !clashes(name)).unwrap_or(source);
            for figure in &mut own {
                figure.source.clone_from(&name);
            }
            joined.extend(own);
        }
    }
    joined
}

/// The figures of each source on each device, every subject once.
fn runs(figures: Vec<Figure>) -> Vec<Vec<Figure>> {
    let mut runs: Vec<Vec<Figure>> = Vec::new();
    for figure in figures {
        let is_same = |first: &Figure| (&first.source, &first.device) == (&figure.source, &figure.device);
        match runs.iter_mut().find(|run| run.first().is_some_and(is_same)) {
            Some(run) if run.iter().any(|known| known.subject == figure.subject) => {}
            Some(run) => run.push(figure),
            None => runs.push(vec![figure]),
        }
    }
    runs
}

/// As [`join`], of this run and earlier files, in which sources that this run has too are always told apart.
pub fn join_with_earlier(now: Vec<Figure>, earlier: Vec<(String, Vec<Figure>)>) -> Vec<Figure> {
    let own: Vec<String> = sources(&now).into_iter().map(str::to_owned).collect();
    let mut files = vec![(String::new(), now)];
    for (file, mut figures) in earlier {
        for figure in figures.iter_mut().filter(|figure| own.contains(&figure.source)) {
            figure.source = format!("{} ({file})", figure.source);
        }
        files.push((file, figures));
    }
    join(files)
}

/// The sources, in the order in which they come.
pub fn sources<'f>(figures: impl IntoIterator<Item = &'f Figure>) -> Vec<&'f str> {
    let mut sources: Vec<&str> = Vec::new();
    for figure in figures {
        if !sources.contains(&figure.source.as_str()) {
            sources.push(&figure.source);
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(source: &str, cols: usize) -> Figure {
        let (norm, op, dtype) = ("rms_norm".into(), "forward".into(), "bf16".into());
        Figure {
            subject: Subject { norm, op, dtype, rows: 8, cols },
            source: source.into(),
            is_ours: true,
            device: None,
            us: 1.0,
            gbs: 1.0,
            copy_gbs: None,
            is_cold: true,
            has_gaps: false,
        }
    }

    #[test]
    fn a_source_that_comes_again_is_named_by_its_file() {
        let first = ("a".to_owned(), vec![figure("cuda", 1), figure("wgpu", 1)]);
        let second = ("b".to_owned(), vec![figure("cuda", 1), figure("cuda", 2), figure("wgpu", 2)]);
        let third = ("b".to_owned(), vec![figure("cuda", 1)]);
        let joined = join(vec![first, second, third]);
        assert_eq!(sources(&joined), ["cuda", "wgpu", "cuda (b)", "cuda (b 2)"]);

        // The same device goes on in another file; another device does not.
        let on = |device: &str, cols| Figure { device: Some(device.into()), ..figure("cuda", cols) };
        let files = [("a", on("H200", 1)), ("b", on("H200", 2)), ("c", on("A100", 4))];
        let joined = join(files.map(|(file, figure)| (file.to_owned(), vec![figure])).into());
        assert_eq!(sources(&joined), ["cuda", "cuda (c)"]);

        // Two devices of one name in a file; a subject that comes twice; and a run that is never mixed with an earlier one.
        let joined = join(vec![("a".into(), vec![on("H200", 1), on("A100", 2), on("H200", 1)])]);
        assert_eq!((sources(&joined), joined.len()), (vec!["cuda", "cuda (a)"], 2));
        let joined = join_with_earlier(vec![on("H200", 1)], vec![("b".into(), vec![on("H200", 2)])]);
        assert_eq!(sources(&joined), ["cuda", "cuda (b)"]);
    }

    #[test]
    fn peers_have_their_own_copy_and_rows_that_failed_are_left_out() {
        let text = r#"[{"machine":{"device":"NVIDIA H200","driver":"580.159.04","date":"2026-11-27","commit":"c1b774e0",
                "versions":{"torch":"2.11.0","quack":"0.6.5"}}},
            {"op":"rms_fwd","dtype":"bfloat16","M":8,"N":4,"provider":"quack","ms":0.5,"gbps":3.0,"mode":"graph"},
            {"op":"rms_fwd","dtype":"bfloat16","M":8,"N":4,"provider":"torch","ms":0.5,"gbps":3.0,"mode":"events"},
            {"op":"rms_fwd","dtype":"bfloat16","M":8,"N":4,"provider":"oneDNN","ms":0.5,"gbps":3.0,"mode":"wall"},
            {"op":"rms_fwd","dtype":"bfloat16","M":8,"N":4,"provider":"liger","error":"no"},
            {"op":"step_llama","dtype":"bfloat16","M":8,"N":4,"provider":"patch","ms":120.0,"mode":"wall"},
            {"op":"copy","dtype":"bfloat16","M":8,"N":4,"provider":"copy","ms":0.4,"gbps":4.0,"mode":"graph"}]"#;
        let Found { figures, conditions } = of_peers(serde_json::from_str(text).unwrap()).unwrap();
        assert_eq!(
            conditions.to_string(),
            "measured on 2026-11-27 at commit c1b774e. NVIDIA H200, driver 580.159.04 (peers). quack 0.6.5, torch 2.11.0"
        );
        assert_eq!(sources(&figures), ["quack", "torch", "oneDNN", "patch"]);
        assert_eq!(figures[3].subject.operation(), "step_llama");
        let told: Vec<_> = figures[..3].iter().map(|f| (f.us, f.copy_gbs, f.has_gaps)).collect();
        assert_eq!(told, [false, true, false].map(|has_gaps| (500.0, Some(4.0), has_gaps)));
    }
}
