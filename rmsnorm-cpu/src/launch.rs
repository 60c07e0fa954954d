//! Runs a validated call: builds the stages' work from its arguments and splits it over threads.
//! All decisions are in the plan.

use rmsnorm_spec::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, Checked, DTypes, Error, GradReduction, GradStore,
    NormBackend, NormSpec, Problem, ResidualPlacement, Rows, Source, Tensor,
};

use crate::backend::CpuBackend;
use crate::caps::Isa;
use crate::kernel;
use crate::lanes::{Any, In, LANES, Out};
use crate::plan::{self, Plan};
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::Found;
use crate::stages::copy::CopyRange;
use crate::stages::forward::after::{AfterRows, NextNorm};
use crate::stages::forward::parts::PartsRows;
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::reduce_partials::PartialRows;
use crate::stages::{Matrix, MatrixMut, RowStarts};

/// A backend on slices, and the permitted uses of its output views.
pub(crate) trait SliceBackend: NormBackend {
    /// Converts an input view.
    fn input<'a, E: AnyElement>(view: Self::In<'a, E>) -> &'a [E];

    /// Converts an output view that is written and not read before.
    fn out<'a, E: AnyElement>(view: Self::Out<'a, E>) -> Out<'a, E>;

    /// Converts an output view that is read and overwritten, so it must hold values.
    ///
    /// # Errors
    /// `Unsupported` if the view may be uninitialized.
    fn values<'a, E: AnyElement>(view: Self::Out<'a, E>) -> Result<&'a mut [E], Error>;

    /// The first `len` elements of a workspace. Their values do not matter.
    fn workspace(view: Self::Out<'_, f32>, len: usize) -> &mut [f32];
}

/// Runs a validated call.
pub(crate) fn launch<B: SliceBackend>(backend: &CpuBackend, call: AnyCall<'_, '_, B>) -> Result<(), Error> {
    match call {
        AnyCall::Forward(call) => forward(backend, call),
        AnyCall::Backward(call) => backward(backend, call),
        AnyCall::QuantizedForward(call) => quantized_forward(backend, call),
        AnyCall::PartialStatistics(call) => partial_statistics(backend, call),
        AnyCall::ForwardWithStatistics(call) => forward_with_statistics(backend, call),
        AnyCall::PartialBackwardStatistics(call) => partial_backward_statistics(backend, call),
        AnyCall::BackwardWithStatistics(call) => backward_with_statistics(backend, call),
    }
}

fn forward<B: SliceBackend>(backend: &CpuBackend, call: Checked<AnyForward<'_, B>>) -> Result<(), Error> {
    let problem = *call.problem();
    match problem.residual_placement {
        ResidualPlacement::Before => {}
        ResidualPlacement::After => return forward_after::<B>(backend, call),
    }
    let (spec, plan, stride) = (spec_of(&call), plan_here(backend, &problem), call.part_stride());
    let rows = forward_rows::<B>(&spec, &plan, problem.dtypes, call.into_args())?;
    match (problem.parts, rows.x) {
        (count @ 2.., Some(x)) => {
            let work = PartsRows { rows: ForwardRows { x: None, ..rows }, x, first: 0, count, stride };
            spread(backend, plan.tasks, spec.rows, work, PartsRows::split_at, kernel::parts);
        }
        _ => {
            spread(backend, plan.tasks, spec.rows, rows, ForwardRows::split_at, kernel::forward);
        }
    }
    Ok(())
}

/// The rows of a forward call with the residual added before the norm. With several parts, `x` is
/// all of them.
fn forward_rows<'a, B: SliceBackend>(
    spec: &NormSpec,
    plan: &Plan,
    dtypes: DTypes,
    args: AnyForward<'a, B>,
) -> Result<ForwardRows<'a>, Error> {
    let (x, y) = match (args.x, args.y) {
        (Source::Read(x), Some(y)) => (Some(matrix::<B>(x, spec)?), matrix_mut::<B>(y, spec)?),
        (Source::Overwrite(y), _) => (None, overwritten::<B>(y, spec)?),
        // A `Checked` forward call has one of the two; the type system needs the error.
        (Source::Read(_), None) => return Err(Error::Missing { arg: "y", why: "x is not overwritten" }),
    };
    let residual = residual_of::<B>(args.residual, args.residual_out, spec)?;
    Ok(ForwardRows {
        spec: *spec,
        dtypes,
        rows: spec.rows,
        streaming: plan.streaming,
        weight: args.weight.map(numbers::<B>).transpose()?,
        bias: args.bias.map(numbers::<B>).transpose()?,
        x,
        y: Some(y),
        residual,
        mean: args.mean.map(out::<B, f32>).transpose()?,
        rstd: args.rstd.map(out::<B, f32>).transpose()?,
    })
}

