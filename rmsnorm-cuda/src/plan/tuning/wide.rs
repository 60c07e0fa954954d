//! Tiles of calls with an f32 matrix, the fastest on an H200. `rmsnorm tune` found some
//! (2026-11-25, `benches/results/tune-2026-11-25-h200`); the others were measured in bf16
//! (2026-11-21). For the comments on rungs see `narrow.rs`.

use std::borrow::Cow::Borrowed;

use rmsnorm_gpu::tuning::{Ladder, none_up_to, up_to};

use super::narrow::{FINDS_SCALE, LAYER_RESIDUAL, ONE_SUM, PLAIN, RESIDUAL};
use super::{Ladders, Tables, block, cluster, grouped, overlapped, ring};
use crate::plan::Tile;

/// Ladders that this file does not define are those of `narrow.rs`.
pub(super) const TABLES: Tables = Tables {
    forward: [
        Ladders { cluster: PLAIN_CLUSTER, block: PLAIN_BLOCK, ..PLAIN },
        Ladders { cluster: RESIDUAL_CLUSTER, block: RESIDUAL_BLOCK, ..RESIDUAL },
        Ladders { cluster: Borrowed(&[]), block: LAYER_BLOCK, long: LAYER_LONG },
        Ladders { cluster: LAYER_RESIDUAL_CLUSTER, block: LAYER_RESIDUAL_BLOCK, ..LAYER_RESIDUAL },
    ],
    backward: [
        Ladders { cluster: ONE_SUM_CLUSTER, block: ONE_SUM_BLOCK, ..ONE_SUM },
        Ladders { cluster: TWO_SUMS_CLUSTER, block: TWO_SUMS_BLOCK, long: Borrowed(&[]) },
    ],
    to_codes: [TENSOR_TO_CODES, ROW_TO_CODES, BLOCK_TO_CODES, LAYER_TO_CODES],
    finds_scale: FINDS_SCALE,
};

const PLAIN_CLUSTER: Ladder<Tile> = Borrowed(&[
    none_up_to(2048),
    up_to(4096, cluster(2, 128, 3)),
    up_to(8192, cluster(4, 128, 3)),
    up_to(16384, cluster(8, 128, 3)),
]);

const PLAIN_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(1, block(1, 256, 2, 6)),
    up_to(2, block(2, 128, 2, 6)),
    up_to(4, block(4, 64, 2, 6)),
    up_to(8, block(8, 32, 2, 6)),
    up_to(12, block(4, 32, 2, 6)),
    up_to(16, block(16, 16, 2, 6)),
    up_to(24, block(8, 32, 1, 6)),
    // 131072x128: 34.6 us (was 35.0 us).
    up_to(32, block(8, 4, 2, 24)),
    up_to(48, block(16, 16, 1, 4)),
    // 65536x256: 34.4 us (was 35.1 us).
    up_to(64, block(8, 4, 2, 12)),
    up_to(80, block(16, 8, 1, 8)),
    up_to(96, block(32, 1, 1, 16)),
    up_to(112, block(32, 8, 1, 5)),
    up_to(128, block(64, 1, 1, 16)),
    up_to(176, block(64, 1, 1, 24)),
    // 16384x1024: 33.5 us; 4096x1024: 9.5 us (two rows in a block 34.2, 10.4).
    up_to(256, block(64, 1, 2, 12)),
    up_to(288, block(128, 1, 1, 12)),
    up_to(384, block(128, 1, 1, 8)),
    // 8192x2048: 34.0 us (was 34.4 us).
    up_to(512, block(128, 1, 2, 5)),
    up_to(768, block(256, 1, 1, 6)),
    up_to(1280, block(256, 1, 1, 4)),
    up_to(2048, block(512, 1, 1, 3)),
    up_to(4096, block(512, 1, 1, 2)),
    up_to(8192, block(1024, 1, 1, 1)),
]);

const RESIDUAL_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(1, block(1, 256, 1, 5)),
    up_to(2, block(2, 128, 1, 5)),
    up_to(4, block(4, 64, 1, 5)),
    up_to(8, block(8, 32, 1, 5)),
    up_to(16, block(16, 16, 1, 5)),
    up_to(24, block(8, 32, 1, 5)),
    up_to(32, block(32, 8, 1, 5)),
    up_to(48, block(16, 16, 1, 3)),
    up_to(80, block(32, 8, 1, 4)),
    up_to(96, block(64, 1, 1, 8)),
    up_to(128, block(128, 1, 1, 8)),
    up_to(160, block(32, 8, 1, 3)),
    up_to(256, block(128, 1, 1, 8)),
    up_to(320, block(128, 2, 1, 4)),
    up_to(512, block(256, 1, 1, 4)),
    up_to(1280, block(256, 1, 1, 3)),
    up_to(2048, block(512, 1, 1, 2)),
]);

