//! The tables that plans look tiles up in. What stands here was measured on an H200 (2026-11-21): beside each rung shares of the
//! copy's 4.2 TB/s in bf16, as rows x columns, and what was worse.
//!
//! Lengths are packs: 16 bytes of a row of the widest matrix, so 12 packs are 96 columns of 16 bits, or 48 of f32. What decides
//! is how many bytes a multiprocessor has on their way, which is at its best from 64 to 128 KiB, how many lanes have nothing to
//! do, and what a row costs besides its packs. Between powers of two, threads of three, five, six or seven packs leave fewer
//! lanes idle.

#[cfg(any(test, feature = "conformance"))]
mod breakpoints;
#[cfg(feature = "conformance")]
pub(crate) mod candidates;
pub(crate) mod data;
pub(super) mod legal;

use std::borrow::Cow::Borrowed;

use rmsnorm_gpu::tuning::{Ladder, find, none_up_to, up_to};
use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{Direction, Norm, Problem};
use rmsnorm_tuning::Kept;

use super::Tile;

/// Those that were loaded, or are tried.
pub(crate) static KEPT: Kept<Tuning> = Kept::new();

/// Tables for every kind of call: those whose widest matrix has 16 bits, then those with f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) widths: [Tables; 2],
    /// Bytes that backward had better read twice, the second time from the L2, than launch another kernel; 0 if it never had.
    pub(crate) split_bytes: u64,
}

/// Tables of calls of one width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    /// RMS norm, and with a residual: two tensors are read. Layer norm, whose row is visited three times, and with a residual.
    pub(crate) forward: [Ladders; 4],
    /// With one sum a row and one a column at the most; with two, which need more registers.
    pub(crate) backward: [Ladders; 2],
    /// Forward to codes, in one block: RMS norm by a scale of the tensor, of rows, of blocks; layer norm. A length that is not here, and
    /// every call with a residual, has forward's tile.
    pub(crate) to_codes: [Ladder<Tile>; 4],
    /// RMS norm, where the tensor's scale is looked for. A length that is not here has the tile that writes the codes.
    pub(crate) finds_scale: Ladder<Tile>,
}

/// Where a row may lie, in the order in which it is tried. A row that no table has, or the device no room for, streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ladders {
    /// On chip, shared by the blocks of a cluster.
    pub(crate) cluster: Ladder<Tile>,
    /// On chip, in one block.
    pub(crate) block: Ladder<Tile>,
    /// Forward: in shared memory, of a block or a cluster.
    pub(crate) long: Ladder<Tile>,
}

impl Tuning {
    /// What is built in.
    pub(crate) const H200: &Tuning = &BUILT_IN;

    /// The same with partial rows for every size of a backward call: else small ones have none.
    #[cfg(feature = "conformance")]
    pub(crate) fn unsplit(&self) -> &'static Tuning {
        KEPT.keep(Tuning { split_bytes: 0, ..self.clone() })
    }

    /// The tables of a call in packs of `pack` columns.
    pub(super) fn ladders(&self, problem: &Problem, pack: u32) -> &Ladders {
        let [narrow, wide] = &self.widths;
        let Tables {
            forward: [plain, residual, layer, layer_residual],
            backward: [one, two],
            to_codes: _,
            finds_scale: _,
        } = if pack == 8 { narrow } else { wide };
        let is_layer = problem.norm == Norm::Layer;
        match (problem.direction, is_layer, problem.tensors.adds_residual()) {
            (Direction::Forward | Direction::QuantizedForward, false, false) => plain,
            (Direction::Forward | Direction::QuantizedForward, false, true) => residual,
            (Direction::Forward | Direction::QuantizedForward, true, false) => layer,
            (Direction::Forward | Direction::QuantizedForward, true, true) => layer_residual,
            (Direction::Backward, ..) if is_layer || problem.tensors.sums_over_rows() == 2 => two,
            (Direction::Backward, ..) => one,
        }
    }
}

