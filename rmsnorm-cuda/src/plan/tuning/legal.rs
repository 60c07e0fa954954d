//! Checks that a table is legal: kernels exist for its tiles on every device, and they stay within
//! the error bounds and workspaces that callers rely on.
//!
//! A legal rung may be slow; speed is a matter of measurement.

use std::collections::BTreeSet;

use rmsnorm_gpu::chain::{serial, shared};
use rmsnorm_gpu::tuning::{Rung, find, rises};
use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};

use super::Tuning;
use super::data::{Name, Place, Which};
use crate::plan::backward::{self, MOST_SPLIT_ROWS};
use crate::plan::{COLUMN_LANES, Program, Tile, chain};

/// The largest cluster, blocks per multiprocessor, and threads per block and per multiprocessor.
const MOST_CLUSTER: u32 = 8;
const MOST_BLOCKS: u32 = 32;
const MOST_THREADS: u32 = 1024;
const MOST_THREADS_PER_SM: u32 = 2048;

/// The most groups of several warps in a block; each has its own barrier, besides the block's.
const MOST_BARRIERS: u32 = 8;

/// The most sums that the threads of backward exchange at a time, in the reserved part of shared
/// memory.
const MOST_SENT: u32 = 128;

/// The fewest threads of a block of backward: fewer would make the chains of `backward_split` too
/// long.
const LEAST_BACKWARD_THREADS: u32 = 128;

impl Which {
    /// The program that uses the tiles of this ladder.
    const fn program(self) -> Program {
        match self {
            Which::Forward(_, Place::Cluster) => Program::ForwardCluster,
            Which::Forward(_, Place::Block) => Program::Forward,
            Which::Forward(_, Place::Long) => Program::ForwardLong,
            Which::Backward(..) => Program::Backward,
            Which::ToCodes(_) | Which::FindsScale => Program::QuantizedForward,
        }
    }

    /// The most packs of a thread.
    pub(super) const fn most_packs(self) -> u32 {
        match self {
            Which::Forward(_, Place::Cluster | Place::Long) => 16,
            Which::Backward(_, Place::Cluster | Place::Long) => 10,
            Which::Forward(_, Place::Block)
            | Which::Backward(_, Place::Block)
            | Which::ToCodes(_)
            | Which::FindsScale => 8,
        }
    }
}

impl Tuning {
    /// Checks that every rung is legal.
    ///
    /// # Errors
    /// The first illegal rung, in words.
    pub(super) fn check(&self) -> Result<(), String> {
        for name in Name::all() {
            let (ladder, built_in) = (self.ladder(name), Tuning::H200.ladder(name));
            check_ladder(name, ladder, built_in).map_err(|reason| format!("{}: {reason}", name.text()))?;
        }
        for width in 0..self.widths.len() {
            self.check_finds_scale(width)?;
        }
        Ok(())
    }

