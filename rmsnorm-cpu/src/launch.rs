//! Runs a validated call: builds the stages' work from its arguments and splits it over threads. Takes no decisions;
//! those are in the plan.

use rmsnorm_spec::{
    AnyBackward, AnyForward, AnyIn, AnyOut, Checked, DTypes, Element, Error, GradReduction, GradStore, NormBackend,
    NormSpec, Problem, ResidualPlacement, Rows, Source, Stored, Tensor,
};

use crate::backend::CpuBackend;
use crate::kernel::{self, Kernel};
use crate::lanes::{LANES, Out};
use crate::plan::{self, Plan};
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::Found;
use crate::stages::copy::CopyRange;
use crate::stages::forward::after::{AfterRows, NextNorm};
use crate::stages::forward::parts::PartsRows;
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::reduce_partials::PartialRows;
use crate::stages::{Matrix, MatrixMut, RowStarts};

/// A backend on slices, and what the views of its outputs may be used for.
pub(crate) trait SliceBackend: NormBackend {
    /// A view that is read.
    fn input<'a, E: Stored>(view: Self::In<'a, E>) -> &'a [E];

    /// A view that is written, and never read before.
    fn out<'a, E: Stored>(view: Self::Out<'a, E>) -> Out<'a, E>;

    /// A view that is overwritten, so that it must hold values.
    ///
    /// # Errors
    /// `Unsupported` if it need not.
    fn values<'a, E: Stored>(view: Self::Out<'a, E>) -> Result<&'a mut [E], Error>;

    /// The first `len` elements of a workspace, with any values.
    fn workspace(view: Self::Out<'_, f32>, len: usize) -> &mut [f32];
}

pub(crate) fn forward<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<AnyForward<'_, B>>,
) -> Result<(), Error> {
    let problem = *call.problem();
    match problem.residual_placement {
        ResidualPlacement::Before => {}
        ResidualPlacement::After => return forward_after::<B, T, W, R>(backend, call),
    }
    let (spec, plan, stride) = (spec_of(&call), plan_here(backend, &problem), call.part_stride());
    let rows = forward_rows::<B, T, W, R>(&spec, &plan, call.into_args())?;
    let (isa, len) = (backend.caps().isa, spec.rows);
    match (problem.parts, rows.x) {
        (count @ 2.., Some(x)) => {
            let kernel = kernel::parts().ok_or_else(|| no_kernel(&problem))?;
            let work = PartsRows { rows: ForwardRows { x: None, ..rows }, x, first: 0, count, stride };
            backend
                .install(plan.tasks, || fork(work, len, plan.tasks, &PartsRows::split_at, &|work| kernel(isa, work)));
        }
        _ => {
            let kernel = kernel::forward().ok_or_else(|| no_kernel(&problem))?;
            run_forward(backend, kernel, rows, &plan);
        }
    }
    Ok(())
}

/// The rows of a forward call that adds the residual before the norm. Of several parts, x is all of them.
fn forward_rows<'a, B: SliceBackend, T: Element, W: Element, R: Element>(
    spec: &NormSpec,
    plan: &Plan,
    args: AnyForward<'a, B>,
) -> Result<ForwardRows<'a, T, W, R>, Error> {
    let (x, y) = match (args.x, args.y) {
        (Source::Read(x), Some(y)) => (Some(matrix::<B, T>(x, spec)?), matrix_mut::<B, T>(y, spec)?),
        (Source::Overwrite(y), _) => (None, overwritten::<B, T>(y, spec)?),
        // A `Checked` forward call has one of the two; the error is for the type system only.
        (Source::Read(_), None) => return Err(Error::Missing { arg: "y", why: "x is not overwritten" }),
    };
    let residual = residual_of::<B, R>(args.residual, args.residual_out, spec)?;
    Ok(ForwardRows {
        spec: *spec,
        rows: spec.rows,
        streaming: plan.streaming,
        weight: args.weight.map(input::<B, W>).transpose()?,
        bias: args.bias.map(input::<B, W>).transpose()?,
        x,
        y: Some(y),
        residual,
        mean: args.mean.map(out::<B, f32>).transpose()?,
        rstd: args.rstd.map(out::<B, f32>).transpose()?,
    })
}

/// A residual, and where its sum goes.
fn residual_of<'a, B: SliceBackend, R: Element>(
    residual: Option<Source<AnyIn<'a, B>, AnyOut<'a, B>>>,
    residual_out: Option<Rows<AnyOut<'a, B>>>,
    spec: &NormSpec,
) -> Result<Residual<'a, R>, Error> {
    Ok(match (residual, residual_out) {
        (None, _) => Residual::Absent,
        (Some(Source::Read(residual)), None) => Residual::Read(matrix::<B, R>(residual, spec)?),
        (Some(Source::Read(residual)), Some(out)) => {
            Residual::ReadWrite(matrix::<B, R>(residual, spec)?, matrix_mut::<B, R>(out, spec)?)
        }
        (Some(Source::Overwrite(residual)), _) => Residual::InPlace(overwritten::<B, R>(residual, spec)?),
    })
}

