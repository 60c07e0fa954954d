//! Plans of forward of a sum over ranks with pack owners: the tile, and so the bits, of
//! `reduce_forward`.

use rmsnorm_spec::{Error, Problem};

use super::ranks::{Group, Plan};
use super::{KernelKey, Program, RESERVED_BYTES, Reads, Tile, reduce_forward};
use crate::caps::Caps;

/// The plan of a call with at least one row; addresses and strides are multiples of `access_bytes`.
/// All ranks choose the same program, because the choice depends only on what they share: neither on
/// alignment nor on the other ranks of a device.
///
/// # Errors
/// `Unsupported` if a row is too long for the device, or for the group's memory.
pub(crate) fn plan(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let plan = reduce_forward::plan(problem, access_bytes, group, caps)?;
    // A row in shared memory has its sums there twice: of this row and of the next.
    let shared_bytes = 2 * plan.shared_bytes;
    let fits = shared_bytes as usize + RESERVED_BYTES <= caps.shared_per_block_optin as usize;
    let in_clusters = reduce_forward::most_in_clusters(&plan.key.tile, problem.cols, group.ranks, caps);
    if problem.rows <= most_direct_rows(problem, group, in_clusters) || !fits {
        let is_few = problem.rows <= in_clusters.min(reduce_forward::room_for_clusters(group, caps));
        return Ok(if is_few { reduce_forward::in_clusters(plan, group, caps) } else { plan });
    }
    // Parts of a pack are waited for one by one, so registers suffice to wait for two sums.
    let tile = plan.key.tile;
    let tile = Tile { reads: Reads { batch: 2, ..tile.reads }, ..tile };
    let key = KernelKey { program: Program::ReduceForwardPacks, tile, ..plan.key };
    let most_blocks = group.fair_blocks(plan.most_blocks);
    Ok(Plan { key, shared_bytes, most_blocks, ..plan })
}