const RESIDUAL_CLUSTER: Ladder<Tile> = Borrowed(&[
    none_up_to(2048),
    up_to(4096, cluster(2, 256, 2)),
    up_to(8192, cluster(4, 256, 2)),
    up_to(16384, cluster(8, 256, 2)),
    up_to(32768, cluster(8, 512, 1)),
]);

const LAYER_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(2, block(1, 128, 2, 8)),
    up_to(4, block(2, 64, 2, 8)),
    up_to(8, block(4, 32, 2, 8)),
    up_to(12, block(4, 32, 2, 6)),
    up_to(16, block(8, 16, 2, 8)),
    up_to(24, block(8, 16, 2, 6)),
    up_to(32, block(16, 8, 2, 8)),
    up_to(40, block(8, 16, 1, 5)),
    up_to(48, block(16, 8, 2, 6)),
    // 65536x256: 35.3 us (was 36.0 us).
    up_to(64, block(16, 16, 2, 3)),
    up_to(72, block(16, 4, 1, 12)),
    up_to(80, block(16, 8, 2, 4)),
    up_to(128, block(32, 1, 1, 32)),
    up_to(160, block(32, 1, 1, 24)),
    up_to(256, block(32, 1, 1, 20)),
    up_to(384, block(64, 1, 1, 16)),
    up_to(448, block(64, 1, 1, 12)),
    up_to(768, block(128, 1, 1, 8)),
    up_to(896, block(128, 1, 1, 6)),
    up_to(1280, block(256, 1, 1, 4)),
    up_to(2048, block(256, 1, 1, 3)),
    // From the L1; longer rows do not stay there.
    up_to(3072, block(512, 1, 1, 2)),
]);

const LAYER_LONG: Ladder<Tile> = Borrowed(&[
    none_up_to(3072),
    up_to(4096, cluster(1, 512, 2)),
    up_to(8192, cluster(1, 1024, 1)),
    up_to(16384, cluster(4, 256, 3)),
    up_to(32768, cluster(8, 256, 2)),
    up_to(65536, cluster(8, 1024, 1)),
]);

const LAYER_RESIDUAL_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(2, block(1, 256, 1, 5)),
    up_to(4, block(2, 128, 1, 5)),
    up_to(8, block(4, 64, 1, 5)),
    up_to(12, block(4, 64, 1, 4)),
    up_to(16, block(8, 32, 1, 5)),
    up_to(24, block(8, 32, 1, 5)),
    up_to(32, block(16, 16, 1, 5)),
    up_to(48, block(16, 16, 1, 3)),
    up_to(96, block(32, 8, 1, 5)),
    up_to(128, block(64, 1, 1, 16)),
    up_to(160, block(32, 8, 1, 3)),
    up_to(208, block(64, 4, 1, 4)),
    up_to(256, block(128, 1, 1, 8)),
    up_to(320, block(64, 1, 1, 12)),
    up_to(640, block(128, 1, 1, 6)),
    up_to(1024, block(256, 1, 1, 4)),
    up_to(1536, block(256, 1, 1, 3)),
    up_to(2048, block(512, 1, 1, 2)),
]);

const LAYER_RESIDUAL_CLUSTER: Ladder<Tile> = Borrowed(&[
    none_up_to(2048),
    // 10880x12288: 101 %; 8192x16384: 102 %.
    up_to(4096, cluster(4, 128, 3)),
    // 6528x20480: 102 % (74 % from shared memory); 4096x32768: 101 % (84 %).
    up_to(8192, cluster(8, 128, 3)),
    // 2048x65536: 99 % (79 % from shared memory).
    up_to(16384, cluster(8, 256, 2)),
    // 1024x131072: 98 % (74 % from shared memory).
    up_to(32768, cluster(8, 512, 1)),
]);