/// A residual that is added after the norm, and perhaps the next norm.
fn forward_after<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<AnyForward<'_, B>>,
) -> Result<(), Error> {
    let (spec, plan) = (spec_of(&call), plan_here(backend, call.problem()));
    let kernel = kernel::after().ok_or_else(|| no_kernel(call.problem()))?;
    let args = call.into_args();
    let x = match args.x {
        Source::Read(x) => matrix::<B, T>(x, &spec)?,
        // A `Checked` call reads it; the error is for the type system only.
        Source::Overwrite(_) => return Err(Error::Unexpected { arg: "x", why: "it is overwritten" }),
    };
    let residual = residual_of::<B, R>(args.residual, args.residual_out, &spec)?;
    let next = match args.y.is_some() {
        false => None,
        true => Some(NextNorm {
            weight: args.next_weight.map(input::<B, W>).transpose()?,
            bias: args.next_bias.map(input::<B, W>).transpose()?,
            mean: args.next_mean.map(out::<B, f32>).transpose()?,
            rstd: args.next_rstd.map(out::<B, f32>).transpose()?,
        }),
    };
    let rows = ForwardRows {
        spec,
        rows: spec.rows,
        streaming: plan.streaming,
        weight: args.weight.map(input::<B, W>).transpose()?,
        bias: args.bias.map(input::<B, W>).transpose()?,
        x: Some(x),
        y: args.y.map(|y| matrix_mut::<B, T>(y, &spec)).transpose()?,
        residual,
        mean: args.mean.map(out::<B, f32>).transpose()?,
        rstd: args.rstd.map(out::<B, f32>).transpose()?,
    };
    let (isa, rows_len) = (backend.caps().isa, spec.rows);
    backend.install(plan.tasks, || {
        fork(AfterRows { rows, next }, rows_len, plan.tasks, &AfterRows::split_at, &|work| kernel(isa, work));
    });
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

/// The plan, with no more tasks than this process has threads for.
fn plan_here(backend: &CpuBackend, problem: &Problem) -> Plan {
    let plan = plan::plan(problem, backend.caps());
    Plan { tasks: backend.tasks_here(plan.tasks), reduce_tasks: backend.tasks_here(plan.reduce_tasks), ..plan }
}

/// What is computed: what was asked for, unless a bug is planted for a test.
fn spec_of<A>(call: &Checked<A>) -> NormSpec {
    let spec = *call.spec();
    #[cfg(feature = "planted")]
    let spec = crate::planted::spoiled(spec, call.problem().direction);
    spec
}

/// The error of a system that gives no memory for `len` elements of type `E`, which a long-running caller may survive.
pub(crate) fn no_room<E>(what: &str, len: usize, error: &impl std::fmt::Display) -> Error {
    let bytes = len.saturating_mul(size_of::<E>());
    Error::Device { backend: "cpu", source: format!("no {bytes} bytes of memory for the {what}: {error}").into() }
}

fn no_kernel(problem: &Problem) -> Error {
    let DTypes { activation, weight, residual } = problem.dtypes;
    let rule = format!("the cpu backend has no kernel for {activation} with {weight} weight and {residual} residual");
    Error::Unsupported { rule }
}

pub(crate) fn backward<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<AnyBackward<'_, B>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    run_backward::<B, T, W, R>(backend, &spec, &problem, call.into_args(), None)
}

