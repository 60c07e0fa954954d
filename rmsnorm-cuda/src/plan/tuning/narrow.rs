//! Tiles of calls whose widest matrix has 16 bits, the fastest on an H200. The comment on a rung
//! has shapes (rows x columns) and their speed with this tile; slower alternatives (threads per
//! row) are in parentheses.
//! - `%`: share of the 4.2 TB/s of a copy, in bf16 (2026-11-21).
//! - `us (was ..)`: `rmsnorm tune` found the tile (2026-11-25,
//!   `benches/results/tune-2026-11-25-h200`); the tile before it took the time after `was`.
//! - `% with small calls`: the gain if smaller calls are included.

use std::borrow::Cow::Borrowed;

use rmsnorm_gpu::tuning::{Ladder, none_up_to, up_to};

use super::{Ladders, Tables, block, cluster, grouped, overlapped, ring};
use crate::plan::Tile;

pub(super) const TABLES: Tables = Tables {
    forward: [PLAIN, RESIDUAL, LAYER, LAYER_RESIDUAL],
    backward: [ONE_SUM, TWO_SUMS],
    to_codes: [TENSOR_TO_CODES, ROW_TO_CODES, BLOCK_TO_CODES, LAYER_TO_CODES],
    finds_scale: FINDS_SCALE,
};

// To codes: bf16 to E4M3, in us (H200, 2026-11-23). Bytes in flight decide, and that a warp has as
// much of a row as its registers hold, because most of the avoidable time is the cost per row.

const TENSOR_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 32768x1024: 26.5 us (was 26.8 us).
    up_to(128, block(32, 1, 1, 32)),
    // 8192x2048: 14.4 (32 threads 14.8, 128 threads 14.9).
    up_to(256, block(64, 1, 1, 16)),
    // 16384x4096: 49.3 (256 threads 57.6).
    up_to(512, block(128, 1, 1, 10)),
    // 8192x8192: 49.6 (256 threads 49.9).
    up_to(1024, block(128, 1, 1, 7)),
    // 4096x12288: 38.2 (three blocks 39.2). 2048x16384: 27.2 (512 threads 28.0).
    up_to(2048, block(256, 1, 1, 4)),
]);

pub(super) const FINDS_SCALE: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // With the codes, 65536x1024 takes 87.0 us (two rows per block 87.4). A row has as many threads
    // as in the kernel that writes its codes, and so the same rstd.
    up_to(128, block(32, 8, 1, 4)),
]);

/// With fewer than 64 registers the compiler spills.
const ROW_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 4096x1024: 4.7 (64 threads 5.2).
    up_to(128, block(32, 1, 1, 32)),
    // 8192x2048: 13.9 (32 threads 17.4).
    up_to(256, block(64, 1, 1, 16)),
    // 16384x4096: 49.7 (64 threads 60.2).
    up_to(512, block(128, 1, 1, 8)),
    // 8192x8192: 51.0 (128 threads 61.9).
    up_to(1024, block(256, 1, 1, 4)),
    // 4096x12288: 39.9 (512 threads 45.5).
    up_to(1536, block(256, 1, 1, 3)),
    // 2048x16384: 29.1 us (was 29.3 us); 3.7 % with small calls.
    up_to(2048, block(256, 1, 1, 2)),
]);

/// Two times: with f32 scales per 128 columns, with one-byte scales per 32 columns.
const BLOCK_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 65536x1024: 51.0, 51.0.
    up_to(128, block(32, 1, 1, 32)),
    // 32768x2048: 52.1, 50.1 (64 threads 53.2, 52.1).
    up_to(256, block(32, 1, 1, 20)),
    // 16384x4096: 52.6, 50.7.
    up_to(512, block(64, 1, 1, 12)),
    // 8192x8192: 52.1, 50.4.
    up_to(1024, block(128, 1, 1, 6)),
    // 4096x12288: 41.2, 40.2.
    up_to(1536, block(256, 1, 1, 4)),
    // 2048x16384: 30.1, 29.4.
    up_to(2048, block(256, 1, 1, 4)),
]);

