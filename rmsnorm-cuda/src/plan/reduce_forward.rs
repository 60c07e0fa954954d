//! Plans of forward of a sum over ranks: a tile for its rows, and the launches of a call.

use rmsnorm_spec::{DType, Error, Problem};

use super::ranks::{Group, Plan, SLOT_BYTES};
use super::{KernelKey, MOST_BLOCKS, Program, RESERVED_BYTES, Reads, Tile, key};
use crate::caps::Caps;

/// The most threads of a block, for a row in registers, with up to 128 registers each.
const MOST_HELD: usize = 512;
/// The same with 64 registers each.
const MOST_LEAN: usize = 1024;
/// The most threads of a block, for a row in shared memory.
const MOST_THREADS: usize = 1024;

/// The plan of a call with at least one row, in one block for each row; addresses and strides are
/// multiples of `access_bytes`.
///
/// # Errors
/// `Unsupported` if a row is too long for the device, or for the group's memory.
pub(super) fn plan(problem: &Problem, access_bytes: u32, group: &Group, caps: &Caps) -> Result<Plan, Error> {
    let (activation, stream) = (problem.dtypes.activation, problem.dtypes.residual);
    // x is always sent with the widest access, also if other tensors have a lower alignment.
    let pack = SLOT_BYTES / activation.size();
    let packs = problem.cols.div_ceil(pack);
    let row_bytes = packs.saturating_mul(SLOT_BYTES);
    if row_bytes > group.bytes {
        let rule = format!(
            "bytes of the group is too small: a row of x takes {row_bytes} bytes, got {}: pass the bytes of one call's x",
            group.bytes
        );
        return Err(Error::Unsupported { rule });
    }
    let (tile, shared_bytes) = match held(packs, group.ranks, pack * stream.size()) {
        Some(tile) => (tile, 0),
        None => shared(problem.cols, pack, stream, group.ranks, caps)?,
    };
    let tile = Tile { pack: pack as u32, access_bytes, ..tile };
    let mut key = KernelKey { ranks: group.ranks, ..key(problem, Program::ReduceForward, tile) };
    // The sum is rounded to this dtype, with or without a residual.
    key.call.dtypes.residual = stream;
    Ok(Plan {
        key,
        shared_bytes,
        rows_per_launch: group.bytes / row_bytes,
        owners: 1,
        rows_per_block: 1,
        most_blocks: group.most_blocks(&tile, caps),
        most_admitting: group.most_admitting(caps),
    })
}

/// Blocks of a cluster that has one row.
const CLUSTER: u32 = 4;

/// The fewest packs of a row that a cluster has.
const FEWEST_PACKS: usize = 896;

/// The most rows of a call that should have a cluster for each; `tile` is the row's in one block. It
/// is the same on all ranks.
pub(super) fn most_in_clusters(tile: &Tile, cols: usize, ranks: u32, caps: &Caps) -> usize {
    let is_long = cols.div_ceil(tile.pack as usize) >= FEWEST_PACKS;
    if CLUSTER > caps.max_cluster || !tile.reads.keeps_row || !is_long {
        return 0;
    }
    if ranks <= 2 { 8 } else { 2 }
}

/// The most clusters of this rank that can run at once: half of its multiprocessors have room for a
/// block of each, wherever they are.
pub(super) fn room_for_clusters(group: &Group, caps: &Caps) -> usize {
    (caps.sms / group.sharers / 2 / CLUSTER) as usize
}

/// The plan with the threads of a row in the blocks of a cluster: several multiprocessors then send
/// the row, wait for it and empty its slots. The bits stay the same.
///
/// Microseconds for rows of 8192 bf16 on two H200s, with four ranks of eight on each; one block is
/// in brackets (2026-11-30):
///
/// | rows | 2 ranks | 4 ranks | 8 ranks |
/// |---|---|---|---|
/// | 1 | 3.18 (3.61) | 4.20 (4.59) | 5.30 (7.36) |
/// | 2 | 3.58 (3.74) | 4.41 (4.65) | 5.91 (7.50) |
/// | 4 | 3.72 (4.11) | 5.09 (4.69) | 7.72 (7.87) |
/// | 8 | 4.11 (4.15) | 5.91 (5.55) | |
pub(super) fn in_clusters(plan: Plan, group: &Group, caps: &Caps) -> Plan {
    let tile = plan.key.tile;
    // Few threads have registers for two packs at a time.
    let reads = Reads { batch: 2, ..tile.reads };
    let tile =
        Tile { threads_per_row: tile.threads_per_row / CLUSTER, cluster: CLUSTER, blocks_per_sm: 1, reads, ..tile };
    Plan { key: KernelKey { tile, ..plan.key }, most_blocks: room_for_clusters(group, caps), ..plan }
}