/// The plans of calls like this one with any number of rows.
///
/// # Errors
/// As [`plan`].
pub(crate) fn plans(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Vec<Plan>, Error> {
    let tile = reduce_forward::plan(problem, access_bytes, group, caps)?.key.tile;
    let in_clusters = reduce_forward::most_in_clusters(&tile, problem.cols, group.ranks, caps);
    let most_direct = most_direct_rows(problem, group, in_clusters);
    let few = in_clusters.min(reduce_forward::room_for_clusters(group, caps)).min(most_direct);
    let rows = [few, most_direct, most_direct.saturating_add(1)];
    let plan_of = |rows| plan(&Problem { rows, ..*problem }, access_bytes, group, caps);
    rows.into_iter().filter(|rows| *rows > 0).map(plan_of).collect()
}

/// Bytes that the link carries in the time of the detour through the owner: 1.0 us at 350 GB/s.
///
/// Without owners a rank sends `(ranks - 1) * bytes`, with owners
/// `2 * (ranks - 1) / ranks * bytes`.
const DETOUR_BYTES: usize = 350_000;

/// Bytes of a row's parts that one block sends in the time of the detour. With eight ranks, one row of
/// 8192 bf16 takes 7.4 us in one block, 6.6 with owners, and 5.3 on a cluster.
const MOST_OF_BLOCK: usize = 80_000;

/// The most rows for which a sum is faster without owners; `in_clusters` is the number of rows that
/// are on clusters then.
///
/// With two ranks both ways send the same number of bytes. Sums are sent in the slots of x, so they
/// must have x's dtype.
fn most_direct_rows(problem: &Problem, group: &Group, in_clusters: usize) -> usize {
    let (ranks, dtypes) = (group.ranks as usize, problem.dtypes);
    if ranks <= 2 || dtypes.activation != dtypes.residual {
        return usize::MAX;
    }
    let sent = problem.cols.saturating_mul(dtypes.activation.size() * (ranks - 1));
    let most = DETOUR_BYTES * ranks / sent.saturating_mul(ranks - 2).max(1);
    if sent > MOST_OF_BLOCK { most.min(in_clusters) } else { most }
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, DTypes, Norm, Tensor};

    use super::*;

    const MIB: usize = 1 << 20;
    const BF16: DTypes = DTypes::uniform(DType::Bf16);

    fn problem(rows: usize, cols: usize, dtypes: DTypes) -> Problem {
        let tensors = [Tensor::Weight, Tensor::Residual, Tensor::ResidualOut];
        Problem { dtypes, ..Problem::forward(Norm::Rms, rows, cols, dtypes.activation, &tensors) }
    }

    fn group(ranks: u32) -> Group {
        Group { ranks, sharers: 1, bytes: 64 * MIB }
    }

    fn program(rows: usize, cols: usize, dtypes: DTypes, ranks: u32) -> Program {
        plan(&problem(rows, cols, dtypes), 16, &group(ranks), &Caps::h200()).expect("a plan").key.program
    }

    /// The most rows of 8192 bf16 for which all ranks add.
    #[test]
    fn owners_add_what_is_large_for_its_ranks() {
        for (ranks, most) in [(3, 32), (4, 14), (8, 2)] {
            assert_eq!(program(most, 8192, BF16, ranks), Program::ReduceForward, "{ranks} ranks");
            assert_eq!(program(most + 1, 8192, BF16, ranks), Program::ReduceForwardPacks, "{ranks} ranks");
        }
        // A row that is too long for one block, and for a cluster.
        assert_eq!(program(1, 16384, BF16, 4), Program::ReduceForwardPacks);
        for ranks in [1, 2] {
            assert_eq!(program(1 << 20, 8192, BF16, ranks), Program::ReduceForward);
        }
        // A sum in f32 does not fit the slots of x.
        assert_eq!(program(1 << 20, 8192, BF16.widened(false, true), 8), Program::ReduceForward);
        // Neither do two such rows fit a block.
        assert_eq!(program(1 << 10, 53_248, BF16, 4), Program::ReduceForwardPacks);
        assert_eq!(program(1 << 10, 106_496, BF16, 4), Program::ReduceForward);
        // Packs of each warp have all owners in turn.
        let of_four = plan(&problem(300, 8192, BF16), 16, &group(4), &Caps::h200()).expect("a plan");
        assert_eq!(of_four.rounds(300).next().map(|round| round.grid), Some(131));
    }

    /// The bits of a row follow from its tile. In shared memory it lies twice.
    #[test]
    fn a_row_has_the_tile_that_it_has_where_all_ranks_add() {
        for (ranks, cols) in [3, 8].into_iter().flat_map(|ranks| [1, 100, 4096, 8192, 20_000].map(|cols| (ranks, cols)))
        {
            let tile = |rows| {
                let plan = plan(&problem(rows, cols, BF16), 8, &group(ranks), &Caps::h200()).expect("a plan");
                let Tile { pack, packs, threads_per_row, cluster, .. } = plan.key.tile;
                (plan.key.program, (pack, packs, threads_per_row * cluster), plan.shared_bytes)
            };
            let direct = reduce_forward::plan(&problem(1, cols, BF16), 8, &group(ranks), &Caps::h200());
            let Plan { key, shared_bytes, .. } = direct.expect("a plan");
            let expected = (key.tile.pack, key.tile.packs, key.tile.threads_per_row);
            assert_eq!(tile(1).1, expected, "{ranks} ranks, {cols}");
            assert_eq!(
                tile(1 << 20),
                (Program::ReduceForwardPacks, expected, 2 * shared_bytes),
                "{ranks} ranks, {cols}"
            );
        }
    }

    /// Owners and other ranks must agree, also where devices have different numbers of ranks or
    /// multiprocessors.
    #[test]
    fn all_ranks_choose_the_same_program() {
        for (ranks, cols, rows) in [3, 8]
            .into_iter()
            .flat_map(|ranks| [512, 4096, 7168, 8192, 20_000].map(|cols| (ranks, cols)))
            .flat_map(|(ranks, cols)| (1..40).map(move |rows| (ranks, cols, rows)))
        {
            let program = |sharers, sms, access_bytes| {
                let (group, caps) = (Group { sharers, ..group(ranks) }, Caps { sms, ..Caps::h200() });
                plan(&problem(rows, cols, BF16), access_bytes, &group, &caps).expect("a plan").key.program
            };
            let expected = program(1, 132, 16);
            for (sharers, sms, access_bytes) in [(2, 132, 16), (ranks, 132, 2), (ranks, 20, 16), (1, 8, 4)] {
                assert_eq!(program(sharers, sms, access_bytes), expected, "{ranks} ranks, {rows} x {cols}");
            }
        }
    }

    /// The kernels that are loaded ahead are those that calls with any number of rows use.
    #[test]
    fn plans_are_those_of_all_numbers_of_rows() {
        for (ranks, cols, dtypes) in
            [(2, 8192, BF16), (4, 8192, BF16), (8, 8192, BF16), (8, 512, BF16), (4, 4096, BF16.widened(false, true))]
        {
            let (any, caps) = (problem(1, cols, dtypes), Caps { sms: 40, ..Caps::h200() });
            let group = Group { sharers: ranks.min(4), ..group(ranks) };
            let ahead: Vec<_> =
                plans(&any, 16, &group, &caps).expect("plans").into_iter().map(|plan| plan.key).collect();
            let mut used = Vec::new();
            for rows in (1..2000).chain([1 << 20, 1 << 40]) {
                let key = plan(&Problem { rows, ..any }, 16, &group, &caps).expect("a plan").key;
                assert!(ahead.contains(&key), "{rows} rows, {ranks} ranks: {key:?}");
                used.push(key);
            }
            assert!(ahead.iter().all(|key| used.contains(key)), "{ranks} ranks");
        }
    }
}
