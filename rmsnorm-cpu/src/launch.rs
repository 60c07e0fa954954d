//! Runs a validated call: builds the stages' work from its arguments and splits it over threads.
//! All decisions are in the plan.

use rmsnorm_spec::{
    AnyBackward, AnyCall, AnyElement, AnyForward, AnyIn, AnyOut, Checked, Error, GradReduction, GradStore, NormBackend,
    NormSpec, Problem, ResidualPlacement, Rows, Slot, Source, Tensor,
};

use crate::backend::CpuBackend;
use crate::caps::Isa;
use crate::lanes::{Any, In, LANES, Out};
use crate::plan::{self, Plan};
use crate::stages::backward::{BackwardBlocks, BackwardRows, Given, Gradients, Partials, Sums};
use crate::stages::copy::CopyRange;
use crate::stages::forward::affine::Vectors;
use crate::stages::forward::after::{AddTo, NextNorm, Store};
use crate::stages::forward::before::{Parts, Summed};
use crate::stages::forward::statistics::{OfRow, Statistic};
use crate::stages::forward::{Rows as ForwardRows, Saved};
use crate::stages::gate::{self, Gate, Then};
use crate::stages::ranks::Found;
use crate::stages::reduce_partials::PartialRows;
use crate::stages::scaled::{Pull, Scaled};
use crate::stages::{Call, Matrix, MatrixMut, RowStarts, Section, Split};
use crate::{kernel, memory};

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
    require_supported(call.problem())?;
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
    let ((this, plan), stride) = (call_and_plan(backend, &call), call.part_stride());
    let (mut args, tasks, rows) = (call.into_args(), plan.tasks, this.spec.rows);
    let gate = gate_of::<B>(args.gate.take(), &this.spec)?;
    let mut work = forward_rows::<B, _>(this, OfRow, args)?;
    work.call = this.in_column_groups();
    let parts = |x| Parts { x, rows: Section { first: 0, len: rows }, count: problem.parts, stride };
    match (gate, problem.parts) {
        (None, 2..) => spread(backend, tasks, rows, work.with_x(parts), kernel::any),
        (None, _) if is_usual(&problem) => spread(backend, tasks, rows, work, kernel::mix),
        (gate, _) => {
            let ([gate, gate_after], weight) = (gate::slots(gate), work.affine.take_first(&work.call.spec));
            let ForwardRows { call, before, statistic, affine, after: then, saved } =
                work.with_x(|of| Scaled { of, gate, weight });
            let work = ForwardRows { call, before, statistic, affine, after: Then { gate: gate_after, then }, saved };
            spread(backend, tasks, rows, work, kernel::any);
        }
    }
    Ok(())
}

/// Whether x and y have one dtype and the weight comes after the norm. Other calls run in the bodies of gates.
fn is_usual(problem: &Problem) -> bool {
    !problem.tensors.is_cast() && !problem.cast_order.is_weight_first()
}

/// Converts a gate.
fn gate_of<'a, B: SliceBackend>(
    z: Option<Rows<AnyIn<'a, B>>>,
    spec: &NormSpec,
) -> Result<Option<(Slot, Gate<'a>)>, Error> {
    // A `Checked` call has both or neither.
    let Some((z, rmsnorm_spec::Gate { activation, slot })) = z.zip(spec.gate) else { return Ok(None) };
    Ok(Some((slot, Gate { z: matrix::<B>(z, spec)?, activation })))
}

/// The rows of a forward call with the residual added before the norm, and y as the output.
fn forward_rows<'a, B: SliceBackend, F: Statistic>(
    call: Call,
    statistic: F,
    args: AnyForward<'a, B>,
) -> Result<ForwardRows<'a, Summed<'a, Matrix<'a>>, Store<'a>, F>, Error> {
    let spec = &call.spec;
    let (x, residual) = match (args.x, args.residual) {
        (Some(x), residual) => (x, residual),
        // The residual stream is normalized alone.
        (None, Some(x)) => (x, None),
        // A `Checked` forward call has one of the two; the type system needs the error.
        (None, None) => return Err(Error::Missing { arg: "x", why: "every call reads it" }),
    };
    let (x, y) = match (x, args.y) {
        (Source::Read(x), Some(y)) => (matrix::<B>(x, spec)?, matrix_mut::<B>(y, spec)?),
        (Source::Overwrite(y), _) => overwritten::<B>(y, spec)?,
        (Source::Read(_), None) => return Err(Error::Missing { arg: "y", why: "x is not overwritten" }),
    };
    let (residual, out) = residual_of::<B>(residual, args.residual_out, spec)?;
    Ok(ForwardRows {
        call,
        before: Summed { x, residual, out },
        statistic,
        affine: vectors::<B>(args.weight, args.bias)?,
        after: Store { y },
        saved: saved::<B>(args.mean, args.rstd)?,
    })
}

