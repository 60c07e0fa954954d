//! The tables of packs per thread that plans use. The built-in table was measured through wgpu on
//! an H200, 2026-11. Comments at the rungs give times in us for bf16 norms with 268 MB per tensor
//! (67 MB at 1024 columns): forward as RMS / layer norm, backward with dweight / with dweight and
//! dbias. A copy of the same size takes 128.1 us (34.4 us at 1024 columns), with the tensors of
//! backward 192 us (51.6 us).
//!
//! Row lengths are in pairs of quads: 8 columns.

#[cfg(feature = "conformance")]
pub(crate) mod candidates;
pub(crate) mod data;

use std::borrow::Cow::Borrowed;
#[cfg(any(test, feature = "conformance"))]
use std::collections::BTreeSet;

use rmsnorm_gpu::tuning::{Ladder, none_up_to, up_to};
use rmsnorm_tuning::Kept;

/// Columns of a pair of quads, the unit of columns that a thread owns.
pub(crate) const PAIR: usize = 8;

/// Maximum pairs of a row in a thread's registers (forward), and minimum pairs of a block of a
/// longer row (`ends_block`).
pub(crate) const MOST_PACKS: u32 = 8;

/// Tables that were loaded or are being tried.
pub(crate) static KEPT: Kept<Tuning> = Kept::new();

/// Tables for every kind of call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Maximum packs per thread; rows without a rung stream. For 16-bit RMS norm, 16-bit layer norm
    /// without and with a residual, and norms of f32, whose pairs take twice the registers.
    pub(crate) forward: [Ladder<u32>; 4],
    /// The same for 16-bit norms to codes.
    pub(crate) to_codes: Ladder<u32>,
    /// For 16-bit norms with at most one gradient, with two, of f16 (conversions take registers),
    /// and of f32.
    pub(crate) backward: [Ladder<Division>; 4],
}

/// Packs per thread of backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// The first of these packs that leaves no thread idle is used; and the maximum of threads.
    pub(super) without_idle: (&'static [u32], u32),
    /// Maximum packs if all of them leave idle threads.
    pub(super) most: u32,
    /// Whether dx is found from a second reading of the row, not from registers. Loaded tables do not
    /// say so.
    pub(super) reads_again: bool,
}

impl Tuning {
    /// The built-in table.
    pub(crate) const H200: &Tuning = &Tuning {
        forward: [FORWARD_RMS, FORWARD_LAYER, FORWARD_LAYER_ADD, FORWARD_WIDE],
        to_codes: TO_CODES,
        backward: [ONE_GRADIENT, TWO_GRADIENTS, F16, BACKWARD_WIDE],
    };

    /// Row lengths at which the code path changes, for the conformance suite: the limits of the
    /// tables, rounded up to 16 threads, and one length whose number of threads is not a power of
    /// two.
    #[cfg(any(test, feature = "conformance"))]
    pub(crate) fn cols_breakpoints(&self) -> Vec<usize> {
        let forward = self.forward.iter().chain([&self.to_codes]);
        let forward = forward.flat_map(|ladder| ladder.iter().map(|rung| rung.up_to));
        let backward = self.backward.iter().flat_map(|ladder| ladder.iter().map(|rung| rung.up_to));
        let limits =
            forward.chain(backward).chain(GATED_BEFORE.iter().map(|rung| rung.up_to)).filter(|pairs| *pairs < u32::MAX);
        let cols: BTreeSet<usize> =
            limits.map(|pairs| pairs.next_multiple_of(16) as usize * PAIR).chain([7168]).collect();
        cols.into_iter().collect()
    }
}

const FORWARD_RMS: Ladder<u32> = Borrowed(&[
    up_to(96, 5),
    // 1024 columns: 35.9 on 64 threads, 36.3 on 32; with a residual 67.4 and 68.4.
    up_to(128, 2),
    // 128 columns: 133.5 on 4 threads, 137.5 on 8. 4096 columns: 132.4 on 128, 137 on 256, 134.4 on
    // 64.
    up_to(1023, 5),
    // 8192 columns: 134.3 on 128 threads, 133.6 on 256. 12288 columns: 133.4 on 192, 134.1 on 256,
    // 132.3 on 384. 16384 columns: 135.0 on 256, 137.6 on 512.
    up_to(2048, 8),
    // 32768 columns: 157.8 on 1024 threads, streaming 147.9.
    none_up_to(4096),
    // 65536 columns: 148.9 on 1024 threads, streaming 172; with a residual 343 and 368.
    up_to(8192, 8),
]);

const FORWARD_LAYER: Ladder<u32> = Borrowed(&[
    // 128 columns: 137.7 on 4 threads. 1024 columns: 37.2 on 32, 38.4 on 64. 4096 columns: 132.7 on
    // 128, 134.8 on 64.
    up_to(1023, 5),
    // 8192 columns: 135.3 on 128 threads, 140.3 on 256. 12288 columns: 134.0 on 192, 137.5 on 256,
    // 144 on 384. 16384 columns: 136.5 on 256, 149.7 on 512.
    up_to(2048, 8),
    // 32768 columns: 190 on 1024 threads, 200 on 512, streaming 171.
    none_up_to(4096),
    // 65536 columns: 186 on 1024 threads, streaming in three passes 202.
    up_to(8192, 8),
]);

