//! `rmsnorm warm`: compiles kernels in advance and keeps them on disk.

use std::collections::BTreeSet;
use std::time::Instant;

use rmsnorm_bench::{Op, Operation, Shape, problem};
use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cuda::{Gpu, compile_for, nvrtc_version};
use rmsnorm_core::{AnyBackend, DType, Error, GradReduction, HarnessTask, NormBackend, Problem, Tensor};
use rmsnorm_tuning::folder;

use super::bench::{forms, ops};
use crate::args::WarmArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output::print;

/// The largest number of rows. No plan changes above it; the last change is CUDA's, at about
/// 200,000 rows of 8 columns.
const MOST_ROWS: usize = 1 << 20;

/// Compiles for each backend or GPU and prints the time.
pub fn run(args: &WarmArgs) -> Result<(), Failure> {
    let calls = Calls {
        cols: args.cols.iter().map(|cols| cols.get()).collect(),
        operations: Operation::product(
            &backends::norms(&args.norm)?,
            &ops(&args.op, &args.quant)?,
            &forms(&args.form)?,
            &[GradReduction::default()],
        ),
        dtypes: match &args.dtype[..] {
            [] => vec![DType::Bf16],
            names => backends::choose("--dtype", names, &DType::ALL, DType::name)?,
        },
        f32_weight: args.f32_weight,
    };
    if !args.gpu.is_empty() {
        let gpus = backends::choose("--gpu", &args.gpu, &Gpu::ALL, Gpu::name)?;
        let folder = folder::of_user("cuda").ok_or_else(|| {
            Failure::Input("there is no cache folder for the kernels: set RMSNORM_CACHE_DIR to one".into())
        })?;
        for gpu in gpus {
            let seconds = timed(|| compile_for(gpu, &calls.problems(gpu.rows_breakpoints()), &folder))?;
            let (major, minor) = nvrtc_version()?;
            print(&format!("{gpu:<6} ready after {seconds:.1} s, for processes with NVRTC {major}.{minor}\n"))?;
        }
        return Ok(());
    }
    for backend in &opened(&args.backend)? {
        let seconds = timed(|| backend.dispatch_harness(&calls))?;
        print(&format!("{:<6} ready after {seconds:.1} s\n", backend.device()))?;
    }
    Ok(())
}

/// The seconds that `compile` takes.
fn timed(compile: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    compile().map(|()| start.elapsed().as_secs_f64())
}

/// The backends called `names`, or all GPUs if `names` is empty.
fn opened(names: &[String]) -> Result<Vec<AnyBackend>, Failure> {
    let all = || backends::names().into_iter().filter(|name| name != "cpu").collect();
    let names = if names.is_empty() { all() } else { names.to_vec() };
    if names.is_empty() {
        return Err(Failure::Input(
            "this machine has no GPU to compile for: `rmsnorm devices` prints the reason".into(),
        ));
    }
    names.iter().map(|name| backends::open(name, &Default::default())).collect()
}

/// The calls whose kernels are compiled.
struct Calls {
    cols: Vec<usize>,
    operations: Vec<Operation>,
    dtypes: Vec<DType>,
    f32_weight: bool,
}

impl Calls {
    /// Whether this is the backward of a norm whose input may be a sum.
    fn is_of_sum(&self, operation: Operation) -> bool {
        let normalizes_sum = |other: &Operation| {
            matches!(other.op, Op::AddForward | Op::ForwardAddForward | Op::AddQuantizedForward(_))
                && (other.norm, other.form) == (operation.norm, operation.form)
        };
        operation.op == Op::Backward && self.operations.iter().any(normalizes_sum)
    }

    /// At least one call for each kernel, over all numbers of rows. Some calls of backward add the
    /// gradient of a sum, if a chosen operation normalizes one.
    fn problems(&self, rows_breakpoints: &[usize]) -> Vec<Problem> {
        let mut problems = Vec::new();
        for rows in rows(rows_breakpoints) {
            for (&cols, &dtype) in self.cols.iter().flat_map(|cols| self.dtypes.iter().map(move |dtype| (cols, dtype)))
            {
                problems.extend(self.operations.iter().flat_map(|operation| {
                    let problem = problem(*operation, dtype, Shape { rows, cols });
                    let problem = Problem { dtypes: problem.dtypes.widened(self.f32_weight, false), ..problem };
                    let tensors = problem.tensors.with(Tensor::DresidualOut);
                    let of_sum = self.is_of_sum(*operation).then_some(Problem { tensors, ..problem });
                    [problem].into_iter().chain(of_sum)
                }));
            }
        }
        problems
    }
}

/// Numbers of rows: powers of two, and those around each change of a plan.
fn rows(breakpoints: &[usize]) -> BTreeSet<usize> {
    let powers = (0..).map(|exponent| 1 << exponent).take_while(|rows| *rows <= MOST_ROWS);
    let around = breakpoints.iter().flat_map(|&rows| [rows.saturating_sub(1).max(1), rows, rows + 1]);
    powers.chain(around).collect()
}

impl HarnessTask for &Calls {
    type Output = Result<(), Error>;

    fn run<H: Harness>(self, harness: &H) -> Result<(), Error> {
        harness.backend().prepare_all(&self.problems(&harness.rows_breakpoints()))
    }
}

#[cfg(test)]
mod tests {
    use rmsnorm_bench::Form;
    use rmsnorm_core::Norm;

    use super::*;

    #[test]
    fn rows_are_those_of_every_plan() {
        let rows = rows(&[16, 132]);
        assert!([1, 2, 15, 16, 17, 131, 132, 133, 1 << 20].iter().all(|n| rows.contains(n)), "{rows:?}");
        assert_eq!(rows.len(), 21 + 5, "{rows:?}");
    }

    #[test]
    fn calls_are_of_every_length_dtype_and_operation() {
        let calls = Calls {
            cols: vec![64, 4096],
            operations: Operation::product(
                &Norm::USUAL,
                &ops(&[], &[]).unwrap(),
                &[Form::Plain],
                &[GradReduction::default()],
            ),
            dtypes: vec![DType::Bf16, DType::F16],
            f32_weight: true,
        };
        let problems = calls.problems(&[]);
        assert_eq!(problems.len(), 21 * 2 * 2 * 2 * 4);
        let of_sums = problems.iter().filter(|problem| problem.tensors.has(Tensor::DresidualOut));
        assert_eq!(of_sums.count(), problems.len() / 4);
        assert!(problems.iter().all(|problem| problem.dtypes.weight == DType::F32));
        assert!(problems.iter().all(|problem| problem.dtypes.activation == problem.dtypes.residual));
    }
}
