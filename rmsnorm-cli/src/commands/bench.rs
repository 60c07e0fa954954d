//! `rmsnorm bench`: forward and backward against this machine's copy bandwidth.

use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::measure::{Op, SHAPES, Shape};
use rmsnorm_core::{AnyBackend, DType, Norm, NormBackend};
use serde_json::{Value, json};

use crate::args::BenchArgs;
use crate::backends::{self, measurable};
use crate::failure::Failure;
use crate::measure::{Row, Selection, measure};
use crate::output::{Output, print};
use crate::progress::Progress;

/// The most elements of a matrix, which then has 256 MiB in f32. There are fourteen of that size, 3.5 GiB: two sets of
/// four, and for the copy two pairs and what they are filled from. A single row takes more, as vectors are as long then.
const MOST_ELEMENTS: usize = 1 << 26;

/// Measures and prints a table.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let json = args.json.as_deref().map(Output::new).transpose()?;
    let selection = selection(args)?;
    let backends = open_all(args)?;
    let to_stdout = matches!(json, Some(Output::Stdout));
    let mut reports = Vec::new();
    for backend in &backends {
        let rows = table(backend, &selection, !to_stdout)?;
        reports.push(json!({
            "backend": backend.name(),
            "device": backend.to_string(),
            "rows": rows.iter().map(as_json).collect::<Vec<_>>(),
        }));
    }
    if let Some(output) = json {
        let document = json!({
            "suite": concat!("rmsnorm ", env!("CARGO_PKG_VERSION")),
            "machine": machine(),
            "reports": reports,
        });
        output.write(format!("{document:#}\n").as_bytes())?;
    }
    Ok(())
}

/// The short table of `rmsnorm` without a command: a few seconds a backend.
pub fn short(backend: &AnyBackend) -> Result<(), Failure> {
    let [first, .., decode] = SHAPES;
    let selection = Selection {
        norms: Norm::ALL.to_vec(),
        ops: vec![Op::Forward, Op::Backward],
        shapes: vec![first, decode],
        dtypes: vec![DType::F32, DType::Bf16],
        seconds: 0.25,
    };
    table(measurable(backend)?, &selection, true).map(drop)
}

fn table(backend: &CpuBackend, selection: &Selection, show: bool) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let mut shown = Ok(());
    let bar = Progress::new("bench");
    if show {
        let op = "operation";
        print(&format!(
            "{backend}\n{op:24} {:>5} {:>12} {:>10} {:>7} {:>7} {:>8}\n",
            "dtype", "rows x cols", "us", "GB/s", "copy", "of copy"
        ))?;
    }
    measure(backend, selection, &mut |row| {
        if show && shown.is_ok() {
            shown = print(&line(&row));
        }
        rows.push(row);
        bar.set(rows.len(), selection.len());
    })?;
    shown?;
    if show && rows.iter().any(|row| !row.is_cold) {
        print("* one input set, from the cache: read the time, not the rate\n")?;
    }
    Ok(rows)
}

fn line(row: &Row) -> String {
    let name = format!("{} {}", row.norm.name(), row.op.name());
    let shape = row.shape;
    let us = row.samples.median() * 1e6;
    let decimals = if us < 100.0 { 2 } else { 0 };
    let dtype = row.dtype.name();
    let rates = if row.is_cold {
        let (rate, copy) = (row.rate(), row.copy_rate());
        format!("{rate:7.1} {copy:7.1} {:7.0}%", 100.0 * rate / copy)
    } else {
        format!("{:7.1} {:>7} {:>8}", row.rate(), "-", "*")
    };
    format!("{name:24} {dtype:>5} {shape:>12} {us:10.decimals$} {rates}\n")
}

fn as_json(row: &Row) -> Value {
    json!({
        "op": row.op.name(),
        "norm": row.norm.name(),
        "dtype": row.dtype.name(),
        "rows": row.shape.rows,
        "cols": row.shape.cols,
        "cold": row.is_cold,
        "bytes": row.bytes,
        "us": row.samples.median() * 1e6,
        "us_p5": row.samples.quantile(0.05) * 1e6,
        "us_p95": row.samples.quantile(0.95) * 1e6,
        "gbs": row.rate(),
        "copy_gbs": row.copy_rate(),
        "of_copy": row.rate() / row.copy_rate(),
        "samples_us": row.samples.all().iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>(),
    })
}

fn machine() -> Value {
    json!({
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
        "processor": processor(),
        "threads": std::thread::available_parallelism().map_or(0, usize::from),
    })
}

/// The processor's own name, where the system tells it.
fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = info.lines().find(|line| line.starts_with("model name"))?.split_once(':')?.1;
    Some(name.trim().to_owned())
}

fn selection(args: &BenchArgs) -> Result<Selection, Failure> {
    let norms = choose("--norm", &args.norm, &Norm::ALL, Norm::name)?;
    let ops = choose("--op", &args.op, &Op::ALL, Op::name)?;
    let dtypes = if args.dtype.is_empty() {
        vec![DType::F32, DType::Bf16]
    } else {
        choose("--dtype", &args.dtype, &DType::ALL, DType::name)?
    };
    let shapes = args.shapes.iter().map(|text| parse_shape(text)).collect::<Result<Vec<_>, _>>()?;
    let shapes = if shapes.is_empty() { SHAPES.to_vec() } else { shapes };
    if !(args.seconds.is_finite() && (0.0..=60.0).contains(&args.seconds)) {
        return Err(Failure::Input(format!("--seconds: expected 0 to 60, got {}", args.seconds)));
    }
    Ok(Selection { norms, ops, shapes, dtypes, seconds: args.seconds })
}

/// The values of those names, or all of them where none is named.
fn choose<V: Copy>(
    flag: &str,
    names: &[String],
    all: &[V],
    name_of: impl Fn(V) -> &'static str,
) -> Result<Vec<V>, Failure> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    names.iter().map(|name| backends::one_of(flag, name, all, &name_of)).collect()
}

fn parse_shape(text: &str) -> Result<Shape, Failure> {
    let wrong = |why: &str| Failure::Input(format!("--shapes: {why}, got {text:?}"));
    let (rows, cols) = text.split_once('x').ok_or_else(|| wrong("expected rows x cols as in 4096x1024"))?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong("expected rows x cols as in 4096x1024"));
    let shape = Shape { rows: number(rows)?, cols: number(cols)? };
    match shape.rows.checked_mul(shape.cols) {
        Some(1..=MOST_ELEMENTS) => Ok(shape),
        Some(0) => Err(wrong("rows and cols must be at least 1")),
        Some(_) | None => Err(wrong(&format!("at most {MOST_ELEMENTS} elements can be measured"))),
    }
}

/// The backends to measure, each opened before the first is measured.
fn open_all(args: &BenchArgs) -> Result<Vec<CpuBackend>, Failure> {
    let names = if args.backend.is_empty() { backends::names() } else { args.backend.clone() };
    names.iter().map(|name| measurable(&backends::open(name, &args.cpu)?).cloned()).collect()
}