/// 4096 rows, us of a residual before the norm / after it.
const FORWARD_LAYER_ADD: Ladder<u32> = Borrowed(&[
    // 768 columns, 16384 rows: 29.6 / 23.0 on 32 threads, 30.8 / 24.0 on 64.
    up_to(96, 5),
    // 1024 columns: 12.9 / 11.1 on 64 threads, 13.8 / 11.7 on 32.
    up_to(128, 2),
    up_to(1023, 5),
    up_to(2048, 8),
    none_up_to(4096),
    up_to(8192, 8),
]);

const FORWARD_WIDE: Ladder<u32> = Borrowed(&[
    // 1024 columns: 67.6 on 64 threads, 67.0 on 128, 69 on 32. 4096 columns: 262 on 256, 260 on
    // 512.
    up_to(1024, 2),
    // 16384 columns: 270 on 512 threads, 286 on 1024.
    up_to(u32::MAX, 4),
]);

/// With a given scale / with a scale per row, 201 MB per call; a copy takes 49.7 us. The values of
/// a row wait in registers.
const TO_CODES: Ladder<u32> = Borrowed(&[
    // 1024 columns: 59.6 / 64.8 on 32 threads, 65.4 / 73.9 on 64, 62.3 / 65.6 on 16. 2048 columns:
    // 60.9 / 66.5 on 64, 63.5 / 66.6 on 32. 4096 columns: 62.6 / 67.0 on 128, 64.3 / 69.1 on 64,
    // 75.8 / 81.6 on 256.
    up_to(1023, 5),
    // 8192 columns: 64.9 / 70.1 on 128 threads, 65.0 / 72.8 on 256.
    up_to(2048, 8),
]);

const fn division(without_idle: &'static [u32], most_threads: u32, most: u32) -> Division {
    Division { without_idle: (without_idle, most_threads), most, reads_again: false }
}

const fn read_again(without_idle: &'static [u32], most_threads: u32, most: u32) -> Division {
    Division { reads_again: true, ..division(without_idle, most_threads, most) }
}

const ONE_GRADIENT: Ladder<Division> = Borrowed(&[
    // 128 columns: 212.5 on 16 threads, 229 on 8, 219 on 4.
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    // 1536 columns: 205 on 64 threads, 206 on 96. 2560 columns: 204 on 160, 207 on 64. 5120
    // columns: 208 on 160, 210 on 128.
    up_to(640, division(&[3, 4, 2], 512, 5)),
    // 7168 columns: 218 on 224 threads, 214 on 448, 227 on 128. 12288 columns: 212 on 512, 243 on
    // 384.
    up_to(u32::MAX, division(&[3, 4, 2], 512, 4)),
]);

/// With a gate after the norm and at most one gradient. No loaded table has these two ladders.
///
/// Share of a copy's rate, bf16 RMS norm with 64 MiB a tensor. A row is held by `ONE_GRADIENT`.
///
/// | columns | after, held | after, here | before, held | before, here |
/// |---|---|---|---|---|
/// | 128 | 71 % | 79 % | 70 % | 76 % |
/// | 512 | 61 % | 81 % | 59 % | 77 % |
/// | 2048 | 56 % | 78 % | 59 % | 73 % |
/// | 4096 | 56 % | 76 % | 56 % | 72 % |
/// | 6144 | 54 % | 71 % | 55 % | 69 % |
/// | 8192 | 57 % | 69 % | 54 % | 65 % |
/// | 16384 | 8 % | 62 % | 11 % | 55 % |
pub(super) const GATED_AFTER: Ladder<Division> = Borrowed(&[up_to(u32::MAX, read_again(&[2], 1024, 2))]);

/// The same with the gate before the norm. Its activation is computed again with the row.
pub(super) const GATED_BEFORE: Ladder<Division> = Borrowed(&[
    up_to(256, division(&[2], 1024, 2)),
    // 4096 columns: 61 % by two packs.
    up_to(512, read_again(&[4], 1024, 4)),
    // 8192 columns: 69 % held by two packs.
    up_to(u32::MAX, read_again(&[2], 1024, 2)),
]);

/// Two sums take twice the registers.
const TWO_GRADIENTS: Ladder<Division> = Borrowed(&[
    // 128 columns: 220.6 on 16 threads, 243 on 8, 262 on 4.
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    // 2560 columns: 238 on 160 threads, 262 on 64. 4096 columns: 228 on 256, 235 on 128. 5120
    // columns: 255 on 320, 266 on 128. 1536 columns: 218 on 96, and 218 on 64 with two rows at
    // once.
    up_to(640, division(&[2, 3, 4], 512, 5)),
    // 7168 columns: 241 on 448 threads, 246 on 128, 331 on 224.
    up_to(u32::MAX, division(&[2, 3, 4], 512, 4)),
]);

/// RMS norm of 1024 columns: 87 on 128 threads, 105 on 32. 4096 columns: 346 on 512, 383 on 128.
/// 16384 columns: 329 on 1024, 410 on 512.
const F16: Ladder<Division> = Borrowed(&[
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    up_to(512, division(&[1, 2], 512, 5)),
    up_to(640, division(&[1, 2], 1024, 5)),
    up_to(u32::MAX, division(&[1, 2], 1024, 4)),
]);

const BACKWARD_WIDE: Ladder<Division> = Borrowed(&[
    up_to(32, division(&[], 512, 1)),
    // f32, 1024 columns: 107 on 64 threads, 110 on 32, 116 on 128. 4096 columns: 392 on 128, 396 on
    // 256. 8192 columns: 391 on 256 and on 512.
    up_to(u32::MAX, division(&[], 512, 4)),
]);
