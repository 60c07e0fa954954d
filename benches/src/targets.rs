//! Target speeds, and the comparison of figures with them. The targets of this project are in
//! `targets.toml`.

use std::collections::BTreeMap;
use std::path::Path;

use rmsnorm_core::{DType, Device, Norm};
use serde::Deserialize;

use crate::document::read_text;
use crate::figure::{Figure, Subject};
use crate::{BenchError, Op, Shape};

/// The file. The comment in `targets.toml` describes the entries.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    target: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    backend: String,
    operations: Vec<String>,
    dtype: String,
    #[serde(default)]
    of_copy: BTreeMap<String, f64>,
    #[serde(default)]
    us: BTreeMap<String, f64>,
    #[serde(default)]
    best_peer: Vec<String>,
    #[serde(default)]
    lengths: Vec<Lengths>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lengths {
    cols: [usize; 2],
    elements: usize,
    of_copy: f64,
}

/// The target of one operation of a backend.
#[derive(Clone, Debug)]
pub struct Target {
    backend: Device,
    /// The name in tables: `rms_norm forward`.
    operation: String,
    dtype: DType,
    shapes: Shapes,
    limit: Limit,
}

#[derive(Clone, Copy, Debug)]
enum Shapes {
    One(Shape),
    Lengths { cols: [usize; 2], elements: usize },
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    /// At least this percentage of the copy's rate.
    OfCopy(f64),
    /// At most this many microseconds.
    Us(f64),
    /// At most the time of the fastest published kernel.
    BestPeer,
}

/// The targets of a file.
///
/// # Errors
/// If the file cannot be read, or has an invalid target.
pub fn read(path: &Path) -> Result<Vec<Target>, BenchError> {
    let refuse = |why: String| BenchError::Input(format!("cannot read {}: {why}", path.display()));
    parse(&read_text(path)?).map_err(refuse)
}

fn parse(text: &str) -> Result<Vec<Target>, String> {
    let file: File = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", 1 + before.matches('\n').count(), error.message())
    })?;
    let mut targets = Vec::new();
    for entry in &file.target {
        let known = targets.len();
        entry.add_to(&mut targets).map_err(|why| format!("a target of {}: {why}", entry.backend))?;
        if targets.len() == known {
            return Err(format!(
                "an entry of {} without a target: add of_copy, us, best_peer or lengths",
                entry.backend
            ));
        }
    }
    Ok(targets)
}

impl Entry {
    fn add_to(&self, targets: &mut Vec<Target>) -> Result<(), String> {
        let backend: Device = self.backend.parse().map_err(|error| format!("{error}"))?;
        let dtype = DType::from_name(&self.dtype)
            .ok_or_else(|| format!("dtype must be f32, f16 or bf16, got {:?}", self.dtype))?;
        let mut limits = Vec::new();
        let shape = |text: &String| text.parse().map(Shapes::One).map_err(|error: BenchError| error.to_string());
        for (text, &percent) in &self.of_copy {
            limits.push((shape(text)?, Limit::OfCopy(positive(percent)?)));
        }
        for (text, &us) in &self.us {
            limits.push((shape(text)?, Limit::Us(positive(us)?)));
        }
        for text in &self.best_peer {
            limits.push((shape(text)?, Limit::BestPeer));
        }
        for &Lengths { cols, elements, of_copy } in &self.lengths {
            if cols[0] == 0 || cols[0] > cols[1] {
                return Err(format!("cols must be the least and the most columns, at least 1, got {cols:?}"));
            }
            limits.push((Shapes::Lengths { cols, elements }, Limit::OfCopy(positive(of_copy)?)));
        }
        for operation in &self.operations {
            let mut names = Norm::ALL
                .iter()
                .flat_map(|norm| Op::all().into_iter().map(|op| format!("{} {}", norm.name(), op.name())));
            let operation = names.find(|name| name == operation).ok_or_else(|| {
                format!("operations must be a norm and an operation, as in \"rms_norm forward\", got {operation:?}")
            })?;
            let target = |&(shapes, limit)| Target { backend, operation: operation.clone(), dtype, shapes, limit };
            targets.extend(limits.iter().map(target));
        }
        Ok(())
    }
}

fn positive(limit: f64) -> Result<f64, String> {
    if limit.is_finite() && limit > 0.0 { Ok(limit) } else { Err(format!("a limit must be above 0, got {limit}")) }
}

impl Shapes {
    fn has(self, Subject { rows, cols, .. }: &Subject) -> bool {
        match self {
            Shapes::One(shape) => (shape.rows, shape.cols) == (*rows, *cols),
            Shapes::Lengths { cols: [least, most], elements } => {
                (least..=most).contains(cols) && rows.saturating_mul(*cols) >= elements
            }
        }
    }
}

