//! Forward on column-divided rows in one kernel. Three rows stay in registers: the row that is
//! waited for and two more.

use rmsnorm_spec::{Error, Problem};

use super::ranks::{Group, Plan, SLOT_BYTES};
use super::{KernelKey, MOST_BLOCKS, Program, Reads, Tile, key, reads_more};
use crate::caps::Caps;

/// The most threads of a block with one pack and 64 registers per thread.
const MOST_LEAN: usize = 1024;
/// The most threads of a block with more packs and 128 registers per thread.
const MOST_HELD: usize = 512;

/// The plan of a call with this tile; addresses and strides are multiples of `access_bytes`.
///
/// # Errors
/// `Unsupported` if the group's memory is too small for one row.
pub(crate) fn plan(
    problem: &Problem,
    tile: Tile,
    access_bytes: u32,
    group: &Group,
    caps: &Caps,
) -> Result<Plan, Error> {
    let tile = Tile { access_bytes, ..tile };
    let rows_per_launch = group.slots()?;
    let key = KernelKey { ranks: group.ranks, ..key(problem, Program::ForwardExchange, tile) };
    let (most_blocks, most_admitting) = (group.most_blocks(&tile, caps), group.most_admitting(caps));
    Ok(Plan { key, shared_bytes: 0, rows_per_launch, owners: 1, rows_per_block: 1, most_blocks, most_admitting })
}

/// The tile of a call's rows, which depends on columns and dtypes alone; `None` if rows are too
/// long.
pub(crate) fn tile(problem: &Problem) -> Option<Tile> {
    let (activation, stream) = (problem.dtypes.activation, problem.dtypes.residual);
    let pack = SLOT_BYTES / activation.size();
    let packs = problem.cols.div_ceil(pack);
    let h_bytes = pack * if reads_more(problem) { stream.size() } else { activation.size() };
    let parameter_bytes = pack * problem.dtypes.weight.size();
    let is_lean = packs <= MOST_LEAN && h_bytes == SLOT_BYTES && parameter_bytes == SLOT_BYTES;
    let per_thread = if is_lean { 1 } else { packs.div_ceil(MOST_HELD) };
    // Three rows must fit the registers.
    if per_thread * h_bytes > 4 * SLOT_BYTES {
        return None;
    }
    let threads_per_row = packs.div_ceil(per_thread).next_multiple_of(32) as u32;
    let threads_per_sm = if is_lean { MOST_LEAN } else { MOST_HELD } as u32;
    let blocks_per_sm = (threads_per_sm / threads_per_row).clamp(1, MOST_BLOCKS);
    // Whether registers also suffice for the parameters.
    let prefetches_weight = per_thread * parameter_bytes <= SLOT_BYTES;
    let reads = Reads { prefetches_weight, ..Tile::NONE.reads };
    let pack = pack as u32;
    Some(Tile { pack, packs: per_thread as u32, threads_per_row, groups: 1, blocks_per_sm, reads, ..Tile::NONE })
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::depth::sum_depth;
    use rmsnorm_spec::{DType, DTypes, Norm, Tensor};

    use super::*;
    use crate::plan::chain;
    use crate::plan::ranks::Round;

    const BF16: DTypes = DTypes::uniform(DType::Bf16);
    const F32: DTypes = DTypes::uniform(DType::F32);
    const GROUP: Group = Group { ranks: 2, sharers: 1, bytes: 1 << 20 };

    fn problem(cols: usize, dtypes: DTypes) -> Problem {
        Problem {
            dtypes,
            ..Problem::forward(Norm::Layer, 7, cols, dtypes.activation, &[Tensor::Weight, Tensor::Residual])
        }
    }

    /// The plan of a call, if its rows are not too long.
    fn planned(cols: usize, dtypes: DTypes, group: &Group) -> Option<Plan> {
        let problem = problem(cols, dtypes);
        tile(&problem).map(|tile| plan(&problem, tile, 16, group, &Caps::h200()).expect("room"))
    }

    /// Threads, packs of each, blocks per multiprocessor, whether parameters are held.
    #[test]
    fn tiles_follow_the_length_of_a_row() {
        for (dtypes, cols, expected) in [
            (BF16, 1, Some((32, 1, 16, true))),
            (BF16, 1024, Some((128, 1, 8, true))),
            (BF16, 4096, Some((512, 1, 2, true))),
            (BF16, 8192, Some((1024, 1, 1, true))),
            (BF16, 8193, Some((352, 3, 1, false))),
            (BF16, 16384, Some((512, 4, 1, false))),
            (BF16, 16385, None),
            (F32, 4096, Some((1024, 1, 1, true))),
            (F32, 8192, Some((512, 4, 1, false))),
            (F32, 8193, None),
            (BF16.widened(false, true), 4096, Some((512, 1, 1, true))),
            (BF16.widened(false, true), 8193, None),
            (BF16.widened(true, false), 4096, Some((512, 1, 1, false))),
        ] {
            let tile = planned(cols, dtypes, &GROUP).map(|plan| plan.key.tile);
            let got =
                tile.map(|tile| (tile.threads_per_row, tile.packs, tile.blocks_per_sm, tile.reads.prefetches_weight));
            assert_eq!(got, expected, "{dtypes}, {cols} columns");
        }
    }

    #[test]
    fn no_chain_is_longer_than_math_md_allows() {
        for cols in (1..=16384).step_by(37).chain([4096, 8192, 16384]) {
            for dtypes in [BF16, F32] {
                let Some(plan) = planned(cols, dtypes, &GROUP) else { continue };
                let chain = chain::of_row(Program::ForwardExchange, &plan.key.tile, cols).expect("a sum");
                assert!(chain <= sum_depth(cols) as u64, "{cols}: {chain}");
            }
        }
    }

    #[test]
    fn launches_have_the_rows_that_there_are_slots_for() {
        let small = Group { bytes: 16 * 100, sharers: 2, ..GROUP };
        let plan = planned(4096, BF16, &small).expect("a plan");
        let rounds: Vec<_> =
            plan.rounds(250).map(|Round { first_row, rows, grid, .. }| (first_row, rows, grid)).collect();
        assert_eq!(rounds, [(0, 100, 100), (100, 100, 100), (200, 50, 50)]);
        let all = planned(4096, BF16, &GROUP).expect("a plan");
        assert_eq!(all.rounds(4096).map(|round| round.grid).collect::<Vec<_>>(), [264]);
        let none = Group { bytes: 0, ..GROUP };
        let problem = problem(4096, BF16);
        let refused = super::plan(&problem, tile(&problem).expect("a tile"), 16, &none, &Caps::h200());
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
}