/// Two times: with the tensor's scale, with scales per row.
const LAYER_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(256),
    // 16384x4096: 54.1, 70.5.
    up_to(512, block(64, 1, 1, 12)),
    // 8192x8192: 53.9, 71.3.
    up_to(1024, block(128, 1, 1, 6)),
    // 2048x16384: 32.4, 42.1.
    up_to(2048, block(256, 1, 1, 3)),
]);

pub(super) const PLAIN: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(2048),
        // 7488x17920: 132.8 us (128 threads on three blocks 140.9 us).
        up_to(2560, cluster(2, 160, 2)),
        // 5440x24576: 126.4 us (clusters of two 133.4 us).
        up_to(3072, cluster(4, 96, 6)),
        // 4672x28672: 126.5 us (clusters of two 130.7 us).
        up_to(3584, cluster(4, 128, 5)),
        // 4096x32768: 101 % (100 % from the L1).
        up_to(4096, cluster(2, 128, 3)),
        // 3264x40960: 130.2 us (128 threads 141.4 us).
        up_to(5120, cluster(8, 160, 5)),
        // 512x65536: 34.5 us (was 35.2 us).
        up_to(8192, cluster(8, 128, 5)),
        // 1024x131072: 100 % (256 threads 91 %, from shared memory 89 %). 512x262144: 77 % (from
        // shared memory 87 %).
        up_to(16384, cluster(8, 128, 3)),
    ]),
    block: Borrowed(&[
        up_to(1, block(1, 256, 2, 6)),
        up_to(2, block(2, 128, 2, 6)),
        up_to(4, block(4, 64, 2, 6)),
        up_to(8, block(8, 32, 2, 6)),
        // 699008x192: 99 % (32 threads with one pack 84 %); 1398080x96: 99 % (16 threads with one
        // pack 85 %).
        up_to(12, block(4, 32, 2, 6)),
        // 1048576x128: 100 % (one row in flight 81 %, four 83 %).
        up_to(16, block(16, 16, 2, 6)),
        up_to(24, block(8, 32, 1, 6)),
        up_to(32, block(32, 8, 2, 6)),
        // 349504x384: 99.8 % (64 threads with one pack 82 %).
        up_to(48, block(16, 16, 1, 4)),
        // 262144x512: 99 % (64 threads with one pack 94 %).
        up_to(64, block(32, 8, 2, 5)),
        // 209664x640: 99 %; 576 columns: 98 % (32 threads with three packs 88 %).
        up_to(80, block(16, 8, 1, 8)),
        // 174720x768: 99 % (64 threads with two packs 92 %).
        up_to(96, block(32, 1, 1, 16)),
        // 37440x896: 34.8 us (was 35.2 us).
        up_to(112, block(16, 4, 2, 8)),
        // 131072x1024: 100 %.
        up_to(128, block(64, 1, 1, 16)),
        // 104832x1280: 99.7 % (128 threads with two packs 93 %); 1152 columns: 100 % (88 %).
        up_to(176, block(64, 1, 1, 24)),
        // 65536x2048: 100 % (four rows a block 96 %).
        up_to(256, block(128, 1, 1, 16)),
        // 14528x2304: 34.3 us (was 34.4 us); 2.3 % with small calls.
        up_to(288, block(96, 1, 1, 16)),
        // 1365x3072: 5.36 us (128 threads 6.05 us); 52416x2560: 100 %.
        up_to(384, block(96, 1, 1, 16)),
        // 1500x3200: 6.17 us (256 threads 6.96 us); 10240x3200: 33.4 us (34.8 us).
        up_to(416, block(160, 1, 1, 12)),
        // 1170x3584: 5.27 us (256 threads 6.40 us, 160 threads 5.40 us).
        up_to(448, block(224, 1, 1, 8)),
        // 1088x3840: 5.29 us (256 threads 6.40 us, 224 threads 5.59 us).
        up_to(480, block(160, 1, 1, 12)),
        // 32768x4096: 100 %. 1024x4096: 5.6 us (40 registers
        // instead of 32, and so a second wave of blocks, 6.0 us).
        up_to(512, block(256, 1, 1, 8)),
        // 6528x5120: 34.3 us (was 35.0 us).
        up_to(640, block(256, 1, 1, 8)),
        // 682x6144: 5.35 us (256 threads 5.55 us); 5440x6144: 33.7 us (33.9 us).
        up_to(768, block(192, 1, 1, 8)),
        // 2500x6400: 17.3 us (224 threads 18.5 us); 5120x6400: 33.2 us (34.5 us).
        up_to(800, block(160, 1, 1, 8)),
        // 630x6656: 5.45 us (four blocks 6.19 us); 4672x7168: 34.0 us (33.9 us).
        up_to(896, block(224, 1, 1, 6)),
        // 4096x8192: 34.1 us (six blocks 34.6 us).
        up_to(1280, block(224, 1, 1, 4)),
        // 2048x16384: 35.0 us (was 35.5 us).
        up_to(2048, block(384, 1, 1, 3)),
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

pub(super) const RESIDUAL: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(2048),
        // 1152x28672: 64.0 us (was 64.9 us).
        up_to(4096, cluster(8, 256, 6)),
        // 512x65536: 65.2 us (was 67.6 us).
        up_to(8192, cluster(8, 512, 3)),
        // 256x131072: 66.2 us (was 69.5 us).
        up_to(16384, cluster(8, 512, 2)),
        // 128x262144: 71.5 us (was 73.0 us).
        up_to(32768, cluster(8, 896, 1)),
    ]),
    block: Borrowed(&[
        up_to(1, block(1, 256, 1, 5)),
        up_to(2, block(2, 128, 1, 5)),
        up_to(4, block(4, 64, 1, 5)),
        up_to(8, block(8, 32, 1, 5)),
        // 1048576x128: 100 %.
        up_to(16, block(16, 16, 1, 5)),
        // 699008x192: 99 % (32 threads with one pack 93 %).
        up_to(24, block(8, 32, 1, 5)),
        up_to(32, block(32, 8, 1, 5)),
        // 349504x384: 101 %; 320 columns: 99 % (32 threads with two packs 93 %).
        up_to(48, block(16, 16, 1, 3)),
        // 262144x512: 100 % (64 threads with one pack 88 %); 576 columns: 101 % (89 %).
        up_to(80, block(32, 8, 1, 4)),
        // 174720x768: 101 %.
        up_to(96, block(64, 1, 1, 8)),
        // 131072x1024: 102 %.
        up_to(128, block(128, 1, 1, 8)),
        // 26176x1280: 66.3 us (was 67.0 us); 6.6 % with small calls.
        up_to(160, block(32, 1, 1, 20)),
        // 65536x2048: 101 %.
        up_to(256, block(128, 1, 1, 8)),
        // 13056x2560: 65.3 us (was 65.6 us); 6.2 % with small calls.
        up_to(320, block(160, 1, 1, 8)),
        // 32768x4096: 101 %.
        up_to(512, block(256, 1, 1, 4)),
        // 26176x5120: 101 %; 18688x7168: 101 % (512 threads with two packs 95 %).
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

/// Few threads with many packs have the least to do between the sums of the three visits to a row.
const LAYER: Ladders = Ladders {
    cluster: Borrowed(&[]),
    block: Borrowed(&[
        // 2097152x16: 39.6 us (was 50.9 us).
        up_to(2, block(2, 32, 2, 32)),
        up_to(4, block(2, 64, 2, 8)),
        // 524288x64: 35.9 us (was 36.4 us).
        up_to(8, block(4, 16, 2, 20)),
        // 349504x96: 35.8 us (was 36.4 us).
        up_to(12, block(4, 32, 2, 7)),
        // 1048576x128: 98 %.
        up_to(16, block(8, 16, 2, 8)),
        up_to(24, block(8, 16, 2, 6)),
        up_to(32, block(16, 8, 2, 8)),
        // 104832x320: 36.8 us (was 38.2 us).
        up_to(40, block(8, 4, 2, 16)),
        // 349504x384: 99 %.
        up_to(48, block(16, 8, 2, 6)),
        // 262144x512: 97 % (64 threads with one pack 57 %).
        up_to(64, block(32, 4, 2, 10)),
        // 232960x576: 91 % (32 threads with three packs 79 %).
        up_to(72, block(16, 4, 1, 12)),
        // 209664x640: 98 % (32 threads with three packs 90 %).
        up_to(80, block(16, 8, 2, 4)),
        // 174720x768: 99 %; 131072x1024: 98 %; 149760x896: 98 % (64 threads with two packs 90 %).
        up_to(128, block(32, 1, 1, 32)),
        // 104832x1280: 99 % (128 threads with two packs 83 %).
        up_to(160, block(32, 1, 1, 24)),
        // 87360x1536: 99 %. 83840x1600: 99 % (16 blocks 92 %, 64 threads with four packs 90 %).
        // 65536x2048: 99 % (128 threads with two packs 88 %).
        up_to(256, block(32, 1, 1, 20)),
        // 52416x2560: 99 %; 2304 columns: 99 %.
        up_to(384, block(64, 1, 1, 16)),
        // 37440x3584: 99 %.
        up_to(448, block(64, 1, 1, 12)),
        // 32768x4096: 99 %; 26176x5120: 99 %.
        up_to(768, block(128, 1, 1, 8)),
        // 18688x7168: 99 %.
        up_to(896, block(128, 1, 1, 6)),
        // 16384x8192: 98 %; 13056x10240: 98.5 % (three blocks 93 %).
        up_to(1280, block(256, 1, 1, 4)),
        // 8192x16384: 98 %; 10880x12288: 98 %.
        up_to(2048, block(256, 1, 1, 3)),
        // 7488x17920: 142.6 us (512 threads 156.5 us).
        up_to(2304, block(384, 1, 1, 2)),
        // 20480 columns: 93 % (from shared memory 90 %); 24576 columns: 96 %. Longer rows do
        // not stay in the L1 for the second read: 28672 columns 77 %, 32768 columns 52 %.
        up_to(3072, block(512, 1, 1, 2)),
    ]),
    long: Borrowed(&[
        none_up_to(3072),
        // 4096x32768: 93 % (in the registers of clusters, with two rows in flight, 89 %).
        up_to(4096, cluster(1, 512, 2)),
        // 1056x40960: 52.7 us (1024 threads on one block 62.0 us).
        up_to(5120, cluster(1, 768, 2)),
        // 51x64296: 8.86 us (one block of 1024 threads 10.4 us); 1056x64296: 89.4 us (90.7 us).
        up_to(8192, cluster(2, 256, 3)),
        // 256x131072: 47.5 us (was 48.5 us).
        up_to(16384, cluster(8, 128, 3)),
        // 512x262144: 72 %.
        up_to(32768, cluster(8, 256, 2)),
        up_to(65536, cluster(8, 1024, 1)),
    ]),
};

pub(super) const LAYER_RESIDUAL: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(4096),
        // 2048x65536: 100 % (79 % from shared memory).
        up_to(8192, cluster(2, 512, 1)),
        // 1024x131072: 96 % (256 threads on eight blocks 93 %, 76 % from shared memory).
        up_to(16384, cluster(4, 512, 1)),
        // 512x262144: 92 %.
        up_to(32768, cluster(8, 512, 1)),
    ]),
    block: Borrowed(&[
        // 2097152x16: 71.0 us (was 106 us).
        up_to(2, block(2, 32, 2, 24)),
        up_to(4, block(2, 128, 1, 5)),
        up_to(8, block(4, 64, 1, 5)),
        // 699008x192: 98 % (16 threads with two packs 93 %).
        up_to(12, block(4, 64, 1, 4)),
        // 1048576x128: 99 % (two rows in flight 94 %).
        up_to(16, block(8, 32, 1, 5)),
        up_to(24, block(8, 32, 1, 5)),
        up_to(32, block(16, 16, 1, 5)),
        // 349504x384: 101 % (32 threads with two packs 93 %).
        up_to(48, block(16, 16, 1, 3)),
        // 262144x512: 100 % (64 threads with one pack 85 %); 174720x768: 100 % (92 %).
        up_to(96, block(32, 8, 1, 5)),
        // 131072x1024: 100 %.
        up_to(128, block(64, 1, 1, 16)),
        // 104832x1280: 100 % (128 threads with two packs 84 %).
        up_to(160, block(32, 8, 1, 3)),
        // 87360x1536: 100 % (128 threads with two packs 92 %).
        up_to(208, block(64, 4, 1, 4)),
        // 65536x2048: 101 %.
        up_to(256, block(128, 1, 1, 8)),
        // 13056x2560: 65.8 us (was 67.3 us).
        up_to(320, block(160, 1, 1, 8)),
        // 43648x3072: 101 % (64 threads with six packs 97 %); 32768x4096: 99 %.
        up_to(640, block(128, 1, 1, 6)),
        // 18688x7168: 100 % (128 threads with seven packs 95 %).
        up_to(1024, block(256, 1, 1, 4)),
        // 2688x12288: 65.9 us (was 67.1 us).
        up_to(1536, block(256, 1, 1, 2)),
        // 8192x16384: 101 % (from shared memory 91 %).
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

pub(super) const ONE_SUM: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(1536),
        // 14336 columns: 96 % (one block of 256 threads 93 %).
        up_to(1792, ring(2, cluster(2, 192, 2))),
        // 8192x16384: 93 %. 2048x16384: 58.0 us (clusters of two 62.5).
        up_to(2048, ring(2, grouped(4, 128, 2, 2))),
        // 18432 columns: 95 %; 6528x20480: 95 % (clusters of four 81 %).
        up_to(2560, ring(2, grouped(2, 128, 2, 1))),
        // 24576 columns: 94 % (one group of rows 87 %).
        up_to(3072, ring(2, grouped(4, 128, 4, 1))),
        // 4096x32768: 93 to 95 %; 28672 columns: 90 %.
        up_to(4096, ring(2, cluster(4, 128, 2))),
        // 3264x40960: 207 us (clusters of eight, one block 242 us); 512x40960: 43.8 us (65.2 us).
        up_to(5120, ring(2, grouped(4, 128, 2, 1))),
        // 1600x49152: 132 us (clusters of four 137 us, one block 216 us).
        up_to(6144, ring(2, cluster(8, 128, 3))),
        // 1600x57344: 158 us (128 threads 162 us, and on one block 231 us).
        up_to(7168, ring(2, cluster(8, 224, 2))),
        // 2048x65536: 90 to 93 % (512 threads 89 %).
        up_to(8192, ring(3, cluster(8, 128, 2))),
        // 1024x131072: 85 to 86 % (512 threads 85 %, the passes in turn 85 %).
        up_to(16384, overlapped(ring(3, cluster(8, 256, 1)))),
    ]),
    block: Borrowed(&[
        // 4194304x8: 159 us (was 196 us).
        up_to(1, ring(3, block(1, 128, 2, 3))),
        up_to(2, ring(3, block(2, 128, 1, 4))),
        up_to(4, ring(3, block(4, 64, 1, 4))),
        up_to(8, ring(3, block(8, 32, 1, 4))),
        // 1398080x96: 95 % (16 threads with one pack 86 %).
        up_to(12, ring(2, block(4, 64, 1, 1))),
        // 1048576x128: 98 % (overlapped 94 %).
        up_to(16, ring(3, block(16, 16, 1, 4))),
        // 699008x192: 99 % (32 threads with one pack 91 %).
        up_to(24, ring(2, block(8, 32, 1, 1))),
        up_to(32, ring(3, block(32, 8, 1, 4))),
        // 104832x320: 52.9 us (was 53.6 us).
        up_to(40, ring(2, block(16, 16, 1, 2))),
        // 349504x384: 99 % (overlapped 96 %).
        up_to(48, ring(2, block(16, 16, 1, 1))),
        // 65536x512: 51.4 us (was 53.8 us).
        up_to(64, ring(3, block(64, 8, 1, 2))),
        // 52416x640: 51.2 us (was 53.1 us).
        up_to(80, ring(2, block(96, 4, 2, 2))),
        // 174720x768: 99 %.
        up_to(96, ring(2, block(128, 4, 1, 2))),
        // 32768x1024: 51.2 us (was 52.0 us).
        up_to(128, ring(3, block(128, 4, 1, 2))),
        // 104832x1280: 97 % (256 threads with one pack 90 %).
        up_to(160, ring(2, block(32, 8, 1, 1))),
        // 87360x1536: 98 %.
        up_to(192, ring(2, block(256, 4, 1, 1))),
        // 16384x2048: 51.3 us (was 51.7 us); 4.3 % with small calls.
        up_to(256, ring(2, block(128, 2, 1, 2))),
        // 52416x2560: 97 %.
        up_to(384, ring(2, block(128, 2, 1, 2))),
        // 32768x4096: 102 %. 4096x4096: 28.5 us (512 threads 30.1).
        up_to(512, ring(3, block(256, 2, 1, 1))),
        // 26176x5120: 98 %. 4096x5120: 34.4 us (128 threads with five packs 36.8 us).
        up_to(640, ring(2, block(320, 2, 1, 1))),
        // 5376 columns: 97 %.
        up_to(672, ring(2, block(224, 1, 1, 2))),
        // 6144 columns: 97 %.
        up_to(768, ring(2, block(192, 2, 1, 1))),
        // 4672x7168: 54.3 us (was 54.5 us); 9.3 % with small calls.
        up_to(896, ring(2, block(192, 1, 1, 2))),
        // 16384x8192: 99 %.
        up_to(1024, ring(3, block(1024, 1, 1, 1))),
        // 13056x10240: 96 % (a cluster of two 83 %). f32 13056x5120: 98 % (two steps 90 %).
        up_to(1280, ring(3, block(256, 1, 1, 1))),
        // 10880x12288: 95 %. 4096x12288: 81.0 us (256 threads 83.9 us).
        up_to(1536, ring(2, block(384, 1, 1, 1))),
        // For devices without clusters.
        up_to(2048, ring(3, block(512, 1, 1, 1))),
    ]),
    long: Borrowed(&[]),
};

