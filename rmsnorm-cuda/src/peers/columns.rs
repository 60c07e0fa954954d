//! Calls on column-divided rows. Forward of short rows is one kernel; other calls run the backend's
//! two phases, with an exchange through slots between them. Both ways send the same slots, so ranks
//! with longer rows may choose the other way.

use cudarc::driver::{CudaViewMut, DevicePtrMut};
use rmsnorm_dist::{DividedColumns, RowShares};
use rmsnorm_spec::{AnyBackward, AnyForward, Checked, Direction, Error, NormSpec, Problem};

use super::group::PeerGroup;
use super::launch::{check, enqueue, load};
use crate::backend::CudaBackend;
use crate::launch::{self, Tensors, argument};
use crate::params::Params;
use crate::plan::{KernelKey, Tile, columns, forward_exchange, gather_numbers};

pub(super) fn forward(
    group: &PeerGroup,
    spec: &NormSpec,
    columns: &[usize],
    args: AnyForward<'_, CudaBackend>,
) -> Result<(), Error> {
    let divided = DividedColumns::new(&group.backend, group.place(), columns)?;
    group.check()?;
    let call = divided.check_forward(spec, args)?;
    match forward_exchange::tile(call.problem()) {
        Some(tile) if columns.len() > 1 => in_one_kernel(group, columns, tile, call),
        Some(_) | None => divided.forward(call, |shares, all| gather(group, spec.rows, shares, all)),
    }
}

/// Both phases and the exchange in one kernel, for rows that have a tile.
fn in_one_kernel(
    group: &PeerGroup,
    columns: &[usize],
    tile: Tile,
    call: Checked<AnyForward<'_, CudaBackend>>,
) -> Result<(), Error> {
    let (here, problem, kernels) = (*call.spec(), *call.problem(), group.backend.kernels());
    let mut tensors = Tensors::new(group.backend.stream(), problem);
    call.visit(&mut tensors)?;
    let mut params = tensors.params();
    let access_bytes = launch::access_bytes(&problem, &params);
    let plan = forward_exchange::plan(&problem, tile, access_bytes, &group.group, kernels.caps())?;
    launch::set_call(&mut params, &here, &problem)?;
    params.inv_cols = launch::inv_cols(here.norm, columns.iter().sum());
    let of_ranks = launch::of_ranks(0, columns)?;
    // SAFETY:
    // - arguments: a `Columns`, whose size was checked where the kernel was compiled. It has as many
    //   ranks as the group, which are at most 8, and the kernel does not use its numbers;
    // - tensors: addresses, lengths and strides come from a `Checked` call of this rank's columns,
    //   and the plan has its `access_bytes`;
    // - slots: the plan is of `group.group`, one slot for a row;
    // - order: `tensors` holds the events.
    unsafe { enqueue(group, &plan, problem.rows, &params, [argument(&of_ranks)]) }
}

pub(super) fn backward(
    group: &PeerGroup,
    spec: &NormSpec,
    columns: &[usize],
    args: AnyBackward<'_, CudaBackend>,
) -> Result<(), Error> {
    let divided = DividedColumns::new(&group.backend, group.place(), columns)?;
    group.check()?;
    divided.backward(spec, args, |shares, all| gather(group, spec.rows, shares, all))
}

/// Compiles and loads the kernels of a call on this rank's columns. Without it, a rank that loads a
/// kernel may block the start of another rank's kernel on the same device, which others wait for.
pub(super) fn prepare(group: &PeerGroup, problem: &Problem, alignment: usize) -> Result<(), Error> {
    check(problem)?;
    if group.group.ranks == 1 {
        return group.backend.prepare_aligned(problem, alignment);
    }
    let (kernels, access_bytes) = (group.backend.kernels(), launch::access_of(alignment as u64));
    let tile = forward_exchange::tile(problem).filter(|_| problem.direction == Direction::Forward);
    let keys: Vec<KernelKey> = match tile {
        Some(tile) => vec![forward_exchange::plan(problem, tile, access_bytes, &group.group, kernels.caps())?.key],
        None => {
            let first = columns::statistics(&columns::first_half(problem), access_bytes, kernels.caps());
            let second = columns::given(problem, access_bytes, kernels.caps());
            let exchange = gather_numbers::plan(&group.group, kernels.caps())?.key;
            first.keys().chain(second.keys()).chain([exchange]).collect()
        }
    };
    keys.iter().try_for_each(|key| load(group, key).map(|_| ()))
}

/// Sends this rank's share to all ranks; all shares have the same length.
fn gather(group: &PeerGroup, rows: usize, shares: &RowShares, mut all: CudaViewMut<'_, f32>) -> Result<(), Error> {
    if rows == 0 {
        return Ok(());
    }
    let plan = gather_numbers::plan(&group.group, group.backend.kernels().caps())?;
    let params = Params { rows: rows as u64, ..Params::default() };
    let numbers = (shares.unit / rows) as u32;
    let (address, _in_use) = all.device_ptr_mut(group.backend.stream());
    // SAFETY:
    // - arguments: an address and a 32-bit number;
    // - tensors: none; `all` has a share of `numbers` for each row and rank;
    // - slots: the plan is of `group.group`, one slot for a row;
    // - order: `_in_use` holds the events.
    unsafe { enqueue(group, &plan, rows, &params, [argument(&address), argument(&numbers)]) }
}