impl Tuning {
    /// The table of a call to codes.
    pub(super) fn to_codes(&self, problem: &Problem, scale: ScaleKind, pack: u32) -> Option<&Ladder<Tile>> {
        let [narrow, wide] = &self.widths;
        let Tables { to_codes: [tensor, row, block, layer], finds_scale, .. } = if pack == 8 { narrow } else { wide };
        let rms = match scale {
            ScaleKind::Current if find(finds_scale, problem.cols.div_ceil(pack as usize)).is_some() => finds_scale,
            ScaleKind::Given | ScaleKind::Current => tensor,
            ScaleKind::Row => row,
            ScaleKind::Block { .. } | ScaleKind::Mx { .. } => block,
        };
        let table = if problem.norm == Norm::Layer { layer } else { rms };
        (!problem.tensors.adds_residual()).then_some(table)
    }
}

/// Threads of a row, groups of such threads in a block, rows of a group at a time, and blocks of a multiprocessor.
const fn block(threads_per_row: u32, groups: u32, unroll: u32, blocks_per_sm: u32) -> Tile {
    Tile { threads_per_row, groups, unroll, blocks_per_sm, ..Tile::NONE }
}

/// Blocks on one row, threads of each, and blocks of a multiprocessor.
const fn cluster(cluster: u32, threads_per_row: u32, blocks_per_sm: u32) -> Tile {
    Tile { cluster, ..block(threads_per_row, 1, 1, blocks_per_sm) }
}

/// Backward: blocks on one row, threads of each, rows side by side, and blocks of a multiprocessor.
const fn grouped(cluster: u32, threads_per_row: u32, groups: u32, blocks_per_sm: u32) -> Tile {
    Tile { cluster, ..block(threads_per_row, groups, 1, blocks_per_sm) }
}

/// Backward: with so many steps in shared memory. Two where three would be more bytes under way than the memory likes.
const fn ring(stages: u32, tile: Tile) -> Tile {
    Tile { stages, ..tile }
}

/// Backward: with the next step's first pass while the sums of this one are exchanged.
const fn overlapped(tile: Tile) -> Tile {
    Tile { is_overlapped: true, ..tile }
}

/// One for all: what a constant refers to may be in a program several times.
static BUILT_IN: Tuning = Tuning { widths: [H200, H200], split_bytes: 10 << 20 };

const H200: Tables = Tables {
    forward: [PLAIN, RESIDUAL, LAYER, LAYER_RESIDUAL],
    backward: [ONE_SUM, TWO_SUMS],
    to_codes: [TENSOR_TO_CODES, ROW_TO_CODES, BLOCK_TO_CODES, LAYER_TO_CODES],
    finds_scale: FINDS_SCALE,
};

// To codes: us of bf16 to E4M3 (H200, 2026-11-23). What decides is how many bytes are asked for at once, as ever, and that a warp has as
// much of a row as its registers hold: what a row costs besides its elements is most of what there is to save.

const TENSOR_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 4096x1024: 4.8, with amax 6.1; 65536x1024 49.2, 51.2. Of 64 threads 5.4, 7.1, 53.0, 56.3; one row a block 5.8, 6.7, 49.3, 50.3.
    up_to(128, block(32, 2, 1, 16)),
    // 8192x2048: 14.4, of 32 threads 14.8, of 128 threads 14.9.
    up_to(256, block(64, 1, 1, 16)),
    // 16384x4096: 49.3, of 256 threads 57.6.
    up_to(512, block(128, 1, 1, 10)),
    // 8192x8192: 49.6, of 256 threads 49.9.
    up_to(1024, block(128, 1, 1, 7)),
    // 4096x12288: 38.2, of three blocks 39.2. 2048x16384: 27.2, of 512 threads 28.0.
    up_to(2048, block(256, 1, 1, 4)),
]);