/// A residual, and the destination of its sum.
fn residual_of<'a, B: SliceBackend>(
    residual: Option<Source<AnyIn<'a, B>, AnyOut<'a, B>>>,
    residual_out: Option<Rows<AnyOut<'a, B>>>,
    spec: &NormSpec,
) -> Result<Residual<'a>, Error> {
    Ok(match (residual, residual_out) {
        (None, _) => Residual::Absent,
        (Some(Source::Read(residual)), None) => Residual::Read(matrix::<B>(residual, spec)?),
        (Some(Source::Read(residual)), Some(out)) => {
            Residual::ReadWrite(matrix::<B>(residual, spec)?, matrix_mut::<B>(out, spec)?)
        }
        (Some(Source::Overwrite(residual)), _) => Residual::InPlace(overwritten::<B>(residual, spec)?),
    })
}

/// Forward with the residual added after the norm, and optionally the next norm.
fn forward_after<B: SliceBackend>(backend: &CpuBackend, call: Checked<AnyForward<'_, B>>) -> Result<(), Error> {
    let (spec, plan, dtypes) = (spec_of(&call), plan_here(backend, call.problem()), call.problem().dtypes);
    let args = call.into_args();
    let x = match args.x {
        Source::Read(x) => matrix::<B>(x, &spec)?,
        // A `Checked` call reads `x`; the type system needs the error.
        Source::Overwrite(_) => return Err(Error::Unexpected { arg: "x", why: "it is overwritten" }),
    };
    let residual = residual_of::<B>(args.residual, args.residual_out, &spec)?;
    let next = match args.y.is_some() {
        false => None,
        true => Some(NextNorm {
            weight: args.next_weight.map(numbers::<B>).transpose()?,
            bias: args.next_bias.map(numbers::<B>).transpose()?,
            mean: args.next_mean.map(out::<B, f32>).transpose()?,
            rstd: args.next_rstd.map(out::<B, f32>).transpose()?,
        }),
    };
    let rows = ForwardRows {
        spec,
        dtypes,
        rows: spec.rows,
        streaming: plan.streaming,
        weight: args.weight.map(numbers::<B>).transpose()?,
        bias: args.bias.map(numbers::<B>).transpose()?,
        x: Some(x),
        y: args.y.map(|y| matrix_mut::<B>(y, &spec)).transpose()?,
        residual,
        mean: args.mean.map(out::<B, f32>).transpose()?,
        rstd: args.rstd.map(out::<B, f32>).transpose()?,
    };
    spread(backend, plan.tasks, spec.rows, AfterRows { rows, next }, AfterRows::split_at, kernel::after);
    Ok(())
}

/// The plan, with tasks limited to this process's threads.
fn plan_here(backend: &CpuBackend, problem: &Problem) -> Plan {
    let plan = plan::plan(problem, backend.caps());
    Plan { tasks: backend.tasks_here(plan.tasks), reduce_tasks: backend.tasks_here(plan.reduce_tasks), ..plan }
}

/// The spec of the call, changed if a test plants a bug.
fn spec_of<A>(call: &Checked<A>) -> NormSpec {
    let spec = *call.spec();
    #[cfg(feature = "planted")]
    let spec = crate::planted::spoiled(spec, call.problem().direction);
    spec
}

/// The error for a failed allocation of `len` elements of type `E`. A long-running caller can
/// recover from it.
pub(crate) fn no_room<E>(what: &str, len: usize, error: &impl std::fmt::Display) -> Error {
    let bytes = len.saturating_mul(size_of::<E>());
    Error::Device { backend: "cpu", source: format!("cannot allocate {bytes} bytes for the {what}: {error}").into() }
}