/// `found`: by all ranks, where the columns are divided among ranks.
fn run_backward<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    spec: &NormSpec,
    problem: &Problem,
    args: AnyBackward<'_, B>,
    found: Option<Found<'_>>,
) -> Result<(), Error> {
    match problem.grad_reduction {
        GradReduction::Partials => {}
        GradReduction::Locks { .. } | GradReduction::Atomics => {
            let rule = format!("the cpu backend has GradReduction::Partials only, got {:?}", problem.grad_reduction);
            return Err(Error::Unsupported { rule });
        }
    }
    let plan = plan_here(backend, problem);
    let kernel = kernel::backward().ok_or_else(|| no_kernel(problem))?;
    let len = plan::workspace_len(problem);

    let mut allocated = Vec::new();
    let workspace = match args.workspace {
        Some(workspace) => B::workspace(workspace.typed()?, len),
        None => {
            allocated.try_reserve_exact(len).map_err(|error| no_room::<f32>("workspace", len, &error))?;
            allocated.resize(len, 0.0);
            allocated.as_mut_slice()
        }
    };
    let (has_dweight, has_dbias) = (problem.has(Tensor::Dweight), problem.has(Tensor::Dbias));
    let dweight_len = if has_dweight { plan.blocks * spec.cols } else { 0 };
    // Before anything is written: it may be refused.
    let dweight_sum = args.dweight_sum.map(|sum| sum_of::<B>(sum.typed()?, problem.grad_store)).transpose()?;
    let dbias_sum = args.dbias_sum.map(|sum| sum_of::<B>(sum.typed()?, problem.grad_store)).transpose()?;
    let dweight = args.dweight.map(out::<B, W>).transpose()?;
    let dbias = args.dbias.map(out::<B, W>).transpose()?;
    let (dweight_partials, dbias_partials) = workspace.split_at_mut(dweight_len);

    let work = BackwardBlocks {
        spec: *spec,
        rows: spec.rows,
        block_rows: plan.block_rows,
        streaming: plan.streaming,
        weight: args.weight.map(input::<B, W>).transpose()?,
        dy: matrix::<B, T>(args.dy, spec)?,
        x: matrix::<B, R>(args.x, spec)?,
        mean: args.mean.map(input::<B, f32>).transpose()?,
        rstd: input::<B, f32>(args.rstd)?,
        found,
        dresidual_out: args.dresidual_out.map(|rows| matrix::<B, R>(rows, spec)).transpose()?,
        dx: matrix_mut::<B, T>(args.dx, spec)?,
        dresidual: args.dresidual.map(|rows| matrix_mut::<B, R>(rows, spec)).transpose()?,
        dweight_partials: has_dweight.then_some(&mut *dweight_partials),
        dbias_partials: has_dbias.then_some(&mut *dbias_partials),
    };
    let isa = backend.caps().isa;
    backend.install(plan.tasks, || {
        fork(work, plan.blocks, plan.tasks, &BackwardBlocks::split_at, &|work| kernel(isa, work));
    });
    let reduce =
        Reduce { backend, tasks: plan.reduce_tasks, accumulates: problem.grad_store == GradStore::Accumulated };
    reduce.run(dweight_partials, dweight);
    reduce.run(dbias_partials, dbias);
    reduce.run(dweight_partials, dweight_sum);
    reduce.run(dbias_partials, dbias_sum);
    Ok(())
}

/// Where an f32 sum goes. What it is added to must hold values.
fn sum_of<B: SliceBackend>(view: B::Out<'_, f32>, store: GradStore) -> Result<Out<'_, f32>, Error> {
    match store {
        GradStore::Accumulated => B::values(view).map(Out::from),
        GradStore::Sum | GradStore::Rounded => Ok(B::out(view)),
    }
}

/// The second stage of gradients.
struct Reduce<'b> {
    backend: &'b CpuBackend,
    tasks: usize,
    accumulates: bool,
}

impl Reduce<'_> {
    fn run<W: Element>(&self, partials: &[f32], gradient: Option<Out<'_, W>>) {
        let Some(gradient) = gradient else { return };
        let (isa, cols, tasks) = (self.backend.caps().isa, gradient.len(), self.tasks);
        let work = PartialRows { partials, cols, first: 0, gradient, accumulates: self.accumulates };
        self.backend.install(tasks, || {
            let groups = cols / LANES;
            fork(work, groups, tasks, &PartialRows::split_at_group, &|work| kernel::reduce_partials(isa, work));
        });
    }
}

pub(crate) fn copy(backend: &CpuBackend, work: CopyRange<'_>) {
    let (isa, units) = (backend.caps().isa, work.to.len());
    let tasks = backend.tasks_here(plan::tasks(2 * size_of::<f32>() * units, units, backend.caps()));
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

/// What a view that says its type is read as. A `Checked` call has views of its dtypes; the error is for the type system only.
fn input<'a, B: SliceBackend, E: Stored>(view: AnyIn<'a, B>) -> Result<&'a [E], Error> {
    view.typed().map(B::input)
}

/// What a view that says its type is written as.
fn out<'a, B: SliceBackend, E: Stored>(view: AnyOut<'a, B>) -> Result<Out<'a, E>, Error> {
    view.typed().map(B::out)
}

fn starts<V>(rows: &Rows<V>, spec: &NormSpec) -> RowStarts {
    RowStarts::of(rows.layout(spec.rows, spec.cols))
}

fn matrix<'a, B: SliceBackend, E: Element>(rows: Rows<AnyIn<'a, B>>, spec: &NormSpec) -> Result<Matrix<'a, E>, Error> {
    Ok(Matrix { rows: starts(&rows, spec), data: input::<B, E>(rows.view)? })
}

fn matrix_mut<'a, B: SliceBackend, E: Element>(
    rows: Rows<AnyOut<'a, B>>,
    spec: &NormSpec,
) -> Result<MatrixMut<'a, E>, Error> {
    Ok(MatrixMut { rows: starts(&rows, spec), data: out::<B, E>(rows.view)? })
}

fn overwritten<'a, B: SliceBackend, E: Element>(
    rows: Rows<AnyOut<'a, B>>,
    spec: &NormSpec,
) -> Result<MatrixMut<'a, E>, Error> {
    Ok(MatrixMut { rows: starts(&rows, spec), data: Out::from(B::values(rows.view.typed::<E>()?)?) })
}

mod columns;
mod quantized;
mod scales;
#[cfg(test)]
mod tests;

pub(crate) use columns::{backward_given, backward_statistics, column_statistics, forward_given};
pub(crate) use quantized::quantized_forward;