const FINDS_SCALE: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // With the codes 65536x1024: 87.0, 4096x1024 10.7; of two rows a block 87.4, 11.6. A row has the lanes that it has where its codes
    // are written, and so the same rstd.
    up_to(128, block(32, 8, 1, 4)),
]);

/// With fewer than 64 registers the compiler spills.
const ROW_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 4096x1024: 4.7, of 64 threads 5.2.
    up_to(128, block(32, 1, 1, 32)),
    // 8192x2048: 13.9, of 32 threads 17.4.
    up_to(256, block(64, 1, 1, 16)),
    // 16384x4096: 49.7, of 64 threads 60.2.
    up_to(512, block(128, 1, 1, 8)),
    // 8192x8192: 51.0, of 128 threads 61.9.
    up_to(1024, block(256, 1, 1, 4)),
    // 4096x12288: 39.9, of 512 threads 45.5.
    up_to(1536, block(256, 1, 1, 3)),
    // 2048x16384: 28.7, of 256 threads 44.9.
    up_to(2048, block(512, 1, 1, 2)),
]);

/// By 128 columns as f32, by 32 as bytes.
const BLOCK_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 4096x1024: 6.7, 5.9.
    up_to(128, block(32, 1, 1, 32)),
    // 8192x2048: 17.3, 16.2; of 32 threads 18.0, 16.7.
    up_to(256, block(64, 1, 1, 20)),
    // 16384x4096: 55.3, 52.0; of 128 threads 55.6, 52.8.
    up_to(512, block(64, 1, 1, 12)),
    // 8192x8192: 55.0, 52.2; of 256 threads 55.9, 55.7.
    up_to(1024, block(128, 1, 1, 6)),
    // 4096x12288: 43.2, 41.2; of 512 threads 47.0, 47.1.
    up_to(1536, block(256, 1, 1, 4)),
    // 2048x16384: 31.6, 29.9; of 512 threads 31.8, 36.8.
    up_to(2048, block(256, 1, 1, 3)),
]);

/// By the tensor's scale, by rows.
const LAYER_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(256),
    // 16384x4096: 54.1, 70.5; of 128 threads 56.2, 72.9.
    up_to(512, block(64, 1, 1, 12)),
    // 8192x8192: 53.9, 71.3; of 256 threads 59.0, 77.1.
    up_to(1024, block(128, 1, 1, 6)),
    // 2048x16384: 32.4, 42.1; of 512 threads 34.3, 45.2.
    up_to(2048, block(256, 1, 1, 3)),
]);

