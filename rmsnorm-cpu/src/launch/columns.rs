//! The two phases of a call with columns divided among ranks.

use rmsnorm_spec::{
    AnyBackward, AnyForward, AnyPartialBackwardStatistics, AnyPartialStatistics, Checked, Error, Untyped,
    WithStatistics,
};

use super::{SliceBackend, forward_rows, input, matrix, numbers, out, plan_here, run_backward, spec_of, spread};
use crate::backend::CpuBackend;
use crate::kernel;
use crate::lanes::Out;
use crate::stages::backward::BackwardBlocks;
use crate::stages::columns::{ColumnsRows, Found, Half, SumsBlocks};
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::{MatrixMut, RowStarts};

pub(super) fn partial_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyPartialStatistics<'_, B>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let args = call.into_args();
    let rows = ForwardRows {
        spec,
        dtypes: problem.dtypes,
        rows: spec.rows,
        streaming: false,
        weight: None,
        bias: None,
        x: Some(matrix::<B>(args.x, &spec)?),
        y: None,
        residual: match args.residual {
            None => Residual::Absent,
            Some(residual) => Residual::Read(matrix::<B>(residual, &spec)?),
        },
        mean: None,
        rstd: None,
    };
    let work = ColumnsRows { rows, half: Half::First(out::<B, f32>(args.statistics)?) };
    let tasks = plan_here(backend, &problem).tasks;
    spread(backend, tasks, spec.rows, work, ColumnsRows::split_at, kernel::columns);
    Ok(())
}

pub(super) fn forward_with_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<WithStatistics<'_, Untyped<B>, AnyForward<'_, B>>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let (args, found) = given(call)?;
    let plan = plan_here(backend, &problem);
    let rows = forward_rows::<B>(&spec, &plan, problem.dtypes, args)?;
    let work = ColumnsRows { rows, half: Half::Second(found) };
    spread(backend, plan.tasks, spec.rows, work, ColumnsRows::split_at, kernel::columns);
    Ok(())
}

pub(super) fn partial_backward_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyPartialBackwardStatistics<'_, B>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let args = call.into_args();
    let plan = plan_here(backend, &problem);
    let blocks = BackwardBlocks {
        spec,
        dtypes: problem.dtypes,
        rows: spec.rows,
        block_rows: plan.block_rows,
        streaming: false,
        weight: args.weight.map(numbers::<B>).transpose()?,
        dy: matrix::<B>(args.dy, &spec)?,
        x: matrix::<B>(args.x, &spec)?,
        mean: args.mean.map(input::<B, f32>).transpose()?,
        rstd: input::<B, f32>(args.rstd)?,
        found: None,
        dresidual_out: None,
        dx: MatrixMut { data: Out::none(problem.dtypes.activation), rows: RowStarts::strided(spec.cols) },
        dresidual: None,
        dweight_partials: None,
        dbias_partials: None,
    };
    let work = SumsBlocks { blocks, sums: out::<B, f32>(args.statistics)? };
    spread(backend, plan.tasks, plan.blocks, work, SumsBlocks::split_at, kernel::sums);
    Ok(())
}

pub(super) fn backward_with_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<WithStatistics<'_, Untyped<B>, AnyBackward<'_, B>>>,
) -> Result<(), Error> {
    let (spec, problem) = (spec_of(&call), *call.problem());
    let (args, found) = given(call)?;
    run_backward::<B>(backend, &spec, &problem, args, Some(found))
}

/// The tensors of a second phase, and the numbers of all ranks.
fn given<'g, B: SliceBackend, A>(call: Checked<WithStatistics<'g, Untyped<B>, A>>) -> Result<(A, Found<'g>), Error> {
    let (rows, cols) = (call.spec().rows, call.whole_cols() as f32);
    let WithStatistics { args, statistics, columns, .. } = call.into_args();
    Ok((args, Found { numbers: input::<B, f32>(statistics)?, columns, cols, rows, first: 0 }))
}