    /// The search of a tensor's scale must use as many threads per row as the kernel that writes
    /// the codes, so that both compute the same rstd.
    fn check_finds_scale(&self, width: usize) -> Result<(), String> {
        let [finds, writes] = [Which::FindsScale, Which::ToCodes(0)].map(|which| Name { width, which });
        let (found, written) = (self.ladder(finds), self.ladder(writes));
        for length in starts(found).chain(starts(written)) {
            if let Some(tile) = find(found, length as usize) {
                let other = find(written, length as usize).map(|tile| tile.threads_per_row);
                if other != Some(tile.threads_per_row) {
                    return Err(format!(
                        "{}: rows of {length} packs must have as many threads as in {}",
                        finds.text(),
                        writes.text()
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The first length of every rung, and the first length above the last.
fn starts(ladder: &[Rung<Tile>]) -> impl Iterator<Item = u32> {
    std::iter::once(1).chain(ladder.iter().map(|rung| rung.up_to.saturating_add(1)))
}

pub(in crate::plan) fn check_ladder(name: Name, ladder: &[Rung<Tile>], built_in: &[Rung<Tile>]) -> Result<(), String> {
    if !rises(ladder) {
        return Err("its limits do not rise".into());
    }
    let mut lengths: BTreeSet<u32> = starts(ladder).chain(starts(built_in)).collect();
    let mut above = 0;
    for rung in ladder {
        if let Some(tile) = rung.best {
            let because = |reason| format!("up to {}: {reason}", rung.up_to);
            check_tile(name.which, &tile).map_err(because)?;
            let threads = tile.cluster * tile.threads_per_row;
            let packs = rung.up_to.div_ceil(threads);
            if packs > name.which.most_packs() {
                return Err(because(format!("{packs} packs of a thread are more than {}", name.which.most_packs())));
            }
            // From each of these lengths on, a thread has one pack more.
            lengths.extend((0..packs).map(|packs| packs * threads + 1).filter(|length| *length > above));
        }
        above = rung.up_to;
    }
    // The limits change only at these lengths; between two of them the worst case is at an end.
    let ends: Vec<u32> = lengths.iter().map(|length| length - 1).filter(|length| *length > 0).collect();
    lengths.extend(ends);
    for length in lengths {
        let (tile, before) = (find(ladder, length as usize), find(built_in, length as usize));
        let checked = match (tile, before) {
            (None, None) => Ok(()),
            (Some(tile), Some(before)) => check_length(name, length, &tile, &before),
            (None, Some(_)) => Err("it has no tile".into()),
            (Some(_), None) => Err("it has a tile, but this length belongs to another ladder: remove the tile".into()),
        };
        checked.map_err(|reason| format!("{length} packs: {reason}"))?;
    }
    Ok(())
}

/// Checks that kernels exist for the tile.
fn check_tile(which: Which, tile: &Tile) -> Result<(), String> {
    let Tile { threads_per_row, groups, cluster, unroll, stages, is_overlapped, blocks_per_sm, .. } = *tile;
    let rule = |is_kept: bool, rule: &str| if is_kept { Ok(()) } else { Err(rule.to_owned()) };
    let is_backward = matches!(which, Which::Backward(..));
    let is_long = matches!(which, Which::Forward(_, Place::Long));
    // A long row may be in a block or in a cluster.
    let is_cluster = match which {
        Which::Forward(_, Place::Long) => None,
        Which::Forward(_, place) | Which::Backward(_, place) => Some(matches!(place, Place::Cluster)),
        Which::ToCodes(_) | Which::FindsScale => Some(false),
    };
    rule((1..=MOST_THREADS).contains(&threads_per_row), "threads are from 1 to 1024")?;
    rule((1..=MOST_THREADS).contains(&groups) && groups.is_power_of_two(), "groups are a power of two up to 1024")?;
    rule(
        threads_per_row.is_multiple_of(32) || (threads_per_row < 32 && threads_per_row.is_power_of_two()),
        "threads are a power of two or a multiple of 32",
    )?;
    let threads = threads_per_row * groups;
    rule(threads.is_multiple_of(32) && threads <= MOST_THREADS, "a block has whole warps, and up to 1024 threads")?;
    rule(threads_per_row <= 32 || groups <= MOST_BARRIERS, "up to 8 groups of several warps share a block")?;
    rule(cluster.is_power_of_two() && cluster <= MOST_CLUSTER, "a cluster is a power of two up to 8")?;
    rule(is_cluster.is_none_or(|is| is == (cluster > 1)), "a ladder of clusters has clusters, one of blocks has none")?;
    rule((1..=MOST_BLOCKS).contains(&blocks_per_sm), "blocks are from 1 to 32")?;
    rule(threads * blocks_per_sm <= MOST_THREADS_PER_SM, "threads of all blocks of a multiprocessor are up to 2048")?;
    let is_plain = !matches!(which, Which::Forward(_, Place::Block) | Which::Backward(..));
    rule(!is_plain || unroll == 1, "unroll is 1 here")?;
    rule([1, 2, 4].contains(&unroll) && !(is_backward && unroll > 2), "unroll is 1, 2 or, in forward, 4")?;
    rule(is_backward || cluster == 1 || groups == 1, "a cluster of forward has one row")?;
    rule(!is_long || groups == 1, "a long row has a block of its own")?;
    if !is_backward {
        return rule(stages == 0 && !is_overlapped, "forward has no stages");
    }
    rule((2..=4).contains(&stages), "stages are from 2 to 4")?;
    rule(threads >= LEAST_BACKWARD_THREADS, "backward has 128 threads at least")?;
    let senders = groups * threads_per_row.div_ceil(32) * cluster;
    let is_exchanged = threads_per_row > 32 || cluster > 1;
    rule(!is_exchanged || senders * unroll <= MOST_SENT, "up to 128 sums are exchanged at a time")?;
    rule(
        !is_overlapped || groups * threads_per_row.div_ceil(32) * unroll <= MOST_SENT,
        "up to 128 sums are kept at a time",
    )?;
    rule(threads_per_row >= cluster, "a thread of a row for each block of its cluster")?;
    // With few rows, backward splits the rows of a column among the threads of a warp, and the
    // warps of a block.
    let warps = u64::from(threads / 32);
    let split = shared(MOST_SPLIT_ROWS.div_ceil(warps), (32 / COLUMN_LANES).into()) + serial(warps);
    rule(split <= policy_depth_rows(MOST_SPLIT_ROWS as usize) as u64, "a thread sums too many rows: use more threads")
}

/// Checks the promises to callers for one length: chains of additions, and the workspace.
fn check_length(name: Name, length: u32, tile: &Tile, built_in: &Tile) -> Result<(), String> {
    let packs = |tile: &Tile| length.div_ceil(tile.cluster * tile.threads_per_row);
    // The shortest row with this many packs.
    let cols = ((length - 1) * name.pack() + 1) as usize;
    let sized = Tile { pack: name.pack(), packs: packs(tile), ..*tile };
    let (chain, most) = (chain::of_row(name.which.program(), &sized, cols), sum_depth(cols) as u64);
    if chain.is_some_and(|chain| chain > most) {
        return Err(format!("{} serial additions are more than {most}", chain.unwrap_or_default()));
    }
    if let Which::Backward(_, place) = name.which {
        let blocks = backward::most_blocks(tile);
        let most = backward::most_blocks(built_in).max(backward::most_tuned_blocks(length));
        if blocks > most {
            return Err(format!("{blocks} blocks with rows of their own are more than {most}"));
        }
        // The packs of one step, over all rows of a block.
        let owned = |tile: &Tile| packs(tile) * tile.threads() * tile.unroll;
        let most = owned(built_in).max(backward::most_owned_packs(matches!(place, Place::Cluster)));
        if owned(tile) > most {
            return Err(format!("{} packs of a block are more than {most}", owned(tile)));
        }
    }
    Ok(())
}
