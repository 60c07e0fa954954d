//! The two phases of a call with columns divided among ranks.

use rmsnorm_spec::{
    AnyBackward, AnyForward, AnyOut, AnyPartialBackwardStatistics, AnyPartialStatistics, Checked, Direction, Error,
    Untyped, WithStatistics,
};

use super::{
    SliceBackend, call_and_plan, forward_rows, given_statistics, input, matrix, out, run_backward, spec_of, spread,
    vectors,
};
use crate::backend::CpuBackend;
use crate::kernel;
use crate::stages::backward::BackwardRows;
use crate::stages::columns::{BackwardSumsRows, SumsRows};
use crate::stages::forward::before::Summed;
use crate::stages::ranks::Found;
use crate::stages::{MatrixMut, RowStarts, Section};

pub(super) fn partial_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyPartialStatistics<'_, B>>,
) -> Result<(), Error> {
    let (this, plan) = call_and_plan(backend, &call);
    let args = call.into_args();
    let before = Summed {
        x: matrix::<B>(args.x, &this.spec)?,
        residual: args.residual.map(|residual| matrix::<B>(residual, &this.spec)).transpose()?,
        out: None,
    };
    let sums = numbers_of::<B>(args.statistics, this.spec.norm.statistics_len(Direction::Forward))?;
    spread(backend, plan.tasks, this.spec.rows, SumsRows { call: this, before, sums }, kernel::any);
    Ok(())
}

pub(super) fn forward_with_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<WithStatistics<'_, Untyped<B>, AnyForward<'_, B>>>,
) -> Result<(), Error> {
    let (this, plan) = call_and_plan(backend, &call);
    let (args, found) = given(call)?;
    spread(backend, plan.tasks, this.spec.rows, forward_rows::<B, _>(this, found, args)?, kernel::any);
    Ok(())
}

pub(super) fn partial_backward_statistics<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyPartialBackwardStatistics<'_, B>>,
) -> Result<(), Error> {
    let (this, plan) = call_and_plan(backend, &call);
    let args = call.into_args();
    let rows = BackwardRows {
        call: this,
        dy: matrix::<B>(args.dy, &this.spec)?,
        affine: vectors::<B>(args.weight, None)?,
        x: matrix::<B>(args.x, &this.spec)?,
        given: given_statistics::<B>(args.mean, args.rstd)?,
        found: None,
    };
    let sums = numbers_of::<B>(args.statistics, this.spec.norm.statistics_len(Direction::Backward))?;
    spread(backend, plan.tasks, this.spec.rows, BackwardSumsRows { rows, sums }, kernel::any);
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

/// The output of a first phase, `count` numbers per row.
fn numbers_of<'a, B: SliceBackend>(view: AnyOut<'a, B>, count: usize) -> Result<MatrixMut<'a, f32>, Error> {
    Ok(MatrixMut { data: out::<B, f32>(view)?, rows: RowStarts::strided(count) })
}

/// The tensors of a second phase, and the numbers of all ranks.
fn given<'g, B: SliceBackend, A>(call: Checked<WithStatistics<'g, Untyped<B>, A>>) -> Result<(A, Found<'g>), Error> {
    let (rows, divisor) = (call.spec().rows, call.spec().norm.divisor(call.whole_cols()) as f32);
    let WithStatistics { args, statistics, columns, .. } = call.into_args();
    let numbers = input::<B, f32>(statistics)?;
    Ok((args, Found { numbers, columns, divisor, of_rows: rows, rows: Section { first: 0, len: rows } }))
}