/// A residual, and the output of its sum.
fn residual_of<'a, B: SliceBackend>(
    residual: Option<Source<AnyIn<'a, B>, AnyOut<'a, B>>>,
    residual_out: Option<Rows<AnyOut<'a, B>>>,
    spec: &NormSpec,
) -> Result<(Option<Matrix<'a>>, Option<MatrixMut<'a>>), Error> {
    Ok(match residual {
        None => (None, None),
        Some(Source::Read(residual)) => {
            let out = residual_out.map(|out| matrix_mut::<B>(out, spec)).transpose()?;
            (Some(matrix::<B>(residual, spec)?), out)
        }
        Some(Source::Overwrite(residual)) => {
            let (residual, out) = overwritten::<B>(residual, spec)?;
            (Some(residual), Some(out))
        }
    })
}

/// Forward with the residual added after the norm, and optionally the next norm.
fn forward_after<B: SliceBackend>(backend: &CpuBackend, call: Checked<AnyForward<'_, B>>) -> Result<(), Error> {
    let (this, plan) = call_and_plan(backend, &call);
    let (args, spec) = (call.into_args(), &this.spec);
    let x = match args.x {
        Some(Source::Read(x)) => matrix::<B>(x, spec)?,
        // A `Checked` call reads `x`; the type system needs the error.
        Some(Source::Overwrite(_)) | None => return Err(Error::Unexpected { arg: "x", why: "it is overwritten" }),
    };
    let (Some(residual), Some(out)) = residual_of::<B>(args.residual, args.residual_out, spec)? else {
        // A `Checked` call has both; the type system needs the error.
        return Err(Error::Missing { arg: "residual", why: "the norm is added to it" });
    };
    let next = match args.y {
        None => None,
        Some(y) => Some(NextNorm {
            affine: vectors::<B>(args.next_weight, args.next_bias)?,
            store: Store { y: matrix_mut::<B>(y, spec)? },
            saved: saved::<B>(args.next_mean, args.next_rstd)?,
        }),
    };
    let rows = ForwardRows {
        call: this,
        before: x,
        statistic: OfRow,
        affine: vectors::<B>(args.weight, args.bias)?,
        after: AddTo { residual, out, next },
        saved: saved::<B>(args.mean, args.rstd)?,
    };
    spread(backend, plan.tasks, spec.rows, rows, kernel::mix);
    Ok(())
}

/// Converts the vectors of a norm.
fn vectors<'a, B: SliceBackend>(
    weight: Option<AnyIn<'a, B>>,
    bias: Option<AnyIn<'a, B>>,
) -> Result<Vectors<'a>, Error> {
    Ok(Vectors { weight: weight.map(numbers::<B>).transpose()?, bias: bias.map(numbers::<B>).transpose()? })
}

/// Converts the outputs for statistics.
fn saved<'a, B: SliceBackend>(mean: Option<AnyOut<'a, B>>, rstd: Option<AnyOut<'a, B>>) -> Result<Saved<'a>, Error> {
    Ok(Saved { mean: mean.map(out::<B, f32>).transpose()?, rstd: rstd.map(out::<B, f32>).transpose()? })
}

/// The plan, with tasks limited to this process's threads.
fn plan_here(backend: &CpuBackend, problem: &Problem) -> Plan {
    let plan = plan::plan(problem, backend.caps());
    Plan { tasks: backend.tasks_here(plan.tasks), reduce_tasks: backend.tasks_here(plan.reduce_tasks), ..plan }
}

/// The norm of the call and the plan.
fn call_and_plan<A>(backend: &CpuBackend, call: &Checked<A>) -> (Call, Plan) {
    let (spec, plan) = (spec_of(call), plan_here(backend, call.problem()));
    (Call { spec, dtypes: call.problem().dtypes, streaming: plan.streaming, column_groups: 1 }, plan)
}

