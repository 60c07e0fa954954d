//! Tiles that are worth a measurement, chosen with a model (see the head of `tuning.rs`): bytes in
//! flight per multiprocessor, idle lanes, and registers.

use super::data::{Name, Place, Which};
use crate::caps::Caps;
use crate::plan::{REGISTERS_PER_SM, RESERVED_BYTES, Tile};

/// The best number of bytes in flight per multiprocessor: the middle of 64 to 128 KiB.
const BYTES_UNDER_WAY: f64 = 90.0 * 1024.0;

/// Bytes of a pack.
const PACK_BYTES: u32 = 16;

/// Threads per row that leave few lanes idle for some length.
const THREADS: [u32; 21] =
    [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024];

/// Blocks per multiprocessor.
const BLOCKS: [u32; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32];

/// Tiles for rows of up to `packs` packs, the best first. Some may not be legal.
pub(crate) fn tiles(name: Name, packs: u32, caps: &Caps) -> Vec<Tile> {
    let mut scored: Vec<(f64, Tile)> = Vec::new();
    for (cluster, threads_per_row) in rows(name.which, caps) {
        let threads_of_row = cluster * threads_per_row;
        let each = packs.div_ceil(threads_of_row);
        if each > name.which.most_packs() || 2 * packs <= threads_of_row && threads_of_row > 32 {
            continue;
        }
        for (groups, unroll) in sides(name.which, threads_per_row) {
            let tile = Tile { threads_per_row, groups, cluster, unroll, ..Tile::NONE };
            for tile in stages(name.which, tile) {
                scored.extend(BLOCKS.iter().filter_map(|&blocks_per_sm| {
                    let tile = Tile { blocks_per_sm, ..tile };
                    Some((score(name.which, &tile, packs, caps)?, tile))
                }));
            }
        }
    }
    scored.sort_by(|one, other| one.0.total_cmp(&other.0));
    scored.into_iter().map(|(_, tile)| tile).collect()
}

/// Blocks per row, and threads of each.
fn rows(which: Which, caps: &Caps) -> Vec<(u32, u32)> {
    let clusters: &[u32] = match which {
        Which::Forward(_, Place::Cluster) | Which::Backward(_, Place::Cluster) => &[2, 4, 8],
        Which::Forward(_, Place::Long) => &[1, 2, 4, 8],
        Which::Forward(_, Place::Block) | Which::Backward(..) | Which::ToCodes(_) | Which::FindsScale => &[1],
    };
    let clusters = clusters.iter().filter(|cluster| **cluster <= caps.max_cluster);
    clusters.flat_map(|cluster| THREADS.map(|threads| (*cluster, threads))).collect()
}

/// Groups, and rows in flight per group.
fn sides(which: Which, threads_per_row: u32) -> Vec<(u32, u32)> {
    let groups = (0..=10).map(|bits| 1u32 << bits).filter(|groups| {
        let threads = groups * threads_per_row;
        // With several rows, blocks of more than 512 threads gain nothing and wait longer at
        // barriers.
        threads.is_multiple_of(32)
            && threads <= if *groups > 1 { 512 } else { 1024 }
            && (*groups <= 8 || threads_per_row <= 32)
    });
    let unroll: &[u32] = match which {
        Which::Forward(_, Place::Block) | Which::Backward(_, Place::Block) => &[1, 2],
        Which::Forward(..) | Which::Backward(..) | Which::ToCodes(_) | Which::FindsScale => &[1],
    };
    let has_one = matches!(which, Which::Forward(_, Place::Cluster | Place::Long));
    let groups = groups.filter(|groups| !has_one || *groups == 1);
    groups.flat_map(|groups| unroll.iter().map(move |unroll| (groups, *unroll))).collect()
}

/// The tile with each number of steps in shared memory.
fn stages(which: Which, tile: Tile) -> Vec<Tile> {
    match which {
        Which::Backward(_, place) => {
            let rings = [2, 3].map(|stages| Tile { stages, ..tile });
            let overlapped = Tile { stages: 3, is_overlapped: true, ..tile };
            let is_overlapped = place == Place::Cluster && tile.cluster == 8;
            rings.into_iter().chain(is_overlapped.then_some(overlapped)).collect()
        }
        Which::Forward(..) | Which::ToCodes(_) | Which::FindsScale => vec![tile],
    }
}

/// The distance of a tile from the model's optimum; `None` if it does not fit the device.
fn score(which: Which, tile: &Tile, packs: u32, caps: &Caps) -> Option<f64> {
    let each = packs.div_ceil(tile.cluster * tile.threads_per_row);
    let (threads, blocks) = (tile.threads(), tile.blocks_per_sm);
    let tensors = match which {
        Which::Forward(1 | 3, _) | Which::Backward(..) => 2,
        Which::Forward(..) | Which::ToCodes(_) | Which::FindsScale => 1,
    };
    // Registers for each pack of a thread, and for the rest of a thread.
    let (of_pack, besides) = match which {
        // Layer norm has two sums, and its bias is in flight while they are exchanged.
        Which::Forward(2 | 3, Place::Cluster) => (8, 56),
        Which::Forward(_, Place::Cluster) => (8, 24),
        Which::Forward(_, Place::Long) => (2, 32),
        Which::Forward(_, Place::Block) => (4 * tile.unroll, 20),
        Which::Backward(0, _) => (12, 40),
        Which::Backward(..) => (20, 48),
        Which::ToCodes(_) | Which::FindsScale => (4, 32),
    };
    if threads * blocks > caps.threads_per_sm || threads * blocks * (besides + of_pack * each) > REGISTERS_PER_SM {
        return None;
    }
    let step = tensors * PACK_BYTES * each * threads * tile.unroll;
    let shared = match which {
        Which::Backward(..) => step * tile.stages,
        Which::Forward(_, Place::Long) => step,
        Which::Forward(..) | Which::ToCodes(_) | Which::FindsScale => 0,
    };
    let shared = shared + RESERVED_BYTES as u32;
    if shared > caps.shared_per_block_optin || shared * blocks > caps.shared_per_sm {
        return None;
    }
    let under_way = f64::from(step * blocks * tile.stages.max(1));
    let idle = 1.0 - f64::from(packs) / f64::from(each * tile.cluster * tile.threads_per_row);
    // Many rows of a block wait for the slowest, and a cluster waits for its blocks.
    let waits = 0.03 * f64::from(tile.groups.ilog2().saturating_sub(2)) + 0.05 * f64::from(tile.cluster.ilog2());
    Some((under_way / BYTES_UNDER_WAY).log2().abs() + 3.0 * idle + waits)
}
