//! Sums over ranks with the residual divided by rows: `reduce_forward_rows`.

use rmsnorm_dist::{RowShares, check_reduced_rows};
use rmsnorm_spec::{AnyForward, Error, NormSpec, OutputRows, Problem, Tensor};

use super::group::PeerGroup;
use super::launch::{check, enqueue, load};
use crate::backend::CudaBackend;
use crate::launch::{self, Tensors, argument};
use crate::plan::ranks::Plan;
use crate::plan::reduce_forward_rows;

pub(super) fn forward(
    group: &PeerGroup,
    spec: &NormSpec,
    y_rows: OutputRows,
    args: AnyForward<'_, CudaBackend>,
) -> Result<(), Error> {
    let (rank, ranks) = group.place();
    let call = check_reduced_rows(spec, (rank, ranks), y_rows, args)?;
    group.check()?;
    let (problem, (own, y_rows)) = (*call.problem(), call.own_rows());
    let mut tensors = Tensors::new(group.backend.stream(), problem);
    call.visit(&mut tensors)?;
    if problem.rows == 0 {
        return Ok(());
    }
    // The kernel finds owners with it: the rows of the first rank, and the most of any rank.
    let rows_per_rank = RowShares { units: problem.rows, unit: problem.cols, ranks }.units(0).len();
    // In place, y has all rows, because x has.
    let has_own_y = y_rows == OutputRows::Own && problem.has(Tensor::X);
    let first_of_y = if has_own_y { own.start } else { 0 };
    let sends_y = u32::from(y_rows == OutputRows::All && ranks > 1);
    let mut params = tensors.params();
    let plan = plan(group, &problem, launch::access_bytes(&problem, &params))?;
    launch::set_call(&mut params, spec, &problem)?;
    let rows = [rows_per_rank, own.start, first_of_y].map(|rows| rows as u64);
    let [rows_of_rank, first_own, first_of_y] = rows.each_ref().map(argument);
    // SAFETY:
    // - arguments: three 64-bit numbers and a 32-bit one, which live until the call returns;
    // - tensors: addresses, lengths and strides come from a `Checked` call, and the plan has its
    //   `access_bytes`; in tensors that hold only this rank's rows the kernel accesses those rows
    //   alone, from the first of them on;
    // - slots: the plan is of `group.group`, and its rounds have half of the rows that there is room
    //   for;
    // - order: `tensors` holds the events.
    unsafe { enqueue(group, &plan, rows_per_rank, &params, [rows_of_rank, first_own, first_of_y, argument(&sends_y)]) }
}

/// Compiles and loads the kernels of calls with this problem.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    load(group, &plan(group, problem, launch::access_of(alignment as u64))?.key).map(|_| ())
}

fn plan(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Result<Plan, Error> {
    reduce_forward_rows::plan(problem, access_bytes, &group.group, group.backend.kernels().caps())
}
