//! Runs a validated call: builds the stages' work from its arguments and splits it over threads. Takes no decisions;
//! those are in the plan.

use rmsnorm_spec::{
    Backward, Checked, DTypes, Element, Error, Forward, GradReduction, NormSpec, Problem, Rows, Source,
};

use crate::backend::CpuBackend;
use crate::kernel::{self, Kernel};
use crate::lanes::LANES;
use crate::plan::{self, Plan};
use crate::stages::backward::BackwardBlocks;
use crate::stages::copy::CopyRange;
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::reduce_partials::PartialRows;
use crate::stages::{Matrix, MatrixMut};

pub(crate) fn forward<T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<Forward<'_, CpuBackend, T, W, R>>,
) -> Result<(), Error> {
    let (spec, plan) = (spec_of(&call), plan::plan(call.problem(), backend.caps()));
    let kernel = kernel::forward().ok_or_else(|| no_kernel(call.problem()))?;
    let args = call.into_args();
    let cols = spec.cols;
    let (x, y) = match (args.x, args.y) {
        (Source::Read(x), Some(y)) => (Some(matrix(x, cols)), y),
        (Source::Overwrite(y), _) => (None, y),
        // A `Checked` forward call has one of the two; the error is for the type system only.
        (Source::Read(_), None) => return Err(Error::Missing { arg: "y", why: "x is not overwritten" }),
    };
    let residual = match (args.residual, args.residual_out) {
        (None, _) => Residual::Absent,
        (Some(Source::Read(residual)), None) => Residual::Read(matrix(residual, cols)),
        (Some(Source::Read(residual)), Some(out)) => Residual::ReadWrite(matrix(residual, cols), matrix_mut(out, cols)),
        (Some(Source::Overwrite(residual)), _) => Residual::InPlace(matrix_mut(residual, cols)),
    };
    let work = ForwardRows {
        spec,
        rows: spec.rows,
        streaming: plan.streaming,
        weight: args.weight,
        bias: args.bias,
        x,
        y: matrix_mut(y, cols),
        residual,
        mean: args.mean,
        rstd: args.rstd,
    };
    run_forward(backend, kernel, work, &plan);
    Ok(())
}

fn run_forward<'a, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    kernel: Kernel<ForwardRows<'a, T, W, R>>,
    work: ForwardRows<'a, T, W, R>,
    plan: &Plan,
) {
    let (isa, rows) = (backend.caps().isa, work.rows);
    backend.install(plan.tasks, || fork(work, rows, plan.tasks, &ForwardRows::split_at, &|work| kernel(isa, work)));
}

/// What is computed: what was asked for, unless a bug is planted for a test.
fn spec_of<A>(call: &Checked<A>) -> NormSpec {
    let spec = *call.spec();
    #[cfg(feature = "planted")]
    let spec = crate::planted::spoiled(spec, call.problem().direction);
    spec
}

/// The error of a system that gives no memory for this, which a long-running caller may survive.
pub(crate) fn no_room(what: &str, bytes: usize, error: &impl std::fmt::Display) -> Error {
    Error::Device { backend: "cpu", source: format!("no {bytes} bytes of memory for the {what}: {error}").into() }
}

fn no_kernel(problem: &Problem) -> Error {
    let DTypes { activation, weight, residual } = problem.dtypes;
    let rule = format!("the cpu backend has no kernel for {activation} with {weight} weight and {residual} residual");
    Error::Unsupported { rule }
}