const PLAIN: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(2048),
        // 4096x32768: 101 %, 100 % from the L1.
        up_to(4096, cluster(2, 128, 3)),
        // 2048x65536: 100 %, 97 % from the L1.
        up_to(8192, cluster(4, 128, 3)),
        // 1024x131072: 100 %, 256 threads 91 %, from shared memory 89 %. 512x262144: 77 %, from shared memory 87 %.
        up_to(16384, cluster(8, 128, 3)),
    ]),
    block: Borrowed(&[
        up_to(1, block(1, 256, 2, 6)),
        up_to(2, block(2, 128, 2, 6)),
        up_to(4, block(4, 64, 2, 6)),
        up_to(8, block(8, 32, 2, 6)),
        // 699008x192: 99 %, 32 threads with one pack 84 %; 1398080x96: 99 %, 16 with one pack 85 %.
        up_to(12, block(4, 32, 2, 6)),
        // 1048576x128: 100 %; one row in flight 81 %, four 83 %.
        up_to(16, block(16, 16, 2, 6)),
        up_to(24, block(8, 32, 1, 6)),
        up_to(32, block(32, 8, 2, 6)),
        // 349504x384: 99.8 %, 64 threads with one pack 82 %.
        up_to(48, block(16, 16, 1, 4)),
        // 262144x512: 99 %, 64 threads with one pack 94 %.
        up_to(64, block(32, 8, 2, 5)),
        // 209664x640: 99 %, 32 threads with three packs 97 %; at 576 columns 98 and 88 %.
        up_to(80, block(16, 8, 1, 8)),
        // 174720x768: 99 %, 64 threads with two packs 92 %.
        up_to(96, block(32, 1, 1, 16)),
        // 149760x896: 99 %, 64 threads with two packs 96 %.
        up_to(112, block(32, 8, 1, 5)),
        // 131072x1024: 100 %.
        up_to(128, block(64, 1, 1, 16)),
        // 104832x1280: 99.7 %, 128 threads with two packs 93 %; at 1152 columns 100 and 88 %.
        up_to(176, block(64, 1, 1, 24)),
        // 65536x2048: 100 %, four rows a block 96 %.
        up_to(256, block(128, 1, 1, 16)),
        // 58240x2304: 100 %, eight blocks 95 %.
        up_to(288, block(128, 1, 1, 12)),
        // 52416x2560: 100 %, 256 threads with two packs 82 %.
        up_to(384, block(128, 1, 1, 8)),
        // 32768x4096: 100 %, 128 threads with four packs 99 %.
        // 1024x4096: 5.6 us, with 40 registers instead of 32, which is a second wave of blocks, 6.0 us.
        up_to(512, block(256, 1, 1, 8)),
        // 26176x5120: 99 %; 29120x4608: 98 %, of five blocks 94 %.
        up_to(768, block(256, 1, 1, 6)),
        // 16384x8192: 99.5 %; 13056x10240: 100 %, 512 threads 95 %.
        up_to(1280, block(256, 1, 1, 4)),
        // 8192x16384: 99 %, 1024 threads with two packs 72 %.
        up_to(2048, block(512, 1, 1, 3)),
        // 4096x32768: 99.5 %. From here on for devices without clusters.
        up_to(4096, block(512, 1, 1, 2)),
        // 2048x65536: 97 %.
        up_to(8192, block(1024, 1, 1, 1)),
    ]),
    long: Borrowed(&[
        none_up_to(16384),
        // 512x262144: 87 %.
        up_to(32768, cluster(8, 512, 3)),
        up_to(65536, cluster(8, 1024, 1)),
    ]),
};

const RESIDUAL: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(2048),
        // 4096x32768: 101 %, 98 % from shared memory.
        up_to(4096, cluster(2, 256, 2)),
        // 2048x65536: 101 %, 94 % from shared memory.
        up_to(8192, cluster(4, 256, 2)),
        // 1024x131072: 100 %, 128 threads 96 %.
        up_to(16384, cluster(8, 256, 2)),
        // 512x262144: 98 %.
        up_to(32768, cluster(8, 512, 1)),
    ]),
    block: Borrowed(&[
        up_to(1, block(1, 256, 1, 5)),
        up_to(2, block(2, 128, 1, 5)),
        up_to(4, block(4, 64, 1, 5)),
        up_to(8, block(8, 32, 1, 5)),
        // 1048576x128: 100 %, two rows in flight 99 %.
        up_to(16, block(16, 16, 1, 5)),
        // 699008x192: 99 %, 32 threads with one pack 93 %.
        up_to(24, block(8, 32, 1, 5)),
        up_to(32, block(32, 8, 1, 5)),
        // 349504x384: 101 %; at 320 columns 99 %, 32 threads with two packs 93 %.
        up_to(48, block(16, 16, 1, 3)),
        // 262144x512: 100 %, 64 threads with one pack 88 %; at 576 columns 101 and 89 %.
        up_to(80, block(32, 8, 1, 4)),
        // 174720x768: 101 %.
        up_to(96, block(64, 1, 1, 8)),
        // 131072x1024: 102 %.
        up_to(128, block(128, 1, 1, 8)),
        // 116480x1152: 100 %, 128 threads with two packs 93 %.
        up_to(160, block(32, 8, 1, 3)),
        // 65536x2048: 101 %.
        up_to(256, block(128, 1, 1, 8)),
        // 52416x2560: 101 %, 256 threads with two packs 96 %; at 2304 columns 102 and 91 %.
        up_to(320, block(128, 2, 1, 4)),
        // 32768x4096: 101 %.
        up_to(512, block(256, 1, 1, 4)),
        // 26176x5120: 101 %; 18688x7168: 101 %, 512 threads with two packs 95 %.
        up_to(1280, block(256, 1, 1, 3)),
        // 8192x16384: 101 %.
        up_to(2048, block(512, 1, 1, 2)),
    ]),
    long: Borrowed(&[
        none_up_to(2048),
        // 4096x32768, for devices without clusters: 98 %.
        up_to(4096, cluster(1, 512, 1)),
        none_up_to(32768),
        up_to(65536, cluster(8, 1024, 1)),
    ]),
};