const ONE_SUM_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(1, ring(3, block(1, 256, 1, 4))),
    up_to(2, ring(3, block(2, 128, 1, 4))),
    up_to(4, ring(3, block(4, 64, 1, 4))),
    up_to(8, ring(3, block(8, 32, 1, 4))),
    up_to(12, ring(2, block(4, 64, 1, 1))),
    up_to(16, ring(3, block(16, 16, 1, 4))),
    up_to(24, ring(2, block(8, 32, 1, 1))),
    up_to(32, ring(3, block(32, 8, 1, 4))),
    up_to(40, ring(3, block(8, 32, 1, 1))),
    up_to(48, ring(2, block(16, 16, 1, 1))),
    up_to(64, ring(3, block(64, 8, 2, 1))),
    up_to(80, ring(3, block(16, 16, 1, 1))),
    up_to(96, ring(2, block(128, 4, 1, 2))),
    // 32768x512: 50.5 us (was 51.9 us).
    up_to(128, ring(3, block(128, 4, 1, 2))),
    up_to(160, ring(2, block(32, 8, 1, 1))),
    // 21824x768: 51.2 us (was 52.4 us).
    up_to(192, ring(2, block(192, 2, 2, 2))),
    // 16384x1024: 50.5 us (was 51.2 us); 2.8 % with small calls.
    up_to(256, ring(3, block(256, 2, 1, 2))),
    up_to(384, ring(2, block(128, 2, 1, 2))),
    up_to(512, ring(3, block(256, 2, 1, 1))),
    // 6528x2560: 50.4 us (was 51.4 us); 4.8 % with small calls.
    up_to(640, ring(3, block(320, 1, 2, 1))),
    up_to(672, ring(2, block(224, 1, 1, 2))),
    // 5440x3072: 51.2 us (was 52.4 us).
    up_to(768, ring(2, block(128, 1, 2, 1))),
    // 4672x3584: 51.4 us (was 51.7 us); 9.7 % with small calls.
    up_to(896, ring(3, block(512, 1, 1, 1))),
    // 4096x4096: 51.1 us (was 52.0 us); 9.5 % with small calls.
    up_to(1024, ring(3, block(512, 1, 1, 1))),
    up_to(1280, ring(3, block(256, 1, 1, 1))),
    // 2688x6144: 52.0 us (was 52.7 us); 6.7 % with small calls.
    up_to(1536, ring(3, block(256, 1, 1, 1))),
    up_to(2048, ring(3, block(512, 1, 1, 1))),
]);

const ONE_SUM_CLUSTER: Ladder<Tile> = Borrowed(&[
    none_up_to(1536),
    up_to(1792, ring(2, cluster(2, 192, 2))),
    up_to(2048, ring(2, grouped(4, 128, 2, 2))),
    up_to(2560, ring(2, grouped(2, 128, 2, 1))),
    // 1344x12288: 58.8 us (was 59.3 us); 4.4 % with small calls.
    up_to(3072, ring(2, cluster(4, 256, 2))),
    up_to(4096, ring(2, cluster(4, 128, 2))),
    // 1792x20480: 111 us (one row at a time, 128 threads 131 us). 1536x24576: 119 us.
    up_to(6144, ring(2, grouped(8, 96, 2, 2))),
    up_to(8192, ring(3, cluster(8, 128, 2))),
    up_to(16384, overlapped(ring(3, cluster(8, 256, 1)))),
]);