/// The spec of the call, changed if a test plants a bug.
fn spec_of<A>(call: &Checked<A>) -> NormSpec {
    let spec = *call.spec();
    #[cfg(feature = "planted")]
    let spec = crate::planted::spoiled(spec, call.problem().direction);
    spec
}

/// Refuses calls that this backend lacks.
///
/// # Errors
/// `Unsupported` for locks and atomics, and for groups of columns with parts.
pub(crate) fn require_supported(problem: &Problem) -> Result<(), Error> {
    if problem.parts > 1 && problem.groups > 1 {
        let rule = "the cpu backend has no groups of columns with several parts of x: add the parts first".into();
        return Err(Error::Unsupported { rule });
    }
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
    let (plan, len) = (plan_here(backend, problem), plan::workspace_len(problem));

    let mut allocated;
    let workspace = match args.workspace {
        Some(workspace) => B::workspace(workspace.typed()?, len),
        None => {
            allocated = memory::zeros("workspace", len)?;
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
    let gate = gate_of::<B>(args.gate, spec)?;
    let dgate = args.dgate.map(|rows| matrix_mut::<B>(rows, spec)).transpose()?;

    // Without dx, dresidual is stored in its place.
    let (dx, dresidual) = if args.dx.is_some() { (args.dx, args.dresidual) } else { (args.dresidual, None) };
    let Some(dx) = dx else {
        // A `Checked` call has one of the two; the type system needs the error.
        return Err(Error::Missing { arg: "dx", why: "every call writes it" });
    };

    let call =
        Call { spec: *spec, dtypes: problem.dtypes, streaming: plan.streaming, column_groups: 1 }.in_column_groups();
    let work = BackwardBlocks {
        rows: BackwardRows {
            call,
            dy: matrix::<B>(args.dy, spec)?,
            affine: vectors::<B>(args.weight, args.bias)?,
            x: matrix::<B>(args.x, spec)?,
            given: given_statistics::<B>(args.mean, args.rstd)?,
            found,
        },
        block_rows: plan.block_rows * call.column_groups,
        stream: Gradients {
            dresidual_out: args.dresidual_out.map(|rows| matrix::<B>(rows, spec)).transpose()?,
            dx: matrix_mut::<B>(dx, spec)?,
            dresidual: dresidual.map(|rows| matrix_mut::<B>(rows, spec)).transpose()?,
        },
        partials: Partials {
            dweight: has_dweight.then_some(Sums { sums: &mut *dweight_partials, cols: spec.cols }),
            dbias: has_dbias.then_some(Sums { sums: &mut *dbias_partials, cols: spec.cols }),
        },
    };
    match gate {
        None if is_usual(problem) => spread(backend, plan.tasks, plan.blocks, work, kernel::mix),
        gate => {
            let BackwardBlocks { mut rows, block_rows, stream, partials } = work;
            let ([gate, gate_after], weight) = (gate::slots(gate), rows.affine.take_first(spec));
            let (dgate, dgate_after) = if gate.is_some() { (dgate, None) } else { (None, dgate) };
            let BackwardRows { call, dy, affine, x, given, found } = rows;
            let dy = Pull { of: Scaled { of: dy, gate: gate_after, weight: None }, dgate: dgate_after };
            let x = Pull { of: Scaled { of: x, gate, weight }, dgate };
            let rows = BackwardRows { call, dy, affine, x, given, found };
            let work = BackwardBlocks { rows, block_rows, stream, partials };
            spread(backend, plan.tasks, plan.blocks, work, kernel::any);
        }
    }
    let accumulates = problem.grad_store == GradStore::Accumulated;
    let reduce = Reduce { backend, tasks: plan.reduce_tasks, accumulates };
    reduce.run(dweight_partials, dweight);
    reduce.run(dbias_partials, dbias);
    reduce.run(dweight_partials, dweight_sum.map(Out::any));
    reduce.run(dbias_partials, dbias_sum.map(Out::any));
    Ok(())
}

/// Converts the statistics that forward stored.
fn given_statistics<'a, B: SliceBackend>(mean: Option<AnyIn<'a, B>>, rstd: AnyIn<'a, B>) -> Result<Given<'a>, Error> {
    Ok(Given { mean: mean.map(input::<B, f32>).transpose()?, rstd: input::<B, f32>(rstd)? })
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
        // SAFETY:
        // - contents: `sum_of` has made it of a slice of values if sums are added to it;
        // - memory: both go into one stage, which keeps no slice of the input while it writes.
        let held = self.accumulates.then(|| unsafe { gradient.overwritten() });
        let work = PartialRows { partials, cols, first: 0, gradient, held };
        spread(self.backend, self.tasks, cols / LANES, work, kernel::any);
    }
}

pub(crate) fn copy(backend: &CpuBackend, work: CopyRange<'_>) {
    let units = work.to.len();
    let tasks = backend.tasks_here(plan::tasks(2 * size_of::<f32>() * units, units, backend.caps()));
    spread(backend, tasks, units, work, kernel::any);
}

/// Runs a stage's work of `units` units in `tasks` tasks.
fn spread<K: Split + Send>(backend: &CpuBackend, tasks: usize, units: usize, mut work: K, kernel: fn(Isa, &mut K)) {
    let isa = backend.caps().isa;
    if tasks <= 1 {
        // No closure: moving the work into one costs a call of one row tens of nanoseconds.
        return kernel(isa, &mut work);
    }
    backend.install(tasks, || fork(work, units, tasks, &K::split_at, &|mut work| kernel(isa, &mut work)));
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

/// Matches a view of any float dtype. A `Checked` call has no other here; the type system needs the error, that of a view
/// that is not `$other`.
macro_rules! of_numbers {
    ($any:ident, $view:expr, $name:ident => $made:expr, $other:expr) => {
        match $view {
            $any::F32($name) => $made.map(|made| made.any()),
            $any::F16($name) => $made.map(|made| made.any()),
            $any::Bf16($name) => $made.map(|made| made.any()),
            $name @ ($any::E4m3(_) | $any::E5m2(_) | $any::Int8(_) | $any::E8m0(_)) => {
                $other($name).map(|made| made.any())
            }
        }
    };
}

/// Converts an input view of any float dtype.
fn numbers<'a, B: SliceBackend>(view: AnyIn<'a, B>) -> Result<In<'a, Any>, Error> {
    of_numbers!(AnyIn, view, view => Ok(In::from(B::input(view))), |view| input::<B, f32>(view).map(In::from))
}