/// The comparison of a figure with a target, as text.
struct Verdict {
    measured: String,
    target: String,
    /// The difference; `None` if the target is met.
    missed: Option<String>,
}

impl Target {
    /// Whether the target applies to a figure.
    fn is_for(&self, Figure { subject, source, is_ours, .. }: &Figure) -> bool {
        let Subject { norm, op, dtype, .. } = subject;
        // A source is a backend, its device's number, and a file's name if two files have the same
        // backend.
        let backend = source.split([':', ' ']).next().unwrap_or_default();
        *is_ours
            && backend == self.backend.to_string()
            && format!("{norm} {op}") == self.operation
            && dtype == self.dtype.name()
            && self.shapes.has(subject)
    }

    /// `None` if the figure cannot be compared: it has no copy or warm caches, or there is no peer.
    fn judge(&self, figure: &Figure, all: &[Figure]) -> Option<Verdict> {
        // Differences are rounded as in the table: one that shows as 0 is met.
        let missed = |by: f64, digits: usize, unit: &str| {
            let by = format!("{:.digits$}", by.max(0.0));
            by.parse::<f64>().is_ok_and(|by| by > 0.0).then(|| format!("{by} {unit}"))
        };
        let us = figure.us;
        Some(match self.limit {
            Limit::OfCopy(least) => {
                let percent = 100.0 * figure.gbs / figure.copy_gbs.filter(|_| figure.is_cold)?;
                let (measured, target) = (format!("{percent:.1} % of copy"), format!(">= {least} %"));
                Verdict { measured, target, missed: missed(least - percent, 1, "points") }
            }
            Limit::Us(most) => {
                let (measured, target) = (format!("{us:.2} us"), format!("<= {most} us"));
                Verdict { measured, target, missed: missed(us - most, 2, "us") }
            }
            Limit::BestPeer => {
                let is_peer = |other: &&Figure| !other.is_ours && !other.has_gaps && other.subject == figure.subject;
                let best = all.iter().filter(is_peer).min_by(|a, b| a.us.total_cmp(&b.us))?;
                let (measured, target) = (format!("{us:.2} us"), format!("<= {:.2} us of {}", best.us, best.source));
                Verdict { measured, target, missed: missed(us - best.us, 2, "us") }
            }
        })
    }
}

