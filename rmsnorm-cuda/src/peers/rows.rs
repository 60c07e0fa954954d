//! Launches of `reduce_forward_rows`: sums over ranks with row owners.

use cudarc::driver::sys;
use rmsnorm_dist::{RowShares, check_reduced_rows};
use rmsnorm_spec::{AnyForward, Error, NormSpec, OutputRows, Problem, Tensor};

use super::group::PeerGroup;
use super::launch::{check, load};
use crate::backend::CudaBackend;
use crate::caps::Arch;
use crate::error::device_error;
use crate::launch::{self, Launch, Tensors};
use crate::params::{Packed, Params};
use crate::plan::ranks::{Plan, Round};
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
    // Reports an earlier error that cudarc could not return, for example in its waits for events.
    group.backend.stream().context().bind_to_thread().map_err(device_error("before the launch"))?;
    let plan = plan(group, &problem, launch::access_bytes(&problem, &params))?;
    launch::set_call(&mut params, spec, &problem)?;
    enqueue(group, &params, &plan, owned)
}

/// Compiles and loads the kernels of calls with this problem.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    let plan = plan(group, problem, launch::access_of(alignment as u64))?;
    group.backend.stream().context().bind_to_thread().map_err(device_error("before a kernel is loaded"))?;
    load(group.backend.kernels(), &plan.key).map(|_| ())
}

pub(super) fn plan(group: &PeerGroup, problem: &Problem, access_bytes: u32) -> Result<Plan, Error> {
    reduce_forward_rows::plan(problem, access_bytes, &group.group, group.backend.kernels().caps())
}

/// Enqueues the launches of a call. `params` must come from a valid call, and the context current
/// on this thread.
pub(super) fn enqueue(group: &PeerGroup, params: &Params, plan: &Plan, owned: Owned) -> Result<(), Error> {
    let kernel = load(group.backend.kernels(), &plan.key)?;
    let params = params.pack(&plan.key);
    plan.rounds(owned.rows_per_rank).try_for_each(|round| launch_one(group, kernel, &params, plan, owned, round))
}

fn launch_one(
    group: &PeerGroup,
    kernel: sys::CUfunction,
    params: &Packed,
    plan: &Plan,
    owned: Owned,
    round: Round,
) -> Result<(), Error> {
    let Round { first_row, rows, grid } = round;
    let launch = Launch { kernel, grid, threads: plan.threads(), shared_bytes: plan.shared_bytes, cluster: 1 };
    let peers = group.peers(first_row, rows);
    let Owned { rows_per_rank, first_own, first_of_y, sends } = owned;
    let [rows_per_rank, first_own, first_of_y] = [rows_per_rank, first_own, first_of_y].map(|rows| rows as u64);
    let sends = sends as u32;
    let mut arguments = [
        params.address(),
        std::ptr::from_ref(&peers).cast_mut().cast(),
        std::ptr::from_ref(&rows_per_rank).cast_mut().cast(),
        std::ptr::from_ref(&first_own).cast_mut().cast(),
        std::ptr::from_ref(&first_of_y).cast_mut().cast(),
        std::ptr::from_ref(&sends).cast_mut().cast(),
    ];
    let overlap = group.backend.kernels().caps().arch >= Arch::HOPPER;
    // SAFETY:
    // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process ends;
    // - arguments: its parameters are the struct that its key has packed, a `Peers`, whose sizes
    //   were checked where it was compiled, three 64-bit numbers and a 32-bit one;
    // - tensors: addresses, lengths and strides come from a `Checked` call, so every access of the
    //   kernel for (rows, cols) lies in a live tensor, and no output overlaps another tensor; in
    //   tensors that hold only this rank's rows it accesses those rows alone, from the first of
    //   them on; the key's access_bytes divide all addresses and strides;
    // - slots: the memory of this rank and of its peers stays allocated while a group of them
    //   exists (`Parts`), or as promised to `from_pointers`; the round has at most half of the rows
    //   that its slots have room for, and every rank has divided its memory alike;
    // - order: as in `peers::launch`.
    unsafe { launch.call(group.backend.stream(), &mut arguments, overlap) }
}