/// Converts an output view of any float dtype.
fn numbers_out<'a, B: SliceBackend>(view: AnyOut<'a, B>) -> Result<Out<'a, Any>, Error> {
    of_numbers!(AnyOut, view, view => Ok(B::out(view)), out::<B, f32>)
}

/// Converts an output view of any float dtype that holds values.
fn values<'a, B: SliceBackend>(view: AnyOut<'a, B>) -> Result<Out<'a, Any>, Error> {
    of_numbers!(AnyOut, view, view => B::values(view).map(Out::from), out::<B, f32>)
}

/// The starts of the groups of columns of all rows.
fn starts<V>(rows: &Rows<V>, spec: &NormSpec) -> RowStarts {
    let starts = RowStarts::of(rows.layout(spec.rows, spec.cols));
    // A division would take a tenth of a call of one row.
    if spec.groups == 1 { starts } else { starts.in_column_groups(spec.groups, spec.cols / spec.groups) }
}

fn matrix<'a, B: SliceBackend>(rows: Rows<AnyIn<'a, B>>, spec: &NormSpec) -> Result<Matrix<'a>, Error> {
    Ok(Matrix { rows: starts(&rows, spec), data: numbers::<B>(rows.view)? })
}

fn matrix_mut<'a, B: SliceBackend>(rows: Rows<AnyOut<'a, B>>, spec: &NormSpec) -> Result<MatrixMut<'a>, Error> {
    Ok(MatrixMut { rows: starts(&rows, spec), data: numbers_out::<B>(rows.view)? })
}

/// A matrix that is overwritten, as an input and an output.
fn overwritten<'a, B: SliceBackend>(
    rows: Rows<AnyOut<'a, B>>,
    spec: &NormSpec,
) -> Result<(Matrix<'a>, MatrixMut<'a>), Error> {
    let (rows, data) = (starts(&rows, spec), values::<B>(rows.view)?);
    // SAFETY:
    // - contents: `values` makes it of a slice of values;
    // - memory: both go into one stage, which keeps no slice of the input while it writes.
    let input = unsafe { data.overwritten() };
    Ok((Matrix { data: input, rows }, MatrixMut { data, rows }))
}

mod columns;
mod quantized;
mod scales;
#[cfg(test)]
mod tests;

use columns::{backward_with_statistics, forward_with_statistics, partial_backward_statistics, partial_statistics};
use quantized::quantized_forward;