/// All figures are of layer norm.
const TWO_SUMS: Ladders = Ladders {
    cluster: Borrowed(&[
        none_up_to(1536),
        // 14336 columns: 93 % (256 threads 90 %).
        up_to(1792, ring(2, cluster(2, 128, 2))),
        // 8192x16384: 91 %. 2048x16384: 61.8 us (clusters of two 71.4 us).
        up_to(2048, ring(2, grouped(4, 128, 2, 2))),
        // 18432 columns: 93 % (clusters of four 75 %).
        up_to(2304, ring(2, grouped(2, 192, 2, 1))),
        // 6528x20480: 88 % (128 threads on two blocks 78 %).
        up_to(2560, ring(3, cluster(4, 160, 3))),
        // 24576 columns: 83 % (three blocks, which spill, 84 %).
        up_to(3072, ring(2, cluster(4, 128, 2))),
        // 28672 columns: 87 %.
        up_to(3584, ring(3, cluster(2, 448, 1))),
        // 4096x32768: 89 % (overlapped 84 %).
        up_to(4096, ring(2, cluster(4, 256, 2))),
        // 3264x40960: 221 us (one block 255 us); 1600x49152: 135 us (clusters of four, one block 159 us).
        up_to(6144, ring(2, cluster(8, 128, 3))),
        // 1600x57344: 161 us (three blocks 272 us, one block 250 us).
        up_to(7168, ring(2, cluster(8, 128, 2))),
        // 2048x65536: 89 % (overlapped 83 %).
        up_to(8192, ring(3, cluster(8, 256, 2))),
        // 1024x131072: 80 % (overlapped 77 %).
        up_to(16384, ring(3, cluster(8, 512, 1))),
    ]),
    block: Borrowed(&[
        // 4194304x8: 138 us (was 183 us).
        up_to(1, ring(3, block(1, 256, 1, 1))),
        // 2097152x16: 85.4 us (was 90.3 us).
        up_to(2, ring(3, block(2, 128, 1, 2))),
        up_to(4, ring(3, block(4, 128, 2, 1))),
        up_to(8, ring(3, block(8, 64, 2, 1))),
        // 349504x96: 58.3 us (was 59.3 us).
        up_to(12, ring(2, block(4, 64, 1, 2))),
        // 1048576x128: 97 %.
        up_to(16, ring(3, block(16, 32, 2, 1))),
        // 174720x192: 55.6 us (was 56.8 us).
        up_to(24, ring(2, block(8, 32, 1, 2))),
        up_to(32, ring(3, block(32, 16, 2, 1))),
        // 104832x320: 55.1 us (was 59.0 us).
        up_to(40, ring(2, block(16, 16, 1, 2))),
        // 349504x384: 97 %.
        up_to(48, ring(2, block(16, 16, 1, 1))),
        // 262144x512: 96 %.
        up_to(64, ring(3, block(32, 8, 1, 2))),
        // 52416x640: 54.7 us (was 58.5 us).
        up_to(80, ring(2, block(32, 8, 1, 2))),
        // 43648x768: 52.4 us (was 55.3 us).
        up_to(96, ring(2, block(96, 4, 2, 2))),
        // 131072x1024: 99 %. 4096x1024: 11.0 us (on one block with twice the rows 12.7).
        up_to(128, ring(2, block(64, 4, 1, 2))),
        // 104832x1280: 96 % (256 threads with one pack 85 %).
        up_to(160, ring(2, block(32, 8, 1, 1))),
        // 87360x1536: 96 %.
        up_to(192, ring(2, block(64, 4, 1, 1))),
        // 65536x2048: 98 %.
        up_to(256, ring(3, block(128, 4, 1, 1))),
        // 52416x2560: 99 %.
        up_to(320, ring(2, block(160, 2, 1, 2))),
        // 10880x3072: 53.4 us (was 55.7 us).
        up_to(384, ring(2, block(192, 1, 2, 2))),
        // 32768x4096: 99 %. 4096x4096: 30.2 us (128 threads 33.5 us).
        up_to(512, ring(3, block(256, 2, 1, 1))),
        // 26176x5120: 99 %.
        up_to(640, ring(3, block(128, 2, 1, 1))),
        // 5376 columns: 99 % (128 threads 94 %).
        up_to(672, ring(2, block(224, 2, 1, 1))),
        // 6144 columns: 95 % (128 threads 88 %).
        up_to(768, ring(2, block(192, 2, 1, 1))),
        // 18688x7168: 93 % (256 threads 90 %).
        up_to(896, ring(3, block(448, 1, 1, 1))),
        // 16384x8192: 94 % (overlapped 90 %).
        up_to(1024, ring(3, block(512, 1, 1, 1))),
        // 13056x10240: 98 % (two steps 94 %).
        up_to(1280, ring(3, block(256, 1, 1, 1))),
        // 10880x12288: 93 % (512 threads 87 %). 4096x12288: 84.8 us (93.0 us).
        up_to(1536, ring(2, block(384, 1, 1, 1))),
        // For devices without clusters.
        up_to(2048, ring(3, block(512, 1, 1, 1))),
    ]),
    long: Borrowed(&[]),
};
