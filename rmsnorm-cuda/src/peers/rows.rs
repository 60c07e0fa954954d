//! Launches of `reduce_forward_rows`: sums over ranks with row owners.

use rmsnorm_dist::{RowShares, check_reduced_rows};
use rmsnorm_spec::{AnyForward, Error, NormSpec, OutputRows, Problem, Tensor};

use super::group::PeerGroup;
use super::launch::{check, enqueue, load};
use crate::backend::CudaBackend;
use crate::launch::{self, Tensors, argument};
use crate::params::Params;
use crate::plan::ranks::Plan;
use crate::plan::reduce_forward_rows::{self, Sends};

/// The rows that a rank owns, and the first rows of tensors that hold only these rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owned {
    /// Rows of each rank; the last ranks may have fewer or none.
    rows_per_rank: usize,
    /// The row of the call that is the first row of the residual, the sum and the statistics.
    first_own: usize,
    /// The row of the call that is the first row of y.
    first_of_y: usize,
    sends: Sends,
}

impl Owned {
    /// For a call with all rows in every tensor.
    pub(super) fn of_whole(group: &PeerGroup, problem: &Problem) -> Self {
        let (_, ranks) = group.place();
        Owned { rows_per_rank: rows_per_rank(problem, ranks), first_own: 0, first_of_y: 0, sends: Sends::H }
    }
}

/// The rows of the first rank, and the most of any rank: the kernel finds owners with it.
fn rows_per_rank(problem: &Problem, ranks: usize) -> usize {
    RowShares { units: problem.rows, unit: problem.cols, ranks }.units(0).len()
}

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
    // In place, y has all rows, because x has.
    let has_own_y = y_rows == OutputRows::Own && problem.has(Tensor::X);
    let owned = Owned {
        rows_per_rank: rows_per_rank(&problem, ranks),
        first_own: own.start,
        first_of_y: if has_own_y { own.start } else { 0 },
        sends: if y_rows == OutputRows::All && ranks > 1 { Sends::Y } else { Sends::Nothing },
    };
    let mut params = tensors.params();
    let plan = plan(group, &problem, launch::access_bytes(&problem, &params))?;
    launch::set_call(&mut params, spec, &problem)?;
    enqueue_owned(group, &params, &plan, owned)
}

/// Compiles and loads the kernels of calls with this problem.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    load(group, &plan(group, problem, launch::access_of(alignment as u64))?.key).map(|_| ())
}

pub(super) fn plan(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Result<Plan, Error> {
    reduce_forward_rows::plan(problem, access_bytes, &group.group, group.backend.kernels().caps())
}

/// Enqueues the launches of a call. `params` must come from a valid call, whose tensors are held.
pub(super) fn enqueue_owned(group: &PeerGroup, params: &Params, plan: &Plan, owned: Owned) -> Result<(), Error> {
    let Owned { rows_per_rank, first_own, first_of_y, sends } = owned;
    let (rows, sends) = ([rows_per_rank, first_own, first_of_y].map(|rows| rows as u64), sends as u32);
    let [rows_of_rank, first_own, first_of_y] = rows.each_ref().map(argument);
    let others = [rows_of_rank, first_own, first_of_y, argument(&sends)];
    // SAFETY:
    // - arguments: three 64-bit numbers and a 32-bit one, which live until the call returns;
    // - tensors: addresses, lengths and strides come from a `Checked` call, and the plan has its
    //   `access_bytes`; in tensors that hold only this rank's rows the kernel accesses those rows
    //   alone, from the first of them on;
    // - slots: the plan is of `group.group`, and its rounds have half of the rows that there is room
    //   for;
    // - order: the caller holds the events.
    unsafe { enqueue(group, plan, rows_per_rank, params, others) }
}
