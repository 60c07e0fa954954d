//! `rmsnorm bench`: measures operations, and compares them with a copy on the same device.

mod ranks;
pub mod table;

use std::path::Path;

use rmsnorm_bench::document::{Document, Machine, Measured, Report};
use rmsnorm_bench::figure::Figure;
use rmsnorm_bench::ranks::RanksOp;
use rmsnorm_bench::selection::{Outcome, Selection, Shapes, Sweep, admit, measure, sizes};
use rmsnorm_bench::{Form, Op, Quant, REDUCTIONS, Shape, reduction_name};
use rmsnorm_bench::{figure, plot, shapes, side_by_side};
use rmsnorm_core::{AnyBackend, DType, GradReduction, Norm};

use super::compare;
use crate::args::BenchArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output::{Output, OutputFile, print};
use crate::progress::Progress;

/// Measures each backend and prints its table, then all backends side by side with earlier
/// measurements.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    if !args.ranks.is_empty() {
        return ranks::run(args);
    }
    let given = given_shapes(args)?;
    if args.list {
        return print(&given.iter().map(|shape| format!("{shape}\n")).collect::<String>());
    }
    let json = args.json.as_deref().map(Output::new).transpose()?;
    let appended = args.append.as_deref().map(Appended::new).transpose()?;
    let picture = args.plot.as_deref().map(OutputFile::new).transpose()?;
    let selection = selection(args, given)?;
    let earlier = compare::read_all(&args.compare)?;
    let backends = open_all(args)?;
    backends.iter().try_for_each(|backend| admit(backend, &selection))?;
    if picture.is_some() {
        require_points(&backends, &selection, &earlier)?;
    }
    let to_stdout = matches!(json, Some(Output::Stdout));
    let (mut reports, mut failed) = (Vec::new(), None);
    for backend in &backends {
        let mut report = report(backend);
        failed = measured(backend, &selection, !to_stdout, &mut report).err();
        report.failed = failed.as_ref().map(ToString::to_string);
        reports.push(report);
        if failed.is_some() {
            break;
        }
    }
    let suite = concat!("rmsnorm ", env!("CARGO_PKG_VERSION")).to_owned();
    let date = Some(jiff::Timestamp::now().strftime("%F").to_string());
    let document = Document { suite, date, machine: Machine::this(&backends), reports };
    let figures = figure::join_with_earlier(figure::of_document(&document), earlier);
    // The rows that were measured before a failure are kept.
    if document.reports.iter().any(|report| !report.rows.is_empty()) || failed.is_none() {
        match (json, appended) {
            (Some(output), _) => output.write(text(&document)?.as_bytes())?,
            (None, Some(appended)) => appended.write(document)?,
            (None, None) => {}
        }
    }
    if let Some(failure) = failed {
        return Err(failure);
    }
    if !to_stdout && figure::sources(&figures).len() > 1 {
        let table = side_by_side::table(&figures).unwrap_or("no two sources have a shape in common\n".into());
        print(&format!("\n{table}"))?;
    }
    picture.map_or(Ok(()), |file| file.write(&[plot::svg(&figures)?.as_bytes()]))
}

/// A file that measurements are added to.
struct Appended {
    file: OutputFile,
    /// The measurements that it has.
    earlier: Option<Document>,
}

impl Appended {
    /// # Errors
    /// The file cannot be written, or holds something other than measurements of this machine.
    fn new(path: &Path) -> Result<Self, Failure> {
        let file = OutputFile::new(path)?;
        let earlier = path.exists().then(|| Document::read(path)).transpose()?;
        match &earlier {
            Some(Document { machine, .. }) if !machine.is_same(&Machine::this(&[])) => Err(Failure::Input(format!(
                "--append: {} is of another machine: {machine}; pass another file",
                path.display()
            ))),
            Some(_) | None => Ok(Appended { file, earlier }),
        }
    }

    fn write(self, now: Document) -> Result<(), Failure> {
        let document = match self.earlier {
            Some(mut document) => {
                document.append(now);
                document
            }
            None => now,
        };
        self.file.write(&[text(&document)?.as_bytes()])
    }
}

fn text(document: &Document) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(document).map_err(|error| format!("cannot write JSON: {error}"))?;
    Ok(text + "\n")
}

/// The empty report of a backend.
pub fn report(backend: &AnyBackend) -> Report {
    let (name, device, tuning) = (backend.device().to_string(), backend.to_string(), Some(backend.tuning()));
    let (rows, unsupported, skipped) = (Vec::new(), Vec::new(), Vec::new());
    Report { backend: name, device, tuning, rows, unsupported, skipped, failed: None }
}

/// Checks before the measurement that a picture will have enough points.
fn require_points(
    backends: &[AnyBackend],
    selection: &Selection,
    earlier: &[(String, Vec<Figure>)],
) -> Result<(), Failure> {
    let mut now = Vec::new();
    for backend in backends {
        let name = backend.device().to_string();
        for (shape, dtype, is_cold) in sizes(backend, selection)? {
            let planned = |operation| Figure { is_cold, ..Figure::planned(&name, operation, dtype, shape) };
            now.extend(selection.operations().into_iter().map(planned));
        }
    }
    Ok(plot::require(&figure::join_with_earlier(now, earlier.to_vec()))?)
}

/// The measurements of `rmsnorm` without a command, which take a few seconds on each backend.
pub fn brief() -> Selection {
    Selection {
        norms: Norm::USUAL.to_vec(),
        ops: vec![Op::Forward, Op::Backward],
        forms: vec![Form::Plain],
        reductions: vec![GradReduction::default()],
        shapes: Shapes::Two,
        dtypes: vec![DType::F32, DType::Bf16],
        seconds: 0.25,
    }
}

