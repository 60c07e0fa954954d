//! `rmsnorm bench --ranks`: measures the operations of a group of ranks.

use rmsnorm_bench::document::{Machine, REVISION};
use rmsnorm_bench::ranks::{self, Place, RanksCase, RanksOp, RanksRow, SHAPES, measure};
use rmsnorm_bench::{Shape, shapes};
use rmsnorm_core::{AnyBackend, DType, Norm};
use serde::Serialize;

use super::given_shapes;
use crate::args::BenchArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output::{Output, print};

/// The JSON document of `--json`.
#[derive(Serialize)]
struct Report {
    suite: &'static str,
    revision: &'static str,
    machine: Machine,
    rows: Vec<RanksRow>,
}

/// Measures and prints a row for each number of ranks, shape, dtype, norm and implementation.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let json = args.json.as_deref().map(Output::new).transpose()?;
    let to_stdout = matches!(json, Some(Output::Stdout));
    let backend = open(args)?;
    let place = match (backend.as_cpu(), backend.as_cuda()) {
        (Some(cpu), _) => Place::Threads(cpu.clone()),
        (None, Some(_)) => Place::Gpus,
        (None, None) => {
            return Err(Failure::Input("--ranks: expected cpu or cuda, the only backends with ranks".into()));
        }
    };
    let cases = cases(args)?;
    let mut rows = Vec::new();
    for ranks in args.ranks.iter().map(|ranks| ranks.get()) {
        if !to_stdout {
            let plural = if ranks == 1 { "" } else { "s" };
            print(&format!(
                "{ranks} rank{plural} on {backend}\n{:26} {:>5} {:>12} {:>10} {:>10}  way\n",
                "operation", "dtype", "rows x cols", "time, us", "GB/s sent"
            ))?;
        }
        let mut shown = Ok(());
        rows.extend(measure(&place, ranks, &cases, &mut |row| {
            if !to_stdout && shown.is_ok() {
                shown = print(&line(row));
            }
        })?);
        shown?;
    }
    if let Some(output) = json {
        let (suite, machine) = (concat!("rmsnorm ", env!("CARGO_PKG_VERSION")), Machine::this(&[backend]));
        let report = Report { suite, revision: REVISION, machine, rows };
        let text = serde_json::to_string_pretty(&report).map_err(|error| format!("cannot write JSON: {error}"))?;
        output.write(format!("{text}\n").as_bytes())?;
    }
    Ok(())
}

fn line(row: &RanksRow) -> String {
    let RanksRow { op, way, norm, dtype, rows, cols, us, sent, .. } = row;
    let name = format!("{norm} {op}");
    let rate = *sent as f64 / us / 1e3;
    format!("{name:26} {dtype:>5} {:>12} {us:10.2} {rate:10.1}  {way}\n", format!("{rows}x{cols}"))
}

/// The backend that is named, or the first CUDA device, or cpu without one.
fn open(args: &BenchArgs) -> Result<AnyBackend, Failure> {
    match &args.backend[..] {
        [] if backends::names().iter().any(|name| name == "cuda") => backends::open("cuda", &args.cpu),
        [] => backends::open("cpu", &args.cpu),
        [name] => backends::open(name, &args.cpu),
        names => Err(Failure::Input(format!("--ranks: expected one backend, got {}", names.join(",")))),
    }
}

/// The cases, ordered by operation, shape, dtype and norm. The default is the RMS norm of sums over
/// the ranks, in bf16.
fn cases(args: &BenchArgs) -> Result<Vec<RanksCase>, Failure> {
    let ops = if args.op.is_empty() {
        vec![RanksOp::ForwardReduced]
    } else {
        backends::choose("--op", &args.op, &RanksOp::ALL, RanksOp::name)?
    };
    let norms = if args.norm.is_empty() { vec![Norm::Rms] } else { backends::norms(&args.norm)? };
    let dtypes = if args.dtype.is_empty() {
        vec![DType::Bf16]
    } else {
        backends::choose("--dtype", &args.dtype, &DType::ALL, DType::name)?
    };
    let mut given: Vec<Shape> = given_shapes(args)?;
    if given.is_empty() {
        given = SHAPES.iter().map(|name| shapes::named(name)).collect::<Result<Vec<_>, _>>()?.concat();
    }
    if let Some(shape) = given.iter().find(|shape| !ranks::is_measurable(**shape)) {
        let most = ranks::MOST_ELEMENTS;
        return Err(Failure::Input(format!("--shapes: expected 1 to {most} elements on each rank, got {shape}")));
    }
    let mut cases = Vec::new();
    for (&op, &shape) in ops.iter().flat_map(|op| given.iter().map(move |shape| (op, shape))) {
        for (&dtype, &norm) in dtypes.iter().flat_map(|dtype| norms.iter().map(move |norm| (dtype, norm))) {
            cases.push(RanksCase { op, norm, dtype, shape });
        }
    }
    Ok(cases)
}
