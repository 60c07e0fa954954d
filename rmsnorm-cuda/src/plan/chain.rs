//! The longest chain of serial additions in a sum over a row, as the kernels add (math.md, section
//! 4). Tiles must stay within the error bound.
//!
//! Additions of zero are exact and do not count: the first addition of a sum, and columns past the
//! end. So no chain is longer than the number of terms minus one.

use rmsnorm_gpu::chain::{serial, tree};

use super::{BLOCK_VISITS, Program, TREE_SENDERS, Tile};

/// `RowSums` of reduce.cuh: the lanes of a warp, then the sums that the warps of all blocks have
/// sent.
pub(super) fn exchange(tile: &Tile) -> u64 {
    let senders = u64::from(tile.threads_per_row.div_ceil(32) * tile.cluster);
    let lanes = if senders > 16 { 32 } else { 16 };
    let received =
        if senders <= TREE_SENDERS.into() { tree(senders) } else { serial(senders.div_ceil(lanes)) + tree(lanes) };
    tree(tile.threads_per_row.min(32).into()) + received
}

/// Blocks of [`BLOCK_VISITS`] serial visits, then the sums of the blocks.
fn in_blocks(visits: u64) -> u64 {
    serial(visits.min(BLOCK_VISITS)) + serial(visits.div_ceil(BLOCK_VISITS))
}

/// The longest chain of a sum over a row; `None` if the program has no such sum.
pub(super) fn of_row(program: Program, tile: &Tile, cols: usize) -> Option<u64> {
    let (pack, packs, cols) = (u64::from(tile.pack), u64::from(tile.packs), cols as u64);
    let columns = [tile.pack, tile.packs, tile.threads_per_row, tile.cluster].into_iter().map(u64::from).product();
    let turns = cols.div_ceil(columns);
    // Layer norm adds the deviations of a pack's two halves, and then these sums serially. Squares
    // have one sum per place of a pack, joined by a tree, so their chain is no longer. Tiles of RMS
    // norm must meet the bound of deviations too.
    let deviations = 1 + serial(pack / 2);
    let thread = match program {
        Program::Forward | Program::ForwardLong | Program::QuantizedForward | Program::QuantizedForwardTransposed => {
            serial(packs) + deviations
        }
        #[cfg(feature = "peers")]
        Program::ReduceForward
        | Program::ReduceForwardPacks
        | Program::ReduceForwardRows
        | Program::ForwardExchange => serial(packs) + deviations,
        // Two more additions join the sums of the warps.
        Program::ForwardCluster => serial(packs) + deviations + 2,
        // Each pack has its own sum.
        Program::Backward | Program::BackwardSplit => serial(packs) + serial(pack),
        Program::ForwardStreaming | Program::QuantizedForwardStreaming => in_blocks(turns) + deviations,
        // Without the deviations: math.md, 5.5, counts three such sums for layer norm.
        Program::PartialStatistics | Program::PartialBackwardStatistics => serial(turns) + tree(pack),
        Program::BackwardRowSums => in_blocks(turns) + serial(pack),
        Program::BackwardColumns
        | Program::ReducePartials
        | Program::TransposeCodes
        | Program::Columnwise
        | Program::Clear
        | Program::ForwardWithStatistics
        | Program::BackwardWithStatistics => {
            return None;
        }
        #[cfg(feature = "peers")]
        Program::GatherNumbers => return None,
    };
    Some((thread + exchange(tile)).min(serial(cols)))
}
