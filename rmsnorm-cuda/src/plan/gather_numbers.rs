//! The exchange between two halves of a call whose columns are divided among ranks: a thread for each row.

use rmsnorm_spec::{DType, Error, Norm, Problem};

use super::reduce_forward::{Group, Piece};
use super::{KernelKey, Program, Tile, key};
use crate::caps::Caps;

/// Bytes of a slot, the widest access, which has what is found of a row.
pub(super) const SLOT_BYTES: usize = 16;

/// Numbers of a row at the most, which are one slot: four words.
pub(crate) const MOST_NUMBERS: usize = 3;

/// Threads of a block: few, so that rows are spread over the device.
const THREADS: u32 = 64;

/// Blocks of a multiprocessor on every architecture.
const BLOCKS_PER_SM: u32 = 16;

/// How an exchange is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) key: KernelKey,
    /// Rows that a launch has at the most.
    rows_per_launch: usize,
    /// Blocks that a launch has at the most: all of a group's on one device must fit it at once.
    most_blocks: usize,
}

impl Plan {
    /// The launches of an exchange of so many rows, in order.
    pub(crate) fn pieces(&self, rows: usize) -> impl Iterator<Item = Piece> + use<> {
        let Plan { rows_per_launch, most_blocks, .. } = *self;
        (0..rows).step_by(rows_per_launch).map(move |first_row| {
            let rows = rows_per_launch.min(rows - first_row);
            Piece { first_row, rows, grid: rows.div_ceil(THREADS as usize).min(most_blocks) as u32 }
        })
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        THREADS
    }
}

/// Rows for which a group's memory has slots.
///
/// # Errors
/// `Unsupported` if there is none.
pub(super) fn slots(group: &Group) -> Result<usize, Error> {
    match group.bytes / SLOT_BYTES {
        0 => {
            let rule = format!("the memory of a group has room for {SLOT_BYTES} bytes of a row, got {}", group.bytes);
            Err(Error::Unsupported { rule })
        }
        slots => Ok(slots),
    }
}

/// The plan of a group's exchanges.
///
/// # Errors
/// `Unsupported` if the group's memory has no room for one row.
pub(crate) fn plan(group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let rows_per_launch = slots(group)?;
    let tile = Tile {
        pack: (SLOT_BYTES / DType::F32.size()) as u32,
        packs: 1,
        threads_per_row: THREADS,
        groups: 1,
        blocks_per_sm: BLOCKS_PER_SM,
        ..Tile::NONE
    };
    // One code for every call.
    let problem = Problem::forward(Norm::Rms, 0, 0, DType::F32, &[]);
    let key = KernelKey { ranks: group.ranks, ..key(&problem, Program::GatherNumbers, tile) };
    let most_blocks = (caps.sms * BLOCKS_PER_SM / group.sharers).max(1) as usize;
    Ok(Plan { key, rows_per_launch, most_blocks })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let pieces: Vec<_> =
                plan.pieces(rows).map(|Piece { first_row, rows, grid }| (first_row, rows, grid)).collect();
            assert_eq!(pieces, expected, "{rows} rows, {group:?}");
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
