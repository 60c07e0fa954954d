//! The longest chain of additions in a sum over a row, as the kernels add (math.md, section 4): what tiles are held to.
//!
//! Additions of zeros are exact and do not count: the first of a sum, and those of columns that are not there. So no chain is longer
//! than the terms less one, however the rest is counted.

use rmsnorm_gpu::chain::{serial, tree};

use super::{BLOCK_VISITS, Program, TREE_SENDERS, Tile};

/// `RowSums` of reduce.cuh: the lanes of a warp, then what the warps of all blocks have sent.
pub(super) fn exchange(tile: &Tile) -> u64 {
    let senders = u64::from(tile.threads_per_row.div_ceil(32) * tile.cluster);
    let lanes = if senders > 16 { 32 } else { 16 };
    let received =
        if senders <= TREE_SENDERS.into() { tree(senders) } else { serial(senders.div_ceil(lanes)) + tree(lanes) };
    tree(tile.threads_per_row.min(32).into()) + received
}

/// So many visits in blocks of [`BLOCK_VISITS`], one after the other, and then the blocks.
fn in_blocks(visits: u64) -> u64 {
    serial(visits.min(BLOCK_VISITS)) + serial(visits.div_ceil(BLOCK_VISITS))
}

/// The longest chain in a sum over a row; `None` if the program has no such sum.
pub(super) fn of_row(program: Program, tile: &Tile, cols: usize) -> Option<u64> {
    let (pack, packs, cols) = (u64::from(tile.pack), u64::from(tile.packs), cols as u64);
    let columns = [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].into_iter().map(u64::from).product();
    let turns = cols.div_ceil(columns);
    // Layer norm adds the deviations of a pack's two halves, and then these sums one after the other. The squares have a sum for each
    // place of a pack, which a tree joins: that chain is no longer. RMS norm's tiles are held to the deviations' as well.
    let deviations = 1 + serial(pack / 2);
    let thread = match program {
        Program::Forward | Program::ForwardLong | Program::QuantizedForward => serial(packs) + deviations,
        #[cfg(feature = "peers")]
        Program::ReduceForward | Program::ReduceForwardRows | Program::ForwardExchange => serial(packs) + deviations,
        // Two additions more join what the warps send.
        Program::ForwardCluster => serial(packs) + deviations + 2,
        // A sum for each pack.
        Program::Backward | Program::BackwardSplit => serial(packs) + serial(pack),
        Program::ForwardStreaming | Program::QuantizedForwardStreaming => in_blocks(turns) + deviations,
        // Without the deviations: of layer norm, math.md, 5.5, counts three such sums.
        Program::ColumnStatistics | Program::BackwardStatistics => serial(turns) + tree(pack),
        Program::BackwardRowSums => in_blocks(turns) + serial(pack),
        Program::BackwardColumns
        | Program::ReducePartials
        | Program::TransposeCodes
        | Program::Columnwise
        | Program::Clear
        | Program::ForwardGiven
        | Program::BackwardGiven => {
            return None;
        }
        #[cfg(feature = "peers")]
        Program::GatherNumbers => return None,
    };
    Some((thread + exchange(tile)).min(serial(cols)))
}