/// Measures a backend, with a table of its own on stdout if `show` is set.
fn measured(backend: &AnyBackend, selection: &Selection, show: bool, report: &mut Report) -> Result<(), Failure> {
    let width = table::width(selection.operations());
    if show {
        print(&format!("{backend}\ntuning: {}\n{}", backend.tuning(), table::heading(width)))?;
    }
    fill(backend, selection, report, &mut |row| if show { print(&table::line(row, width)) } else { Ok(()) })?;
    if show {
        let remarks = table::remarks(report).into_iter().map(|remark| remark + "\n");
        let shares =
            if matches!(selection.shapes, Shapes::Sweeps(..)) { table::shares(&report.rows) } else { String::new() };
        print(&(shares + &table::signs(report.rows.iter()) + &remarks.collect::<String>()))?;
    }
    Ok(())
}

/// Measures a backend into its report. `show` gets each row as soon as it is measured. After a
/// failure the report has the rows until then.
///
/// # Errors
/// If a result is wrong, a call fails, or a row cannot be shown.
pub fn fill(
    backend: &AnyBackend,
    selection: &Selection,
    report: &mut Report,
    show: &mut dyn FnMut(&Measured) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut shown = Ok(());
    let (bar, mut done) = (Progress::new("bench"), 0);
    let skipped = measure(backend, selection, &mut |outcome, total| {
        match outcome {
            Outcome::Measured(row) => {
                if shown.is_ok() {
                    shown = show(&row);
                }
                report.rows.push(*row);
            }
            Outcome::Unsupported(operation, rule) => {
                let rule = format!("{}: {rule}", table::name(operation));
                if !report.unsupported.contains(&rule) {
                    report.unsupported.push(rule);
                }
            }
        }
        done += 1;
        bar.set(done, total);
    })?;
    shown?;
    report.skipped = skipped;
    Ok(())
}

fn selection(args: &BenchArgs, shapes: Vec<Shape>) -> Result<Selection, Failure> {
    let norms = backends::norms(&args.norm)?;
    let (ops, forms) = (ops(&args.op, &args.quant)?, forms(&args.form)?);
    let reductions = if args.reduction.is_empty() {
        vec![GradReduction::default()]
    } else {
        backends::choose("--reduction", &args.reduction, &REDUCTIONS, reduction_name)?
    };
    let dtypes = if args.dtype.is_empty() {
        vec![DType::F32, DType::Bf16]
    } else {
        backends::choose("--dtype", &args.dtype, &DType::ALL, DType::name)?
    };
    let shapes = match (args.sweep.is_empty(), shapes.is_empty()) {
        // A picture shows sweeps, unless shapes are given.
        (true, true) if args.plot.is_some() => Shapes::Sweeps(Sweep::GROWING.to_vec(), args.seed),
        (false, _) => Shapes::Sweeps(backends::choose("--sweep", &args.sweep, &Sweep::ALL, Sweep::name)?, args.seed),
        (true, true) => Shapes::OfDevice,
        (true, false) => Shapes::Given(shapes),
    };
    if !(args.seconds.is_finite() && (0.0..=60.0).contains(&args.seconds)) {
        return Err(Failure::Input(format!("--seconds: expected 0 to 60, got {}", args.seconds)));
    }
    Ok(Selection { norms, ops, forms, reductions, shapes, dtypes, seconds: args.seconds })
}

/// The forms that `--form` names.
pub fn forms(names: &[String]) -> Result<Vec<Form>, Failure> {
    if names.is_empty() { Ok(vec![Form::Plain]) } else { backends::choose("--form", names, &Form::ALL, Form::name) }
}

/// The operations that `--op` and `--quant` name: a quantized operation once for each kind of
/// scales.
pub fn ops(names: &[String], quants: &[String]) -> Result<Vec<Op>, Failure> {
    let all = Op::all();
    let chosen_quants = backends::choose("--quant", quants, &Quant::ALL, Quant::name)?;
    let mut chosen: Vec<Op> = Vec::new();
    if let Some(op) = RanksOp::ALL.into_iter().find(|op| names.iter().any(|name| name == op.name())) {
        return Err(Failure::Input(format!("--op: {} needs a group: pass --ranks N", op.name())));
    }
    for name in names {
        // The message lists each kind once.
        let mut kinds = all.clone();
        kinds.dedup_by_key(|op| op.kind());
        let kind = backends::one_of("--op", name, &kinds, Op::kind)?.kind();
        let is_meant = |op: &&Op| op.kind() == kind && op.quant().is_none_or(|quant| chosen_quants.contains(&quant));
        chosen.extend(all.iter().filter(is_meant));
    }
    if !quants.is_empty() && chosen.iter().all(|op| op.quant().is_none()) {
        return Err(Failure::Input(
            "--quant applies to quantized operations: pass --op quantized_forward or add_quantized_forward".into(),
        ));
    }
    Ok(if names.is_empty() { Op::USUAL.to_vec() } else { chosen })
}

/// The shapes that `--shapes` names.
fn given_shapes(args: &BenchArgs) -> Result<Vec<Shape>, Failure> {
    let named = |name: &String| shapes::named(name).map_err(|error| Failure::Input(format!("--shapes: {error}")));
    Ok(args.shapes.iter().map(named).collect::<Result<Vec<_>, _>>()?.concat())
}

/// The backends to measure. All are opened before the first is measured.
fn open_all(args: &BenchArgs) -> Result<Vec<AnyBackend>, Failure> {
    let names = if args.backend.is_empty() { backends::names() } else { args.backend.clone() };
    names.iter().map(|name| backends::open(name, &args.cpu)).collect()
}
