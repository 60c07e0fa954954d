//! Calls on column-divided rows. Forward of short rows is one kernel; other calls run the backend's
//! two phases, with an exchange through slots between them. Both ways send the same slots, so ranks
//! with longer rows may choose the other way.

use cudarc::driver::{CudaViewMut, DevicePtrMut};
use rmsnorm_dist::{DividedColumns, RowShares};
use rmsnorm_spec::{AnyBackward, AnyForward, Checked, Direction, Error, NormSpec, Problem};

use super::group::PeerGroup;
use super::launch::{check, load};
use crate::backend::CudaBackend;
use crate::caps::Arch;
use crate::error::device_error;
use crate::launch::{self, Launch, Tensors};
use crate::params::Params;
use crate::plan::ranks::Round;
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
    params.share = launch::share(columns.iter().sum());
    let of_ranks = launch::of_ranks(0, columns)?;
    // Reports an earlier error that cudarc could not return, for example in its waits for events.
    group.backend.stream().context().bind_to_thread().map_err(device_error("before the launch"))?;
    let kernel = load(kernels, &plan.key)?;
    let params = params.pack(&plan.key);
    let overlap = kernels.caps().arch >= Arch::HOPPER;
    plan.rounds(problem.rows).try_for_each(|Round { first_row, rows, grid }| {
        let peers = group.peers(first_row, rows);
        let mut arguments = [
            params.address(),
            std::ptr::from_ref(&peers).cast_mut().cast(),
            std::ptr::from_ref(&of_ranks).cast_mut().cast(),
        ];
        let launch = Launch { kernel, grid, threads: plan.threads(), shared_bytes: 0, cluster: 1 };
        // SAFETY:
        // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process
        //   ends;
        // - arguments: its parameters are the struct that its key has packed, a `Peers` and a
        //   `Columns`, whose sizes were checked where it was compiled;
        // - tensors: addresses, lengths and strides come from a `Checked` call of this rank's
        //   columns; the round has rows of the call; the key's access_bytes divide all addresses
        //   and strides; in place, the thread that stores an element has read it before;
        // - columns: a `Columns` has as many ranks as the group, which are at most 8, and the
        //   kernel does not use its numbers;
        // - slots: the memory of this rank and of its peers stays allocated while a group of them
        //   exists (`Parts`), or as promised to `from_pointers`; the round has no more rows than
        //   there are slots of 16 bytes;
        // - order: as in `peers::launch`.
        unsafe { launch.call(group.backend.stream(), &mut arguments, overlap) }
    })
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
    group.backend.stream().context().bind_to_thread().map_err(device_error("before a kernel is loaded"))?;
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
    keys.iter().try_for_each(|key| load(kernels, key).map(|_| ()))
}

/// Sends this rank's share to all ranks; all shares have the same length.
fn gather(group: &PeerGroup, rows: usize, shares: &RowShares, mut all: CudaViewMut<'_, f32>) -> Result<(), Error> {
    if rows == 0 {
        return Ok(());
    }
    let (stream, kernels) = (group.backend.stream(), group.backend.kernels());
    stream.context().bind_to_thread().map_err(device_error("before the launch"))?;
    let plan = gather_numbers::plan(&group.group, kernels.caps())?;
    let kernel = load(kernels, &plan.key)?;
    let params = Params { rows: rows as u64, ..Params::default() }.pack(&plan.key);
    let numbers = (shares.unit / rows) as u32;
    let (address, _in_use) = all.device_ptr_mut(stream);
    let overlap = kernels.caps().arch >= Arch::HOPPER;
    plan.rounds(rows).try_for_each(|round| {
        let peers = group.peers(round.first_row, round.rows);
        let mut arguments = [
            params.address(),
            std::ptr::from_ref(&peers).cast_mut().cast(),
            std::ptr::from_ref(&address).cast_mut().cast(),
            std::ptr::from_ref(&numbers).cast_mut().cast(),
        ];
        let launch = Launch { kernel, grid: round.grid, threads: plan.threads(), shared_bytes: 0, cluster: 1 };
        // SAFETY:
        // - kernel: `Kernels` hands out only kernels whose module stays loaded until the process
        //   ends;
        // - arguments: its parameters are the struct that its key has packed, a `Peers`, whose sizes
        //   were checked where it was compiled, an address and a 32-bit number;
        // - memory: `all` has a share of `numbers` for each row and rank; the round has rows of the
        //   call;
        // - slots: the memory of this rank and of its peers stays allocated while a group of them
        //   exists (`Parts`), or as promised to `from_pointers`; the round has no more rows than
        //   there are slots of 16 bytes;
        // - order: the kernel waits for earlier kernels on the stream (`wait_for_earlier_kernels`);
        //   accesses to slots are ordered by the protocol (`peers.cuh`), and those of a rank's own
        //   launches by its one stream.
        unsafe { launch.call(stream, &mut arguments, overlap) }
    })
}