/// A tile whose row stays in registers, with `h_bytes` for each pack of h; `None` if the row is too
/// long.
///
/// Microseconds in bf16 on two H200s (2026-11-25):
///
/// | cols, threads x packs | 8 rows | 64 | 256 | 4096 |
/// |---|---|---|---|---|
/// | 8192, 1024 x 1 | 3.90 | 6.40 | 16.1 | 192 |
/// | 8192, 512 x 2 | 4.02 | 6.70 | 16.1 | 193 |
/// | 4096, 512 x 1 | 3.23 | 4.59 | 9.2 | 97.8 |
/// | 4096, 256 x 2 | 3.27 | 4.74 | 9.4 | 98.6 |
/// | 4096, 512 x 1, 128 registers | 3.26 | 4.65 | 9.8 | 100 |
fn held(packs: usize, ranks: u32, h_bytes: usize) -> Option<Tile> {
    // A thread gets 64 registers if they suffice, otherwise 128: the compiler would spill.
    let is_lean = packs <= MOST_LEAN && ranks <= 2 && h_bytes == SLOT_BYTES;
    let per_thread = if is_lean { 1 } else { packs.div_ceil(MOST_HELD) };
    if per_thread > 2 {
        return None;
    }
    let threads_per_sm = if is_lean { MOST_LEAN } else { MOST_HELD } as u32;
    // A cluster divides long rows by whole warps.
    let warps = if packs >= FEWEST_PACKS { CLUSTER } else { 1 };
    let threads_per_row = packs.div_ceil(per_thread).next_multiple_of(32 * warps as usize) as u32;
    let blocks_per_sm = (threads_per_sm / threads_per_row).min(MOST_BLOCKS);
    let reads = Reads { keeps_row: true, batch: batch(ranks), ..Tile::NONE.reads };
    Some(Tile { packs: per_thread as u32, threads_per_row, groups: 1, blocks_per_sm, reads, ..Tile::NONE })
}

/// A tile that keeps h in shared memory, and the bytes that it needs there.
fn shared(cols: usize, pack: usize, stream: DType, ranks: u32, caps: &Caps) -> Result<(Tile, u32), Error> {
    let pack_bytes = pack * stream.size();
    let room = (caps.shared_per_block_optin as usize).saturating_sub(RESERVED_BYTES);
    let most_per_thread = room / (MOST_THREADS * pack_bytes);
    let most = (most_per_thread * MOST_THREADS).max(2 * MOST_HELD) * pack;
    if cols > most {
        let rule =
            format!("a sum over ranks takes at most {most} columns with {stream} residuals on this device, got {cols}");
        return Err(Error::Unsupported { rule });
    }
    let packs = cols.div_ceil(pack);
    // With many ranks, 64 registers do not suffice. 1024 rows of 16,384 bf16 on eight ranks take 477 us
    // with 1024 threads and 388 us with 512. On four ranks they take 196 and 201 us.
    let per_thread = packs.div_ceil(if ranks <= 4 { MOST_THREADS } else { MOST_HELD });
    let threads_per_row = packs.div_ceil(per_thread).next_multiple_of(32) as u32;
    let reads = Reads { keeps_row: false, batch: batch(ranks), ..Tile::NONE.reads };
    let tile = Tile { packs: per_thread as u32, threads_per_row, groups: 1, blocks_per_sm: 1, reads, ..Tile::NONE };
    Ok((tile, (per_thread * threads_per_row as usize * pack_bytes) as u32))
}