/// Refuses the ways to sum weight gradients that this backend lacks.
///
/// # Errors
/// `Unsupported` for locks and atomics.
pub(crate) fn require_partials(problem: &Problem) -> Result<(), Error> {
    match problem.grad_reduction {
        GradReduction::Partials => Ok(()),
        reduction @ (GradReduction::Locks { .. } | GradReduction::Atomics) => {
            let rule = format!("the cpu backend has GradReduction::Partials only, got {reduction:?}");
            Err(Error::Unsupported { rule })
        }
    }
}

fn backward<B: SliceBackend>(backend: &CpuBackend, call: Checked<AnyBackward<'_, B>>) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    run_backward::<B>(backend, &spec, &problem, call.into_args(), None)
}

/// `found`: the numbers of all ranks, if columns are divided among ranks.
fn run_backward<B: SliceBackend>(
    backend: &CpuBackend,
    spec: &NormSpec,
    problem: &Problem,
    args: AnyBackward<'_, B>,
    found: Option<Found<'_>>,
) -> Result<(), Error> {
    require_partials(problem)?;
    let plan = plan_here(backend, problem);
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
    // Converted before anything is written, because it may fail.
    let dweight_sum = args.dweight_sum.map(|sum| sum_of::<B>(sum.typed()?, problem.grad_store)).transpose()?;
    let dbias_sum = args.dbias_sum.map(|sum| sum_of::<B>(sum.typed()?, problem.grad_store)).transpose()?;
    let dweight = args.dweight.map(numbers_out::<B>).transpose()?;
    let dbias = args.dbias.map(numbers_out::<B>).transpose()?;
    let (dweight_partials, dbias_partials) = workspace.split_at_mut(dweight_len);

    let work = BackwardBlocks {
        spec: *spec,
        dtypes: problem.dtypes,
        rows: spec.rows,
        block_rows: plan.block_rows,
        streaming: plan.streaming,
        weight: args.weight.map(numbers::<B>).transpose()?,
        dy: matrix::<B>(args.dy, spec)?,
        x: matrix::<B>(args.x, spec)?,
        mean: args.mean.map(input::<B, f32>).transpose()?,
        rstd: input::<B, f32>(args.rstd)?,
        found,
        dresidual_out: args.dresidual_out.map(|rows| matrix::<B>(rows, spec)).transpose()?,
        dx: matrix_mut::<B>(args.dx, spec)?,
        dresidual: args.dresidual.map(|rows| matrix_mut::<B>(rows, spec)).transpose()?,
        dweight_partials: has_dweight.then_some(&mut *dweight_partials),
        dbias_partials: has_dbias.then_some(&mut *dbias_partials),
    };
    spread(backend, plan.tasks, plan.blocks, work, BackwardBlocks::split_at, kernel::backward);
    let reduce =
        Reduce { backend, tasks: plan.reduce_tasks, accumulates: problem.grad_store == GradStore::Accumulated };
    reduce.run(dweight_partials, dweight);
    reduce.run(dbias_partials, dbias);
    reduce.run(dweight_partials, dweight_sum.map(Out::any));
    reduce.run(dbias_partials, dbias_sum.map(Out::any));
    Ok(())
}

/// The destination of an f32 sum. If the sum is added to it, it must hold values.
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
    fn run(&self, partials: &[f32], gradient: Option<Out<'_, Any>>) {
        let Some(gradient) = gradient else { return };
        let cols = gradient.len();
        let work = PartialRows { partials, cols, first: 0, gradient, accumulates: self.accumulates };
        let split_at = PartialRows::split_at_group;
        spread(self.backend, self.tasks, cols / LANES, work, split_at, kernel::reduce_partials);
    }
}

pub(crate) fn copy(backend: &CpuBackend, work: CopyRange<'_>) {
    let units = work.to.len();
    let tasks = backend.tasks_here(plan::tasks(2 * size_of::<f32>() * units, units, backend.caps()));
    spread(backend, tasks, units, work, CopyRange::split_at, kernel::copy);
}