/// A Markdown table of all figures of this project that have a target, and the number that meet it.
pub fn table(figures: &[Figure], targets: &[Target]) -> String {
    let mut lines = String::new();
    let (mut met, mut judged, mut without) = (0, 0, 0);
    for target in targets {
        let before = judged;
        for figure in figures.iter().filter(|figure| target.is_for(figure)) {
            let Some(verdict) = target.judge(figure, figures) else { continue };
            let Subject { rows, cols, .. } = figure.subject;
            let Target { operation, dtype, .. } = target;
            let Verdict { measured, target, missed } = verdict;
            judged += 1;
            met += usize::from(missed.is_none());
            let outcome = missed.map_or("met".into(), |by| format!("missed by {by}"));
            let source = &figure.source;
            lines +=
                &format!("| {operation} | {dtype} | {rows}x{cols} | {source} | {measured} | {target} | {outcome} |\n");
        }
        without += usize::from(judged == before);
    }
    let head =
        "| operation | dtype | rows x cols | source | measured | target | outcome |\n|---|---|---|---|---|---|---|\n";
    let head = if judged == 0 { "" } else { head };
    let rest = if without == 0 { String::new() } else { format!("; targets without a figure: {without}") };
    format!("{head}{lines}{met} of {judged} figures meet their targets{rest}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(source: &str, rows: usize, cols: usize, us: f64, gbs: f64) -> Figure {
        let subject = Subject { norm: "rms_norm".into(), op: "forward".into(), dtype: "bf16".into(), rows, cols };
        Figure {
            subject,
            source: source.into(),
            is_ours: !source.starts_with("quack"),
            device: None,
            us,
            gbs,
            copy_gbs: Some(1000.0),
            is_cold: true,
            has_gaps: false,
        }
    }

    fn outcomes(figures: &[Figure], body: &str) -> Vec<String> {
        let head = "[[target]]\nbackend = \"cuda\"\noperations = [\"rms_norm forward\"]\ndtype = \"bf16\"\n";
        let table = table(figures, &parse(&format!("{head}{body}")).unwrap());
        table.lines().map(|line| line.rsplit(" | ").next().unwrap().trim_end_matches(" |").to_owned()).collect()
    }

    #[test]
    fn targets_of_the_project_can_be_read() {
        assert!(parse(include_str!("../targets.toml")).unwrap().len() > 50);
    }

    #[test]
    fn a_target_is_missed_by_what_the_table_shows() {
        let of_copy = "of_copy = { 8x64 = 95 }";
        let at = |gbs| outcomes(&[figure("cuda", 8, 64, 1.0, gbs)], of_copy)[2].clone();
        assert_eq!(
            [950.0, 949.6, 949.4, 800.0].map(at),
            ["met", "met", "missed by 0.1 points", "missed by 15.0 points"]
        );
        let us = "us = { 8x64 = 1.6 }";
        let at = |us_measured| outcomes(&[figure("cuda", 8, 64, us_measured, 1.0)], us)[2].clone();
        assert_eq!([1.6, 1.604, 1.61].map(at), ["met", "met", "missed by 0.01 us"]);
    }

    #[test]
    fn the_best_peer_without_gaps_counts() {
        let peer = |us, has_gaps| Figure { has_gaps, ..figure("quack", 8, 64, us, 1.0) };
        let figures = [figure("cuda", 8, 64, 2.0, 1.0), peer(3.0, false), peer(2.5, false), peer(1.0, true)];
        assert_eq!(outcomes(&figures, "best_peer = [\"8x64\"]")[2], "met");
        let table = table(&figures[..1], &parse("[[target]]\nbackend = \"cuda\"\noperations = [\"rms_norm forward\"]\ndtype = \"bf16\"\nbest_peer = [\"8x64\"]").unwrap());
        assert_eq!(table, "0 of 0 figures meet their targets; targets without a figure: 1\n");
    }

    /// Targets do not apply to another backend, another dtype, a peer, warm caches or another
    /// shape.
    #[test]
    fn figures_without_a_target_are_left_out() {
        let lengths = "lengths = [{ cols = [64, 128], elements = 512, of_copy = 95 }]";
        let cached = Figure { is_cold: false, ..figure("cuda", 8, 64, 1.0, 990.0) };
        let mut other = figure("cuda", 8, 64, 1.0, 990.0);
        other.subject.dtype = "f32".into();
        let out =
            [figure("cuda", 8, 129, 1.0, 990.0), figure("cuda", 7, 64, 1.0, 990.0), figure("wgpu", 8, 64, 1.0, 990.0)];
        let out = [&out[..], &[cached, other, figure("quack", 8, 64, 1.0, 990.0)]].concat();
        assert_eq!(outcomes(&out, lengths), ["0 of 0 figures meet their targets; targets without a figure: 1"]);
        // A device's number and a file's name do not change the backend.
        let measured = [figure("cuda:1 (now)", 8, 64, 1.0, 990.0), figure("cuda", 4, 128, 1.0, 940.0)];
        assert_eq!(
            outcomes(&measured, lengths)[2..],
            ["met", "missed by 1.0 points", "1 of 2 figures meet their targets"]
        );
    }

    #[test]
    fn what_nothing_can_be_held_to_is_refused() {
        let entry = |rest: &str| format!("[[target]]\nbackend = \"cuda\"\n{rest}");
        let of = |rest: &str| entry(&format!("operations = [\"rms_norm forward\"]\ndtype = \"bf16\"\n{rest}"));
        let cases = [
            ("[[target]\n".into(), "line 1: "),
            (entry("operations = []\n"), "line 1: missing field `dtype`"),
            (of("us = { 8x64 = 1 }\nbest = 1\n"), "line 6: unknown field `best`"),
            (of(""), "an entry of cuda without a target"),
            (of("us = { 8by64 = 1 }"), "a target of cuda: expected rows x cols as in 4096x1024, got \"8by64\""),
            (of("us = { 8x64 = 0 }"), "a limit must be above 0, got 0"),
            (of("of_copy = { 8x64 = nan }"), "a limit must be above 0, got NaN"),
            (of("lengths = [{ cols = [2, 1], elements = 1, of_copy = 1 }]"), "columns, at least 1, got [2, 1]"),
            (of("us = { 8x64 = 1 }").replace("cuda", "tpu"), "a device is one of cpu, cuda and wgpu, got \"tpu\""),
            (of("us = { 8x64 = 1 }").replace("bf16", "f64"), "dtype must be f32, f16 or bf16, got \"f64\""),
            (of("us = { 8x64 = 1 }").replace("forward", "sideways"), "got \"rms_norm sideways\""),
        ];
        for (text, words) in cases {
            let refused = parse(&text).unwrap_err();
            assert!(refused.contains(words) && refused.lines().count() == 1, "{words:?} is not in {refused:?}");
        }
    }
}