pub(crate) fn backward<T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<Backward<'_, CpuBackend, T, W, R>>,
) -> Result<(), Error> {
    match call.problem().grad_reduction {
        GradReduction::Partials => {}
        GradReduction::Locks { .. } | GradReduction::Atomics => {
            let rule =
                format!("the cpu backend has GradReduction::Partials only, got {:?}", call.problem().grad_reduction);
            return Err(Error::Unsupported { rule });
        }
    }
    let (spec, plan) = (spec_of(&call), plan::plan(call.problem(), backend.caps()));
    let kernel = kernel::backward().ok_or_else(|| no_kernel(call.problem()))?;
    let len = plan::workspace_len(call.problem());
    let args = call.into_args();

    let mut allocated = Vec::new();
    let workspace = match args.workspace {
        Some(workspace) => &mut workspace[..len],
        None => {
            allocated.try_reserve_exact(len).map_err(|error| no_room("workspace", len * size_of::<f32>(), &error))?;
            allocated.resize(len, 0.0);
            allocated.as_mut_slice()
        }
    };
    let dweight_len = if args.dweight.is_some() { plan.blocks * spec.cols } else { 0 };
    let (dweight_partials, dbias_partials) = workspace.split_at_mut(dweight_len);

    let work = BackwardBlocks {
        spec,
        rows: spec.rows,
        block_rows: plan.block_rows,
        streaming: plan.streaming,
        weight: args.weight,
        dy: matrix(args.dy, spec.cols),
        x: matrix(args.x, spec.cols),
        mean: args.mean,
        rstd: args.rstd,
        dresidual_out: args.dresidual_out.map(|rows| matrix(rows, spec.cols)),
        dx: matrix_mut(args.dx, spec.cols),
        dweight_partials: args.dweight.is_some().then_some(&mut *dweight_partials),
        dbias_partials: args.dbias.is_some().then_some(&mut *dbias_partials),
    };
    let isa = backend.caps().isa;
    backend.install(plan.tasks, || {
        fork(work, plan.blocks, plan.tasks, &BackwardBlocks::split_at, &|work| kernel(isa, work));
    });
    reduce_partials(backend, dweight_partials, args.dweight, plan.reduce_tasks);
    reduce_partials(backend, dbias_partials, args.dbias, plan.reduce_tasks);
    Ok(())
}

fn reduce_partials<W: Element>(backend: &CpuBackend, partials: &[f32], gradient: Option<&mut [W]>, tasks: usize) {
    let Some(gradient) = gradient else { return };
    let (isa, cols) = (backend.caps().isa, gradient.len());
    let work = PartialRows { partials, cols, first: 0, gradient };
    backend.install(tasks, || {
        let groups = cols / LANES;
        fork(work, groups, tasks, &PartialRows::split_at_group, &|work| kernel::reduce_partials(isa, work));
    });
}

pub(crate) fn copy(backend: &CpuBackend, work: CopyRange<'_>) {
    let (isa, units) = (backend.caps().isa, work.to.len());
    let tasks = plan::tasks(2 * size_of_val(work.to), units, backend.caps());
    backend.install(tasks, || fork(work, units, tasks, &CopyRange::split_at, &|work| kernel::copy(isa, work)));
}

/// Halves `work` of `units` until there are `tasks` pieces, and runs them on the current thread pool.
fn fork<K: Send>(
    work: K,
    units: usize,
    tasks: usize,
    split_at: &(impl Fn(K, usize) -> (K, K) + Sync),
    run: &(impl Fn(K) + Sync),
) {
    if tasks <= 1 || units <= 1 {
        return run(work);
    }
    let low_tasks = tasks / 2;
    // units * low_tasks / tasks, without a product that wraps.
    let low_units = units / tasks * low_tasks + units % tasks * low_tasks / tasks;
    let (low, high) = split_at(work, low_units);
    rayon::join(
        || fork(low, low_units, low_tasks, split_at, run),
        || fork(high, units - low_units, tasks - low_tasks, split_at, run),
    );
}

fn matrix<'a, E: Element>(rows: Rows<&'a [E]>, cols: usize) -> Matrix<'a, E> {
    Matrix { row_stride: rows.stride(cols), data: rows.view }
}

fn matrix_mut<'a, E: Element>(rows: Rows<&'a mut [E]>, cols: usize) -> MatrixMut<'a, E> {
    MatrixMut { row_stride: rows.stride(cols), data: rows.view }
}

#[cfg(test)]
mod tests;