/// Runs a stage's work of `units` units in `tasks` tasks.
fn spread<K: Send>(
    backend: &CpuBackend,
    tasks: usize,
    units: usize,
    mut work: K,
    split_at: fn(K, usize) -> (K, K),
    kernel: fn(Isa, &mut K),
) {
    let isa = backend.caps().isa;
    if tasks <= 1 {
        // No closure: moving the work into one costs a call of one row tens of nanoseconds.
        return kernel(isa, &mut work);
    }
    backend.install(tasks, || fork(work, units, tasks, &split_at, &|mut work| kernel(isa, &mut work)));
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
    // units * low_tasks / tasks, without overflow of the product.
    let low_units = units / tasks * low_tasks + units % tasks * low_tasks / tasks;
    let (low, high) = split_at(work, low_units);
    rayon::join(
        || fork(low, low_units, low_tasks, split_at, run),
        || fork(high, units - low_units, tasks - low_tasks, split_at, run),
    );
}

/// Converts an input view with a run-time dtype. A `Checked` call's views have its dtypes; the type
/// system needs the error.
fn input<'a, B: SliceBackend, E: AnyElement>(view: AnyIn<'a, B>) -> Result<&'a [E], Error> {
    view.typed().map(B::input)
}

/// Converts an output view with a run-time dtype.
fn out<'a, B: SliceBackend, E: AnyElement>(view: AnyOut<'a, B>) -> Result<Out<'a, E>, Error> {
    view.typed().map(B::out)
}

/// Converts an input view of any float dtype. A `Checked` call has no other here; the type system
/// needs the error.
fn numbers<'a, B: SliceBackend>(view: AnyIn<'a, B>) -> Result<In<'a, Any>, Error> {
    match view {
        AnyIn::F32(view) => Ok(In::from(B::input(view)).any()),
        AnyIn::F16(view) => Ok(In::from(B::input(view)).any()),
        AnyIn::Bf16(view) => Ok(In::from(B::input(view)).any()),
        AnyIn::E4m3(_) | AnyIn::E5m2(_) | AnyIn::Int8(_) | AnyIn::E8m0(_) => {
            input::<B, f32>(view).map(|view| In::from(view).any())
        }
    }
}

/// Converts an output view of any float dtype.
fn numbers_out<'a, B: SliceBackend>(view: AnyOut<'a, B>) -> Result<Out<'a, Any>, Error> {
    match view {
        AnyOut::F32(view) => Ok(B::out(view).any()),
        AnyOut::F16(view) => Ok(B::out(view).any()),
        AnyOut::Bf16(view) => Ok(B::out(view).any()),
        AnyOut::E4m3(_) | AnyOut::E5m2(_) | AnyOut::Int8(_) | AnyOut::E8m0(_) => out::<B, f32>(view).map(Out::any),
    }
}

/// Converts an output view of any float dtype that is overwritten.
fn values<'a, B: SliceBackend>(view: AnyOut<'a, B>) -> Result<Out<'a, Any>, Error> {
    match view {
        AnyOut::F32(view) => B::values(view).map(|values| Out::from(values).any()),
        AnyOut::F16(view) => B::values(view).map(|values| Out::from(values).any()),
        AnyOut::Bf16(view) => B::values(view).map(|values| Out::from(values).any()),
        AnyOut::E4m3(_) | AnyOut::E5m2(_) | AnyOut::Int8(_) | AnyOut::E8m0(_) => out::<B, f32>(view).map(Out::any),
    }
}

fn starts<V>(rows: &Rows<V>, spec: &NormSpec) -> RowStarts {
    RowStarts::of(rows.layout(spec.rows, spec.cols))
}

fn matrix<'a, B: SliceBackend>(rows: Rows<AnyIn<'a, B>>, spec: &NormSpec) -> Result<Matrix<'a, Any>, Error> {
    Ok(Matrix { rows: starts(&rows, spec), data: numbers::<B>(rows.view)? })
}

fn matrix_mut<'a, B: SliceBackend>(rows: Rows<AnyOut<'a, B>>, spec: &NormSpec) -> Result<MatrixMut<'a, Any>, Error> {
    Ok(MatrixMut { rows: starts(&rows, spec), data: numbers_out::<B>(rows.view)? })
}

fn overwritten<'a, B: SliceBackend>(rows: Rows<AnyOut<'a, B>>, spec: &NormSpec) -> Result<MatrixMut<'a, Any>, Error> {
    Ok(MatrixMut { rows: starts(&rows, spec), data: values::<B>(rows.view)? })
}

mod columns;
mod quantized;
mod scales;
#[cfg(test)]
mod tests;

use columns::{backward_with_statistics, forward_with_statistics, partial_backward_statistics, partial_statistics};
use quantized::quantized_forward;
