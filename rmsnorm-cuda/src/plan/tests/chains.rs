//! The longest chain of additions, as the kernels add (math.md, section 4).
//!
//! Additions of zero are exact and do not count: the first addition of a sum, and columns or rows
//! past the end. So no chain is longer than the number of terms minus one.

use rmsnorm_gpu::chain::{serial, shared};

use super::super::{COLUMN_LANES, chain};
use super::*;

/// The longest chain in a sum over a row; `None` if the program has no such sum.
pub(super) fn of_row(key: &KernelKey, cols: usize) -> Option<u64> {
    chain::of_row(key.program, &key.tile, cols)
}

/// The longest chain in `dweight` and `dbias` with `GradReduction::Partials`.
pub(super) fn of_gradients(plan: &Plan, rows: usize) -> u64 {
    let rows = rows as u64;
    let additions = launches(plan).map(|Launch { key: KernelKey { program, tile, .. }, cluster, threads, .. }| {
        let groups = u64::from(tile.groups);
        match program {
            Program::Backward | Program::BackwardColumns | Program::BackwardWithStatistics => {
                shared(rows.div_ceil(plan.chunks), groups)
            }
            // The groups of a warp, the warps, whose sums are divided among lanes, and these lanes.
            Program::ReducePartials => {
                let (in_warp, warps) = (32 / u64::from(tile.threads_per_row), u64::from(threads / 32));
                shared(plan.partial_rows.div_ceil(groups) * in_warp, in_warp) + shared(warps, in_warp)
            }
            // The rows of a thread, the threads of a warp, the warps of a block, the blocks of a
            // cluster.
            Program::BackwardSplit => {
                let (threads, cluster) = (u64::from(threads), u64::from(cluster));
                let in_warp = 32 / u64::from(COLUMN_LANES);
                shared(rows.div_ceil(threads / 32 * cluster), in_warp) + serial(threads / 32) + serial(cluster)
            }
            Program::Forward
            | Program::ForwardCluster
            | Program::ForwardLong
            | Program::ForwardStreaming
            | Program::QuantizedForward
            | Program::QuantizedForwardStreaming
            | Program::QuantizedForwardTransposed
            | Program::TransposeCodes
            | Program::Columnwise
            | Program::Clear
            | Program::BackwardRowSums
            | Program::PartialStatistics
            | Program::ForwardWithStatistics
            | Program::PartialBackwardStatistics => 0,
            #[cfg(feature = "peers")]
            Program::ReduceForward
            | Program::ReduceForwardPacks
            | Program::ReduceForwardRows
            | Program::GatherNumbers
            | Program::ForwardExchange => 0,
        }
    });
    additions.sum::<u64>().min(serial(rows))
}

#[test]
fn chains_are_counted_as_the_kernels_add() {
    let tile = Tile { pack: 8, packs: 4, threads_per_row: 256, ..Tile::NONE };
    let key = |program, tile| KernelKey {
        tile,
        program,
        ..launches(&Plans::calls()[0].plan(1, 1, &Caps::t4())).next().expect("a kernel").key
    };
    // 3 additions of packs, 1 of their halves and 3 within a half, 5 over lanes, 3 over 8 warps.
    assert_eq!(of_row(&key(Program::Forward, tile), 8192), Some(15));
    // 3 additions of packs, 7 within a pack, 5 over lanes; 32 warps of 4 blocks: 3 of 32 at a time,
    // 5 over lanes.
    let cluster = Tile { threads_per_row: 1024, cluster: 4, ..tile };
    assert_eq!(of_row(&key(Program::Backward, cluster), 131072), Some(23));
    // 15 additions of packs, 4 within a pack, 5 over lanes, 2 of moments; 32 warps of 8 blocks: 5
    // over lanes.
    let registers = Tile { packs: 16, threads_per_row: 128, cluster: 8, ..tile };
    assert_eq!(of_row(&key(Program::ForwardCluster, registers), 131072), Some(31));
    // 2 visits (1 addition), 4 within a pack, and 8 as above.
    assert_eq!(of_row(&key(Program::ForwardStreaming, Tile { packs: 1, ..tile }), 2049), Some(13));
    // 2 visits, 7 within a pack, and 8 as above.
    assert_eq!(of_row(&key(Program::BackwardRowSums, Tile { packs: 1, ..tile }), 2049), Some(16));
    // 63 of a block's visits, 1 of two blocks, 7 and 8 as above.
    assert_eq!(of_row(&key(Program::BackwardRowSums, Tile { packs: 1, ..tile }), 65 * 2048), Some(79));
    // Three terms take two additions, wherever they are.
    assert_eq!(of_row(&key(Program::Backward, tile), 3), Some(2));
}
