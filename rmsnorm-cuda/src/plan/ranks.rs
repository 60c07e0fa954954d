//! What programs whose ranks hand each other something have in common: the group, its slots, and the launches that a call takes.

use rmsnorm_spec::Error;

use super::{KernelKey, Tile};
use crate::caps::Caps;

/// Bytes of a slot: the widest access.
pub(super) const SLOT_BYTES: usize = 16;

/// What a plan is told of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) ranks: u32,
    /// Ranks on this device, this one among them: all of their blocks must fit it at once.
    pub(crate) sharers: u32,
    /// Room for the x of one rank in a launch.
    pub(crate) bytes: usize,
}

impl Group {
    /// Rows for which there are slots, where one has what is found of a row.
    ///
    /// # Errors
    /// `Unsupported` if there is none.
    pub(super) fn slots(&self) -> Result<usize, Error> {
        match self.bytes / SLOT_BYTES {
            0 => {
                let rule =
                    format!("the memory of a group has room for {SLOT_BYTES} bytes of a row, got {}", self.bytes);
                Err(Error::Unsupported { rule })
            }
            slots => Ok(slots),
        }
    }

    /// Blocks of one rank that are on the device at once, whatever the others on it do.
    pub(super) fn most_blocks(&self, tile: &Tile, caps: &Caps) -> usize {
        (caps.sms * tile.blocks_per_sm / self.sharers).max(1) as usize
    }
}

/// How a call is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) key: KernelKey,
    pub(crate) shared_bytes: u32,
    /// Rows that a launch has at the most.
    pub(super) rows_per_launch: usize,
    /// Ranks of each of which a launch has that many rows; 1 where rows have no owners.
    pub(super) owners: usize,
    /// Rows that a block has side by side.
    pub(super) rows_per_block: usize,
    /// Blocks that a launch has at the most.
    pub(super) most_blocks: usize,
}

/// One launch of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) grid: u32,
}

impl Plan {
    /// The launches of a call of so many rows, in order.
    pub(crate) fn pieces(&self, rows: usize) -> impl Iterator<Item = Piece> + use<> {
        let Plan { rows_per_launch, owners, rows_per_block, most_blocks, .. } = *self;
        (0..rows).step_by(rows_per_launch).map(move |first_row| {
            let rows = rows_per_launch.min(rows - first_row);
            let blocks = (rows * owners).div_ceil(rows_per_block);
            Piece { first_row, rows, grid: blocks.min(most_blocks) as u32 }
        })
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.key.tile.threads()
    }
}