/// A row that is visited three times has least to do between its sums where few threads have many packs.
const LAYER: Ladders = Ladders {
    cluster: Borrowed(&[]),
    block: Borrowed(&[
        up_to(2, block(1, 128, 2, 8)),
        up_to(4, block(2, 64, 2, 8)),
        up_to(8, block(4, 32, 2, 8)),
        // 699008x192: 98 %, 16 threads with two packs 79 %; 1398080x96: 99 and 82 %.
        up_to(12, block(4, 32, 2, 6)),
        // 1048576x128: 98 %.
        up_to(16, block(8, 16, 2, 8)),
        up_to(24, block(8, 16, 2, 6)),
        up_to(32, block(16, 8, 2, 8)),
        // 419392x320: 92 %, 16 threads with three packs 85 %.
        up_to(40, block(8, 16, 1, 5)),
        // 349504x384: 99 %.
        up_to(48, block(16, 8, 2, 6)),
        // 262144x512: 97 %, 64 threads with one pack 57 %.
        up_to(64, block(32, 4, 2, 10)),
        // 232960x576: 91 %, 32 threads with three packs 79 %.
        up_to(72, block(16, 4, 1, 12)),
        // 209664x640: 98 %, 32 threads with three packs 90 %.
        up_to(80, block(16, 8, 2, 4)),
        // 174720x768: 99 %; 131072x1024: 98 %; 149760x896: 98 %, 64 threads with two packs 90 %.
        up_to(128, block(32, 1, 1, 32)),
        // 104832x1280: 99 %, 128 threads with two packs 83 %.
        up_to(160, block(32, 1, 1, 24)),
        // 87360x1536: 99 %. 83840x1600: 99 %, of 16 blocks 92 %, 64 threads with four packs 90 %. 65536x2048: 99 %, 128
        // threads with two packs 88 %.
        up_to(256, block(32, 1, 1, 20)),
        // 52416x2560: 99 %, of twelve blocks 99 %, but at 2304 columns 97 instead of 99 %.
        up_to(384, block(64, 1, 1, 16)),
        // 37440x3584: 99 %.
        up_to(448, block(64, 1, 1, 12)),
        // 32768x4096: 99 %; 26176x5120: 99 %.
        up_to(768, block(128, 1, 1, 8)),
        // 18688x7168: 99 %.
        up_to(896, block(128, 1, 1, 6)),
        // 16384x8192: 98 %; 13056x10240: 98.5 %, of three blocks 93 %.
        up_to(1280, block(256, 1, 1, 4)),
        // 8192x16384: 98 %; 10880x12288: 98 %.
        up_to(2048, block(256, 1, 1, 3)),
    ]),
    long: Borrowed(&[
        none_up_to(2048),
        // 4096x32768: 93 %.
        up_to(4096, cluster(1, 512, 2)),
        // 2048x65536: 87 %, with clusters of two 83 %.
        up_to(8192, cluster(1, 1024, 1)),
        // 1024x131072: 78 %.
        up_to(16384, cluster(4, 256, 3)),
        // 512x262144: 72 %.
        up_to(32768, cluster(8, 256, 2)),
        up_to(65536, cluster(8, 1024, 1)),
    ]),
};