/// Packs that a thread waits for together: with more ranks, registers suffice for one only.
fn batch(ranks: u32) -> u32 {
    if ranks <= 2 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rmsnorm_spec::depth::sum_depth;
    use rmsnorm_spec::{DTypes, Norm, Tensor};

    use super::*;
    use crate::plan::chain;
    use crate::plan::ranks::Round;
    use crate::plan::reduce_forward_packs::plan as of_call;

    const MIB: usize = 1 << 20;
    const BF16: DTypes = DTypes::uniform(DType::Bf16);
    const F32: DTypes = DTypes::uniform(DType::F32);
    const STREAM_F32: DTypes = BF16.widened(false, true);
    const DEVICES: [Caps; 3] = [Caps::h200(), Caps::a100(), Caps::t4()];

    fn problem(rows: usize, cols: usize, dtypes: DTypes) -> Problem {
        let tensors = [Tensor::Weight, Tensor::Residual, Tensor::ResidualOut];
        Problem { dtypes, ..Problem::forward(Norm::Rms, rows, cols, dtypes.activation, &tensors) }
    }

    fn group(ranks: u32) -> Group {
        Group { ranks, sharers: 1, bytes: 64 * MIB }
    }

    /// Threads, packs of each, elements of a pack, blocks per multiprocessor, whether the row is
    /// held, KiB of shared memory.
    #[test]
    fn tiles_follow_the_length_of_a_row() {
        for (dtypes, ranks, cols, expected) in [
            (BF16, 2, 1, (32, 1, 8, 16, true, 0)),
            (BF16, 2, 256, (32, 1, 8, 16, true, 0)),
            (BF16, 2, 257, (64, 1, 8, 16, true, 0)),
            (BF16, 2, 1024, (128, 1, 8, 8, true, 0)),
            (BF16, 2, 4096, (512, 1, 8, 2, true, 0)),
            (BF16, 4, 4096, (512, 1, 8, 1, true, 0)),
            (BF16, 8, 1024, (128, 1, 8, 4, true, 0)),
            (STREAM_F32, 2, 4096, (512, 1, 8, 1, true, 0)),
            (BF16, 2, 4097, (544, 1, 8, 1, true, 0)),
            (BF16, 2, 8192, (1024, 1, 8, 1, true, 0)),
            (BF16, 4, 4097, (288, 2, 8, 1, true, 0)),
            (BF16, 8, 8192, (512, 2, 8, 1, true, 0)),
            (BF16, 2, 8193, (544, 2, 8, 1, false, 17)),
            (BF16, 2, 16384, (1024, 2, 8, 1, false, 32)),
            (BF16, 2, 65536, (1024, 8, 8, 1, false, 128)),
            (STREAM_F32, 2, 16384, (1024, 2, 8, 1, false, 64)),
            (F32, 2, 2048, (512, 1, 4, 2, true, 0)),
            (F32, 2, 4096, (1024, 1, 4, 1, true, 0)),
            (F32, 4, 4096, (512, 2, 4, 1, true, 0)),
            (F32, 2, 8192, (1024, 2, 4, 1, false, 32)),
        ] {
            let Plan { key, shared_bytes, .. } =
                plan(&problem(9, cols, dtypes), 16, &group(ranks), &Caps::h200()).expect("a plan");
            let Tile { threads_per_row, packs, pack, blocks_per_sm, reads, .. } = key.tile;
            let got = (threads_per_row, packs, pack, blocks_per_sm, reads.keeps_row, shared_bytes / 1024);
            assert_eq!(got, expected, "{dtypes} {ranks} ranks, {cols} columns");
            assert_eq!((key.ranks, key.call.dtypes.residual), (ranks, dtypes.residual));
        }
    }

    /// Blocks of a cluster, threads of a block, and blocks of the launch.
    #[test]
    fn few_long_rows_are_on_clusters() {
        for (ranks, sharers, caps, rows, cols, expected) in [
            (2, 1, Caps::h200(), 1, 8192, (4, 256, 4)),
            (2, 1, Caps::h200(), 8, 8192, (4, 256, 32)),
            (2, 1, Caps::h200(), 9, 8192, (1, 1024, 9)),
            (2, 1, Caps::h200(), 8, 7161, (4, 224, 32)),
            (2, 1, Caps::h200(), 1, 7160, (1, 896, 1)),
            (8, 1, Caps::h200(), 2, 8192, (4, 128, 8)),
            (8, 1, Caps::h200(), 3, 8192, (1, 512, 3)),
            // Four ranks share the device.
            (8, 4, Caps::h200(), 2, 8192, (4, 128, 8)),
            // Half of its part has room for one cluster, or for none.
            (8, 8, Caps { sms: 64, ..Caps::h200() }, 1, 8192, (4, 128, 4)),
            (8, 8, Caps { sms: 63, ..Caps::h200() }, 1, 8192, (1, 512, 1)),
            // In shared memory.
            (2, 1, Caps::h200(), 1, 8200, (1, 544, 1)),
            (2, 1, Caps::a100(), 1, 8192, (1, 1024, 1)),
        ] {
            let group = Group { sharers, ..group(ranks) };
            let plan = of_call(&problem(rows, cols, BF16), 16, &group, &caps).expect("a plan");
            let grid = plan.rounds(rows).next().expect("a launch").grid;
            let tile = plan.key.tile;
            assert_eq!((tile.cluster, tile.threads_per_row, grid), expected, "{ranks} ranks, {rows} x {cols}");
        }
    }

    /// The next kernel is admitted early beside few blocks of a rank that has its device alone.
    #[test]
    fn next_kernels_are_admitted_where_there_is_room() {
        for (sharers, rows, expected) in [(1, 1, true), (1, 66, true), (1, 67, false), (2, 1, false)] {
            let group = Group { sharers, ..group(2) };
            let plan = plan(&problem(rows, 4096, BF16), 16, &group, &Caps::h200()).expect("a plan");
            let rounds: Vec<_> = plan.rounds(rows).map(|round| round.admits_next).collect();
            assert_eq!(rounds, [expected], "{sharers} ranks on the device, {rows} rows");
        }
    }

    #[test]
    fn without_a_residual_the_sum_keeps_its_dtype() {
        let problem = Problem { dtypes: STREAM_F32, ..Problem::forward(Norm::Rms, 1, 64, DType::Bf16, &[]) };
        let plan = plan(&problem, 16, &group(2), &Caps::h200()).expect("a plan");
        assert_eq!(plan.key.call.dtypes.residual, DType::F32);
        assert!(!plan.key.call.tensors.has(Tensor::Residual));
    }

    /// First row, rows and blocks of each launch.
    #[test]
    fn launches_have_what_fits_the_memory_and_the_device() {
        for (rows, cols, group, expected) in [
            (1, 4096, group(2), vec![(0, 1, 1)]),
            (300, 4096, group(2), vec![(0, 300, 264)]),
            (300, 4096, Group { sharers: 2, ..group(2) }, vec![(0, 300, 132)]),
            (300, 4096, Group { ranks: 8, sharers: 8, bytes: MIB }, vec![(0, 128, 16), (128, 128, 16), (256, 44, 16)]),
            (3, 4096, Group { bytes: 8192, ..group(2) }, vec![(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
            // A row of 4097 elements takes 513 slots.
            (3, 4097, Group { bytes: 2 * 513 * 16 + 15, ..group(2) }, vec![(0, 2, 2), (2, 1, 1)]),
            (0, 4096, group(2), vec![]),
        ] {
            let plan = plan(&problem(rows, cols, BF16), 16, &group, &Caps::h200()).expect("a plan");
            let rounds: Vec<_> =
                plan.rounds(rows).map(|Round { first_row, rows, grid, .. }| (first_row, rows, grid)).collect();
            assert_eq!(rounds, expected, "{rows} x {cols}, {group:?}");
        }
    }

    #[test]
    fn what_is_too_long_is_refused_by_its_limit() {
        let refused = |cols, dtypes, group: Group, caps: &Caps| match plan(&problem(1, cols, dtypes), 16, &group, caps)
        {
            Err(Error::Unsupported { rule }) => Some(rule),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        };
        for (caps, dtypes, most) in [
            (Caps::h200(), BF16, 106_496),
            (Caps::h200(), F32, 53248),
            (Caps::h200(), STREAM_F32, 49152),
            (Caps::a100(), BF16, 73728),
            (Caps::a100(), F32, 36864),
            (Caps::t4(), BF16, 24576),
            (Caps::t4(), F32, 12288),
            (Caps::t4(), STREAM_F32, 8192),
        ] {
            assert_eq!(refused(most, dtypes, group(2), &caps), None, "{dtypes}");
            let rule = refused(most + 1, dtypes, group(2), &caps).expect("a limit");
            assert!(
                rule.contains(&format!("at most {most} columns")) && rule.ends_with(&(most + 1).to_string()),
                "{rule}"
            );
        }
        let small = Group { bytes: 8191, ..group(2) };
        let rule = refused(4096, BF16, small, &Caps::h200()).expect("no room");
        assert!(rule.contains("takes 8192 bytes, got 8191"), "{rule}");
    }

    /// In every plan, blocks fit the device, tiles cover their rows, and chains of additions are as
    /// short as the policy requires.
    #[test]
    fn every_tile_is_sound() {
        let cols = (1..=300).chain((300..70_000).step_by(97)).chain([4096, 8192, 16384, 32768, 65536]);
        for cols in cols {
            for (caps, dtypes, ranks, rows) in DEVICES
                .iter()
                .flat_map(|caps| [BF16, F32, STREAM_F32].map(|dtypes| (caps, dtypes)))
                .flat_map(|(caps, dtypes)| {
                    [(1, 9), (2, 9), (3, 9), (8, 9), (2, 1), (8, 1)].map(|(ranks, rows)| (caps, dtypes, ranks, rows))
                })
            {
                let Ok(plan) = of_call(&problem(rows, cols, dtypes), 16, &group(ranks), caps) else { continue };
                let tile = plan.key.tile;
                let step = (tile.pack * tile.threads_per_row * tile.cluster) as usize;
                let owned = tile.packs as usize * step;
                let what = format!("{cols} {dtypes} {ranks} {tile:?}");
                // Only a thread's last pack may lie past the end of the row.
                assert!(owned >= cols && owned - step <= cols, "{what}");
                assert!(tile.threads_per_row.is_multiple_of(32), "{what}");
                assert!(plan.threads() * tile.blocks_per_sm <= caps.threads_per_sm, "{what}");
                assert!(plan.shared_bytes as usize + RESERVED_BYTES <= caps.shared_per_block_optin as usize, "{what}");
                let chain = chain::of_row(Program::ReduceForward, &tile, cols).expect("a sum");
                assert!(chain <= sum_depth(cols) as u64, "{what}: {chain}");
            }
        }
    }

    /// The bits of a row depend neither on the number of rows, nor on the alignment, nor on other
    /// ranks on the device.
    #[test]
    fn tiles_depend_on_nothing_that_a_row_does_not_have() {
        for cols in [1, 100, 4096, 5000, 8192, 20_000] {
            let tile = |rows, access, group: Group| {
                let tile = of_call(&problem(rows, cols, BF16), access, &group, &Caps::h200()).expect("a plan").key.tile;
                (tile.pack, tile.packs, tile.threads_per_row * tile.cluster)
            };
            let expected = tile(1, 16, group(2));
            for rows in [2, 8, 9, 133, 1 << 20] {
                for access in [2, 4, 16] {
                    assert_eq!(tile(rows, access, Group { sharers: 2, bytes: 1 << 18, ..group(2) }), expected);
                }
            }
        }
    }

    /// The slot address of a pack, as in `kernels/peers.cuh`. Sender and receiver compute it from
    /// row and column, not from their grids. No two packs of a rank, a row or an epoch share a
    /// word, and none lies outside the memory.
    #[test]
    fn every_pack_has_a_slot_of_its_own() {
        for (ranks, rows, cols, dtypes) in
            [(2, 5, 4097, BF16), (4, 3, 1000, F32), (8, 2, 7, BF16), (3, 4, 20_001, STREAM_F32)]
        {
            let plan = plan(&problem(rows, cols, dtypes), 2, &group(ranks), &Caps::h200()).expect("a plan");
            let Tile { pack, packs, threads_per_row, .. } = plan.key.tile;
            let row_bytes = cols.div_ceil(pack as usize) * SLOT_BYTES;
            let bytes = row_bytes * rows;
            let set_bytes = (ranks as usize - 1) * bytes;
            let mut seen = HashSet::new();
            for (epoch, from) in (0..2).flat_map(|epoch| (0..ranks as usize - 1).map(move |from| (epoch, from))) {
                for (row, thread) in (0..rows).flat_map(|row| (0..threads_per_row).map(move |thread| (row, thread))) {
                    for k in 0..packs {
                        let column = ((k * threads_per_row + thread) * pack) as usize;
                        if column >= cols {
                            continue;
                        }
                        let slot = epoch * set_bytes + row * row_bytes + thread as usize * SLOT_BYTES;
                        let at = from * bytes + slot + (k * threads_per_row) as usize * SLOT_BYTES;
                        assert!(at.is_multiple_of(SLOT_BYTES) && at + SLOT_BYTES <= 2 * set_bytes);
                        assert!(seen.insert(at), "{ranks} ranks, {rows} x {cols}: {at} twice");
                    }
                }
            }
            assert_eq!(seen.len() * SLOT_BYTES, 2 * set_bytes);
        }
    }
}
