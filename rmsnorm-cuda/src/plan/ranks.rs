//! Plans of programs whose ranks exchange data: the group, its slots, and the launches of a call.

use rmsnorm_spec::Error;

use super::{KernelKey, Tile, WIDEST_ACCESS};
use crate::caps::Caps;

/// Bytes of a slot: the widest access.
pub(super) const SLOT_BYTES: usize = WIDEST_ACCESS;

/// The properties of a group that plans depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) ranks: u32,
    /// Ranks on this device, including this one; the blocks of all of them must fit it at once.
    pub(crate) sharers: u32,
    /// Bytes for the x of one rank in a launch.
    pub(crate) bytes: usize,
}

impl Group {
    /// The number of rows that fit the group's memory, with one slot of statistics each.
    ///
    /// # Errors
    /// `Unsupported` if it is zero.
    pub(super) fn slots(&self) -> Result<usize, Error> {
        match self.bytes / SLOT_BYTES {
            0 => {
                let rule = format!("bytes of the group must be at least {SLOT_BYTES}, got {}", self.bytes);
                Err(Error::Unsupported { rule })
            }
            slots => Ok(slots),
        }
    }

    /// Blocks of one rank that are resident at once, next to the blocks of the other ranks on the
    /// device.
    pub(super) fn most_blocks(&self, tile: &Tile, caps: &Caps) -> usize {
        (caps.sms * tile.blocks_per_sm / self.sharers).max(1) as usize
    }

    /// The most blocks, up to `most`, that have no divisor in common with the ranks: a block then has
    /// rows of every owner in turn, and all blocks and warps have the same work.
    pub(super) fn fair_blocks(&self, most: usize) -> usize {
        fn gcd(one: usize, other: usize) -> usize {
            if other == 0 { one } else { gcd(other, one % other) }
        }
        (1..=most).rev().find(|blocks| gcd(*blocks, self.ranks as usize) == 1).unwrap_or(1)
    }

    /// The most blocks of a launch that lets the next kernel start early: if that has room beside
    /// them, and if there is no other rank on the device, whose blocks it would keep from starting.
    ///
    /// On two H200s one row of 8192 bf16 on a cluster of four blocks takes 3.23 us, and 3.96 us without
    /// it. 4096 rows on 132 blocks take 193.3 us, and 192.6 us without it (2026-11-27).
    pub(super) fn most_admitting(&self, caps: &Caps) -> usize {
        if self.sharers == 1 { caps.sms as usize / 2 } else { 0 }
    }
}

/// The launches of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) key: KernelKey,
    pub(crate) shared_bytes: u32,
    /// The most rows of a launch.
    pub(super) rows_per_launch: usize,
    /// The number of ranks that each have that many rows in a launch; 1 without row owners.
    pub(super) owners: usize,
    /// Rows that a block handles concurrently.
    pub(super) rows_per_block: usize,
    /// The most blocks of a launch, or clusters of blocks.
    pub(super) most_blocks: usize,
    /// The most blocks of a launch that lets the next kernel start early.
    pub(super) most_admitting: usize,
}

/// One launch of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) grid: u32,
    /// Whether the next kernel may start as soon as all blocks of this one run.
    pub(crate) admits_next: bool,
}

impl Plan {
    /// The launches of a call with this many rows, in order.
    pub(crate) fn rounds(&self, rows: usize) -> impl Iterator<Item = Round> + use<> {
        let Plan { rows_per_launch, owners, rows_per_block, most_blocks, most_admitting, .. } = *self;
        let cluster = self.key.tile.cluster as usize;
        (0..rows).step_by(rows_per_launch).map(move |first_row| {
            let rows = rows_per_launch.min(rows - first_row);
            let blocks = (rows * owners).div_ceil(rows_per_block).min(most_blocks) * cluster;
            Round { first_row, rows, grid: blocks as u32, admits_next: blocks <= most_admitting }
        })
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.key.tile.threads()
    }
}