const TWO_SUMS_BLOCK: Ladder<Tile> = Borrowed(&[
    up_to(1, ring(3, block(1, 512, 2, 1))),
    up_to(2, ring(3, block(2, 256, 2, 1))),
    up_to(4, ring(3, block(4, 128, 2, 1))),
    up_to(8, ring(3, block(8, 64, 2, 1))),
    up_to(12, ring(2, block(4, 64, 1, 1))),
    up_to(16, ring(3, block(16, 32, 2, 1))),
    up_to(24, ring(2, block(8, 32, 1, 1))),
    // 131072x128: 52.2 us (was 53.7 us).
    up_to(32, ring(2, block(16, 16, 1, 2))),
    up_to(40, ring(3, block(8, 32, 1, 1))),
    up_to(48, ring(2, block(16, 16, 1, 1))),
    // 65536x256: 51.9 us (was 52.7 us).
    up_to(64, ring(2, block(16, 8, 1, 2))),
    up_to(80, ring(3, block(16, 16, 1, 1))),
    up_to(96, ring(2, block(32, 8, 1, 1))),
    up_to(128, ring(2, block(64, 4, 1, 2))),
    up_to(160, ring(2, block(32, 8, 1, 1))),
    // 21824x768: 51.8 us (was 53.2 us).
    up_to(192, ring(2, block(64, 2, 2, 2))),
    // 16384x1024: 51.3 us (was 52.6 us); 3.6 % with small calls.
    up_to(256, ring(2, block(128, 2, 1, 2))),
    up_to(320, ring(2, block(160, 2, 1, 2))),
    // 10880x1536: 51.4 us (was 56.0 us); 6.1 % with small calls.
    up_to(384, ring(2, block(128, 1, 2, 2))),
    // 8192x2048: 51.4 us (was 52.3 us).
    up_to(512, ring(2, block(256, 2, 1, 1))),
    up_to(640, ring(3, block(128, 2, 1, 1))),
    up_to(672, ring(2, block(224, 2, 1, 1))),
    up_to(768, ring(2, block(192, 2, 1, 1))),
    // 4672x3584: 53.7 us (was 54.3 us).
    up_to(896, ring(2, block(192, 1, 1, 2))),
    // 4096x4096: 52.8 us (was 53.2 us); 7.4 % with small calls.
    up_to(1024, ring(3, block(256, 1, 1, 1))),
    up_to(1280, ring(3, block(256, 1, 1, 1))),
    up_to(1536, ring(2, block(384, 1, 1, 1))),
    up_to(2048, ring(3, block(512, 1, 1, 1))),
]);

const TWO_SUMS_CLUSTER: Ladder<Tile> = Borrowed(&[
    none_up_to(1536),
    up_to(1792, ring(2, cluster(2, 128, 2))),
    up_to(2048, ring(2, grouped(4, 128, 2, 2))),
    up_to(2304, ring(2, grouped(2, 192, 2, 1))),
    up_to(2560, ring(3, cluster(4, 160, 3))),
    up_to(3072, ring(2, cluster(4, 128, 2))),
    up_to(3584, ring(3, cluster(2, 448, 1))),
    up_to(4096, ring(2, cluster(4, 256, 2))),
    // 1792x20480: 117 us (one row at a time, 128 threads 136 us). 1536x24576: 120 us.
    up_to(6144, ring(2, grouped(8, 96, 2, 2))),
    // 1280x28672: 122 us (two blocks of 256 threads 127 us).
    up_to(7168, ring(2, cluster(8, 128, 3))),
    up_to(8192, ring(3, cluster(8, 256, 2))),
    up_to(16384, ring(3, cluster(8, 512, 1))),
]);

const TENSOR_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    up_to(128, block(32, 2, 1, 16)),
    up_to(256, block(64, 1, 1, 16)),
    up_to(512, block(128, 1, 1, 10)),
    up_to(1024, block(128, 1, 1, 7)),
    up_to(2048, block(256, 1, 1, 4)),
]);

const ROW_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    // 32768x512: 21.6 us (was 22.9 us).
    up_to(128, block(32, 2, 1, 16)),
    up_to(256, block(64, 1, 1, 16)),
    up_to(512, block(128, 1, 1, 8)),
    // 4096x4096: 21.6 us (was 22.2 us).
    up_to(1024, block(128, 1, 1, 5)),
    up_to(1536, block(256, 1, 1, 3)),
    // 2048x8192: 23.3 us (was 23.6 us); 9.9 % with small calls.
    up_to(2048, block(256, 1, 1, 1)),
]);

const BLOCK_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(96),
    up_to(128, block(32, 1, 1, 32)),
    // 16384x1024: 23.6 us (was 24.4 us); 4.6 % with small calls.
    up_to(256, block(32, 1, 1, 16)),
    up_to(512, block(64, 1, 1, 12)),
    // 4096x4096: 24.6 us (was 25.0 us).
    up_to(1024, block(128, 1, 1, 7)),
    up_to(1536, block(256, 1, 1, 4)),
    // 2048x8192: 25.4 us (was 26.1 us); 4.4 % with small calls.
    up_to(2048, block(256, 1, 1, 4)),
]);

const LAYER_TO_CODES: Ladder<Tile> = Borrowed(&[
    none_up_to(256),
    up_to(512, block(64, 1, 1, 12)),
    up_to(1024, block(128, 1, 1, 6)),
    // 2048x8192: 25.1 us (was 25.1 us); 3.7 % with small calls.
    up_to(2048, block(256, 1, 1, 4)),
]);