const LAYER_RESIDUAL: Ladders = Ladders {
    cluster: Borrowed(&[]),
    block: Borrowed(&[
        up_to(2, block(1, 256, 1, 5)),
        up_to(4, block(2, 128, 1, 5)),
        up_to(8, block(4, 64, 1, 5)),
        // 699008x192: 98 %, 16 threads with two packs 93 %.
        up_to(12, block(4, 64, 1, 4)),
        // 1048576x128: 99 %, two rows in flight 94 %.
        up_to(16, block(8, 32, 1, 5)),
        up_to(24, block(8, 32, 1, 5)),
        up_to(32, block(16, 16, 1, 5)),
        // 349504x384: 101 %, 32 threads with two packs 93 %.
        up_to(48, block(16, 16, 1, 3)),
        // 262144x512: 100 %, 64 threads with one pack 85 %; 174720x768: 100 and 92 %.
        up_to(96, block(32, 8, 1, 5)),
        // 131072x1024: 100 %.
        up_to(128, block(64, 1, 1, 16)),
        // 104832x1280: 100 %, 128 threads with two packs 84 %.
        up_to(160, block(32, 8, 1, 3)),
        // 87360x1536: 100 %, 128 threads with two packs 92 %.
        up_to(208, block(64, 4, 1, 4)),
        // 65536x2048: 101 %.
        up_to(256, block(128, 1, 1, 8)),
        // 52416x2560: 99 %.
        up_to(320, block(64, 1, 1, 12)),
        // 43648x3072: 101 %, 64 threads with six packs 97 %; 32768x4096: 99 %.
        up_to(640, block(128, 1, 1, 6)),
        // 18688x7168: 100 %, 128 threads with seven packs 95 %.
        up_to(1024, block(256, 1, 1, 4)),
        // 13056x10240: 101 %.
        up_to(1536, block(256, 1, 1, 3)),
        // 8192x16384: 101 %, from shared memory 91 %.
        up_to(2048, block(512, 1, 1, 2)),
    ]),
    long: Borrowed(&[
        none_up_to(2048),
        up_to(4096, cluster(1, 512, 1)),
        up_to(8192, cluster(4, 512, 2)),
        up_to(32768, cluster(8, 512, 2)),
        up_to(65536, cluster(8, 1024, 1)),
    ]),
};

