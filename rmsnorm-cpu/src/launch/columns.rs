//! The two halves of a call whose columns are divided among ranks.

use rmsnorm_spec::{
    AnyBackward, AnyBackwardStatistics, AnyColumnStatistics, AnyForward, Checked, Element, Error, Given, Untyped,
};

use super::{SliceBackend, fork, forward_rows, input, matrix, no_kernel, out, plan_here, run_backward, spec_of};
use crate::backend::CpuBackend;
use crate::kernel;
use crate::lanes::Out;
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::{ColumnsRows, Found, Half, SumsBlocks};
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::{MatrixMut, RowStarts};

pub(crate) fn column_statistics<B: SliceBackend, T: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<AnyColumnStatistics<'_, B>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let args = call.into_args();
    let rows = ForwardRows::<T, T, R> {
        spec,
        rows: spec.rows,
        streaming: false,
        weight: None,
        bias: None,
        x: Some(matrix::<B, T>(args.x, &spec)?),
        y: None,
        residual: match args.residual {
            None => Residual::Absent,
            Some(residual) => Residual::Read(matrix::<B, R>(residual, &spec)?),
        },
        mean: None,
        rstd: None,
    };
    let kernel = kernel::columns().ok_or_else(|| no_kernel(&problem))?;
    run(
        backend,
        plan_here(backend, &problem).tasks,
        kernel,
        ColumnsRows { rows, half: Half::First(out::<B, f32>(args.statistics)?) },
    );
    Ok(())
}

pub(crate) fn forward_given<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<Given<'_, Untyped<B>, AnyForward<'_, B>>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let (args, found) = given(call)?;
    let kernel = kernel::columns().ok_or_else(|| no_kernel(&problem))?;
    let plan = plan_here(backend, &problem);
    let rows = forward_rows::<B, T, W, R>(&spec, &plan, args)?;
    run(backend, plan.tasks, kernel, ColumnsRows { rows, half: Half::Second(found) });
    Ok(())
}

fn run<'a, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    tasks: usize,
    kernel: kernel::Kernel<ColumnsRows<'a, T, W, R>>,
    work: ColumnsRows<'a, T, W, R>,
) {
    let (isa, rows) = (backend.caps().isa, work.rows.rows);
    backend.install(tasks, || fork(work, rows, tasks, &ColumnsRows::split_at, &|work| kernel(isa, work)));
}

pub(crate) fn backward_statistics<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<AnyBackwardStatistics<'_, B>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let args = call.into_args();
    let kernel = kernel::sums().ok_or_else(|| no_kernel(&problem))?;
    let plan = plan_here(backend, &problem);
    let blocks = BackwardBlocks {
        spec,
        rows: spec.rows,
        block_rows: plan.block_rows,
        streaming: false,
        weight: args.weight.map(input::<B, W>).transpose()?,
        dy: matrix::<B, T>(args.dy, &spec)?,
        x: matrix::<B, R>(args.x, &spec)?,
        mean: args.mean.map(input::<B, f32>).transpose()?,
        rstd: input::<B, f32>(args.rstd)?,
        found: None,
        dresidual_out: None,
        dx: MatrixMut { data: Out::none(), rows: RowStarts::strided(spec.cols) },
        dresidual: None,
        dweight_partials: None,
        dbias_partials: None,
    };
    let work = SumsBlocks { blocks, sums: out::<B, f32>(args.statistics)? };
    let isa = backend.caps().isa;
    backend.install(plan.tasks, || {
        fork(work, plan.blocks, plan.tasks, &SumsBlocks::split_at, &|work| kernel(isa, work));
    });
    Ok(())
}

pub(crate) fn backward_given<B: SliceBackend, T: Element, W: Element, R: Element>(
    backend: &CpuBackend,
    call: Checked<Given<'_, Untyped<B>, AnyBackward<'_, B>>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let (args, found) = given(call)?;
    run_backward::<B, T, W, R>(backend, &spec, &problem, args, Some(found))
}

/// The tensors of a second half, and what all ranks have found.
fn given<'g, B: SliceBackend, A>(call: Checked<Given<'g, Untyped<B>, A>>) -> Result<(A, Found<'g>), Error> {
    let (rows, cols) = (call.spec().rows, call.whole_cols() as f32);
    let Given { args, statistics, columns, .. } = call.into_args();
    Ok((args, Found { numbers: input::<B, f32>(statistics)?, columns, cols, rows, first: 0 }))
}
