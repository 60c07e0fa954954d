//! The exchange between the phases of a call on column-divided rows: one thread per row.

use rmsnorm_spec::{DType, Error, Norm, Problem};

use super::ranks::{Group, Plan, SLOT_BYTES};
use super::{KernelKey, MOST_BLOCKS, Program, Tile, key};
use crate::caps::Caps;

/// The most numbers of a row. They fit one slot, which has four words.
pub(crate) const MOST_NUMBERS: usize = 3;

/// Threads of a block: few, to spread rows over the device.
const THREADS: u32 = 64;

/// The plan of a group's exchanges.
///
/// # Errors
/// `Unsupported` if the group's memory is too small for one row.
pub(crate) fn plan(group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let rows_per_launch = group.slots()?;
    let tile = Tile {
        pack: (SLOT_BYTES / DType::F32.size()) as u32,
        packs: 1,
        threads_per_row: THREADS,
        groups: 1,
        blocks_per_sm: MOST_BLOCKS,
        ..Tile::NONE
    };
    // All calls share one kernel.
    let problem = Problem::forward(Norm::Rms, 0, 0, DType::F32, &[]);
    let key = KernelKey { ranks: group.ranks, ..key(&problem, Program::GatherNumbers, tile) };
    let (most_blocks, most_admitting) = (group.most_blocks(&tile, caps), group.most_admitting(caps));
    Ok(Plan {
        key,
        shared_bytes: 0,
        rows_per_launch,
        owners: 1,
        rows_per_block: THREADS as usize,
        most_blocks,
        most_admitting,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ranks::Round;

    #[test]
    fn rows_are_spread_over_blocks_and_launches() {
        let group = |bytes, sharers| Group { ranks: 2, sharers, bytes };
        for (rows, group, expected) in [
            (0, group(1 << 20, 1), vec![]),
            (1, group(1 << 20, 1), vec![(0, 1, 1)]),
            (65, group(1 << 20, 1), vec![(0, 65, 2)]),
            (1 << 16, group(1 << 20, 8), vec![(0, 1 << 16, 264)]),
            (100, group(16 * 70, 1), vec![(0, 70, 2), (70, 30, 1)]),
        ] {
            let plan = plan(&group, &Caps::h200()).expect("a plan");
            let rounds: Vec<_> =
                plan.rounds(rows).map(|Round { first_row, rows, grid, .. }| (first_row, rows, grid)).collect();
            assert_eq!(rounds, expected, "{rows} rows, {group:?}");
        }
        assert!(matches!(plan(&group(15, 1), &Caps::h200()), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn a_row_of_every_norm_is_one_slot() {
        use rmsnorm_spec::Direction;

        for (norm, direction) in Norm::ALL
            .into_iter()
            .flat_map(|norm| [Direction::Forward, Direction::Backward].map(|direction| (norm, direction)))
        {
            assert!(norm.statistics_len(direction) <= MOST_NUMBERS);
        }
    }
}