const ONE_SUM: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(1536),
        // 14336 columns: 96 %, one block of 256 threads 93 %.
        up_to(1792, ring(2, cluster(2, 192, 2))),
        // 8192x16384: 93 %. 2048x16384: 58.0 us, clusters of two 62.5.
        up_to(2048, ring(2, grouped(4, 128, 2, 2))),
        // 18432 columns: 95 %, 6528x20480 95 %, clusters of four 81 %.
        up_to(2560, ring(2, grouped(2, 128, 2, 1))),
        // 24576 columns: 94 %, one group of rows 87 %.
        up_to(3072, ring(2, grouped(4, 128, 4, 1))),
        // 4096x32768: 93 to 95 %, 256 threads 93 %; 28672 columns: 90 %.
        up_to(4096, ring(2, cluster(4, 128, 2))),
        // 2048x65536: 90 to 93 %, 512 threads 89 %; at 40960 columns 76 %, 256 threads 69 %.
        up_to(8192, ring(3, cluster(8, 128, 2))),
        // 1024x131072: 85 to 86 %, 512 threads 85 %, the passes in turn 85 %.
        up_to(16384, overlapped(ring(3, cluster(8, 256, 1)))),
    ]),
    block: Borrowed(&[
        up_to(1, ring(3, block(1, 256, 1, 4))),
        up_to(2, ring(3, block(2, 128, 1, 4))),
        up_to(4, ring(3, block(4, 64, 1, 4))),
        up_to(8, ring(3, block(8, 32, 1, 4))),
        // 1398080x96: 95 %, 16 threads with one pack 86 %.
        up_to(12, ring(2, block(4, 64, 1, 1))),
        // 1048576x128: 98 %, overlapped 94 %.
        up_to(16, ring(3, block(16, 16, 1, 4))),
        // 699008x192: 99 %, 32 threads with one pack 91 %.
        up_to(24, ring(2, block(8, 32, 1, 1))),
        up_to(32, ring(3, block(32, 8, 1, 4))),
        // 419392x320: 95 %, 64 threads with one pack 81 %.
        up_to(40, ring(3, block(8, 32, 1, 1))),
        // 349504x384: 99 %, overlapped 96 %.
        up_to(48, ring(2, block(16, 16, 1, 1))),
        // 262144x512: 98 %.
        up_to(64, ring(3, block(64, 8, 2, 1))),
        // 209664x640: 97 %, 128 threads with one pack 93 %.
        up_to(80, ring(3, block(16, 16, 1, 1))),
        // 174720x768: 99 %, three steps 98 %.
        up_to(96, ring(2, block(128, 4, 1, 2))),
        // 131072x1024: 99 %, 128 threads 94 %. 4096x1024: 10.3 us, 128 threads 9.9.
        up_to(128, ring(2, block(64, 8, 1, 1))),
        // 104832x1280: 97 %, 256 threads with one pack 90 %.
        up_to(160, ring(2, block(32, 8, 1, 1))),
        // 87360x1536: 98 %.
        up_to(192, ring(2, block(256, 4, 1, 1))),
        // 65536x2048: 100 %, 256 threads 97 %.
        up_to(256, ring(2, block(128, 4, 1, 1))),
        // 52416x2560: 97 %.
        up_to(384, ring(2, block(128, 2, 1, 2))),
        // 32768x4096: 102 %. 4096x4096: 28.5 us, 512 threads 30.1.
        up_to(512, ring(3, block(256, 2, 1, 1))),
        // 26176x5120: 98 %, 128 threads with five packs 97 %. 4096x5120: 34.4 and 36.8 us.
        up_to(640, ring(2, block(320, 2, 1, 1))),
        // 5376 columns: 97 %.
        up_to(672, ring(2, block(224, 1, 1, 2))),
        // 6144 columns: 97 %, 128 threads 95 %.
        up_to(768, ring(2, block(192, 2, 1, 1))),
        // 18688x7168: 98 %, 512 threads 96 %. 4096x7168: 48.2 and 51.2 us.
        up_to(896, ring(3, block(896, 1, 1, 1))),
        // 16384x8192: 99 %, overlapped 98 %.
        up_to(1024, ring(3, block(1024, 1, 1, 1))),
        // 13056x10240: 96 %, on a cluster of two 83 %. f32 13056x5120: 98 %, of two steps 90 %.
        up_to(1280, ring(3, block(256, 1, 1, 1))),
        // 10880x12288: 95 %, 256 threads 93 %. 4096x12288: 81.0 and 83.9 us.
        up_to(1536, ring(2, block(384, 1, 1, 1))),
        // For devices without clusters.
        up_to(2048, ring(3, block(512, 1, 1, 1))),
    ]),
    long: Borrowed(&[]),
};

/// The figures are those of layer norm.
const TWO_SUMS: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(1536),
        // 14336 columns: 93 %, of 256 threads 90 %.
        up_to(1792, ring(2, cluster(2, 128, 2))),
        // 8192x16384: 91 %, clusters of two 89 %. 2048x16384: 61.8 and 71.4 us.
        up_to(2048, ring(2, grouped(4, 128, 2, 2))),
        // 18432 columns: 93 %, clusters of four 75 %.
        up_to(2304, ring(2, grouped(2, 192, 2, 1))),
        // 6528x20480: 88 %, 128 threads on two blocks 78 %.
        up_to(2560, ring(3, cluster(4, 160, 3))),
        // 24576 columns: 83 %.
        up_to(3072, ring(2, cluster(4, 128, 2))),
        // 28672 columns: 87 %.
        up_to(3584, ring(3, cluster(2, 448, 1))),
        // 4096x32768: 89 %, overlapped 84 %.
        up_to(4096, ring(2, cluster(4, 256, 2))),
        up_to(6144, ring(2, cluster(8, 128, 2))),
        // 2048x65536: 89 %, overlapped 83 %.
        up_to(8192, ring(3, cluster(8, 256, 2))),
        // 1024x131072: 80 %, overlapped 77.
        up_to(16384, ring(3, cluster(8, 512, 1))),
    ]),
    block: Borrowed(&[
        up_to(1, ring(3, block(1, 512, 2, 1))),
        up_to(2, ring(3, block(2, 256, 2, 1))),
        up_to(4, ring(3, block(4, 128, 2, 1))),
        up_to(8, ring(3, block(8, 64, 2, 1))),
        // 1398080x96: 91 %, 16 threads with one pack 83 %.
        up_to(12, ring(2, block(4, 64, 1, 1))),
        // 1048576x128: 97 %.
        up_to(16, ring(3, block(16, 32, 2, 1))),
        // 699008x192: 95 %, 32 threads with one pack 85 %.
        up_to(24, ring(2, block(8, 32, 1, 1))),
        up_to(32, ring(3, block(32, 16, 2, 1))),
        // 419392x320: 95 %, 64 threads with one pack 80 %.
        up_to(40, ring(3, block(8, 32, 1, 1))),
        // 349504x384: 97 %.
        up_to(48, ring(2, block(16, 16, 1, 1))),
        // 262144x512: 96 %.
        up_to(64, ring(3, block(32, 8, 1, 2))),
        // 209664x640: 96 %, 128 threads with one pack 92 %.
        up_to(80, ring(3, block(16, 16, 1, 1))),
        // 174720x768: 97 %.
        up_to(96, ring(2, block(32, 8, 1, 1))),
        // 131072x1024: 99 %. 4096x1024: 11.0 us, on one block with twice the rows 12.7.
        up_to(128, ring(2, block(64, 4, 1, 2))),
        // 104832x1280: 96 %, 256 threads with one pack 85 %.
        up_to(160, ring(2, block(32, 8, 1, 1))),
        // 87360x1536: 96 %.
        up_to(192, ring(2, block(64, 4, 1, 1))),
        // 65536x2048: 98 %, overlapped 97 %.
        up_to(256, ring(3, block(128, 4, 1, 1))),
        // 52416x2560: 99 %, 64 threads 98 %.
        up_to(320, ring(2, block(160, 2, 1, 2))),
        // At 3072 columns 95 %, of one block with twice the rows 93 %.
        up_to(384, ring(2, block(64, 2, 1, 2))),
        // 32768x4096: 99 %, 128 threads 97 %. 4096x4096: 30.2 and 33.5 us.
        up_to(512, ring(3, block(256, 2, 1, 1))),
        // 26176x5120: 99 %.
        up_to(640, ring(3, block(128, 2, 1, 1))),
        // 5376 columns: 99 %, 128 threads 94 %.
        up_to(672, ring(2, block(224, 2, 1, 1))),
        // 6144 columns: 95 %, 128 threads 88 %.
        up_to(768, ring(2, block(192, 2, 1, 1))),
        // 18688x7168: 93 %, 256 threads 90 %.
        up_to(896, ring(3, block(448, 1, 1, 1))),
        // 16384x8192: 94 %, overlapped 90 %.
        up_to(1024, ring(3, block(512, 1, 1, 1))),
        // 13056x10240: 98 %, two steps 94 %.
        up_to(1280, ring(3, block(256, 1, 1, 1))),
        // 10880x12288: 93 %, 512 threads 87 %. 4096x12288: 84.8 and 93.0 us.
        up_to(1536, ring(2, block(384, 1, 1, 1))),
        // For devices without clusters.
        up_to(2048, ring(3, block(512, 1, 1, 1))),
    ]),
    long: Borrowed(&[]),
};
