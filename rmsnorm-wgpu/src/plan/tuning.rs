//! The tables that plans look up how many packs a thread has. What stands here was measured through wgpu on an H200, 2026-11:
//! beside each rung microseconds of bf16 norms of 268 MB a tensor (67 MB at 1024 columns), RMS / layer norm, in backward with
//! dweight / with dweight and dbias. A copy of as many bytes takes 128.1 (34.4), in backward 192 (51.6).
//!
//! Lengths are pairs of quads: 8 columns.

#[cfg(feature = "conformance")]
pub(crate) mod candidates;
pub(crate) mod data;

use std::borrow::Cow::Borrowed;
#[cfg(any(test, feature = "conformance"))]
use std::collections::BTreeSet;

use rmsnorm_gpu::tuning::{Ladder, none_up_to, up_to};
use rmsnorm_spec::{DType, Norm, Problem};
use rmsnorm_tuning::Kept;

#[cfg(any(test, feature = "conformance"))]
use super::PAIR;
use super::{gradients, is_split};

/// Those that were loaded, or are tried.
pub(crate) static KEPT: Kept<Tuning> = Kept::new();

/// Tables for every kind of call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    /// Packs that a thread has at the most; rows without a rung stream. By 16-bit RMS norm, 16-bit layer norm, and norms of
    /// f32, whose pairs take twice the registers.
    pub(crate) forward: [Ladder<u32>; 3],
    /// The same of 16-bit norms to codes.
    pub(crate) to_codes: Ladder<u32>,
    /// By 16-bit norms with one gradient at the most, with two, of f16, whose conversions take registers of their own, and norms
    /// of f32.
    pub(crate) backward: [Ladder<Division>; 4],
}

/// How many packs a thread of backward has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// The first of these that leaves no thread idle, with so many threads at the most.
    pub(super) without_idle: (&'static [u32], u32),
    /// So many at the most, where none does.
    pub(super) most: u32,
}

impl Tuning {
    /// What is built in.
    pub(crate) const H200: &Tuning = &Tuning {
        forward: [FORWARD_RMS, FORWARD_LAYER, FORWARD_WIDE],
        to_codes: TO_CODES,
        backward: [ONE_GRADIENT, TWO_GRADIENTS, F16, BACKWARD_WIDE],
    };

    /// The table of a forward call.
    pub(super) fn forward(&self, problem: &Problem) -> &Ladder<u32> {
        let [rms, layer, wide] = &self.forward;
        match problem.norm {
            _ if is_split(problem) => wide,
            _ if problem.quant.is_some() => &self.to_codes,
            Norm::Rms => rms,
            Norm::Layer => layer,
        }
    }

    /// The table of a backward call.
    pub(super) fn backward(&self, problem: &Problem) -> &Ladder<Division> {
        let [one_gradient, two_gradients, f16, wide] = &self.backward;
        match problem.dtypes.activation {
            _ if is_split(problem) => wide,
            DType::F16 => f16,
            DType::F32 | DType::Bf16 if gradients(problem) == 2 => two_gradients,
            DType::F32 | DType::Bf16 => one_gradient,
        }
    }

    /// Row lengths at which the code path changes, for the conformance suite: the limits of the tables, in whole packs of 16
    /// threads, and one between them whose threads are no power of two.
    #[cfg(any(test, feature = "conformance"))]
    pub(crate) fn cols_breakpoints(&self) -> Vec<usize> {
        let forward = self.forward.iter().chain([&self.to_codes]);
        let forward = forward.flat_map(|ladder| ladder.iter().map(|rung| rung.up_to));
        let backward = self.backward.iter().flat_map(|ladder| ladder.iter().map(|rung| rung.up_to));
        let limits = forward.chain(backward).filter(|pairs| *pairs < u32::MAX);
        let cols: BTreeSet<usize> =
            limits.map(|pairs| pairs.next_multiple_of(16) as usize * PAIR).chain([7168]).collect();
        cols.into_iter().collect()
    }
}

const FORWARD_RMS: Ladder<u32> = Borrowed(&[
    up_to(96, 5),
    // 1024 columns on 64 threads 35.9, on 32 36.3; with a residual 67.4, and 68.4.
    up_to(128, 2),
    // 128 columns on 4 threads 133.5, on 8 137.5; 4096 on 128 132.4, on 256 137, on 64 134.4.
    up_to(1023, 5),
    // 8192 columns on 128 threads 134.3, on 256 133.6; 12288 on 192 133.4, on 256 134.1, on 384 132.3; 16384 on 256 135.0, on
    // 512 137.6.
    up_to(2048, 8),
    // 32768 columns on 1024 threads 157.8, streaming 147.9.
    none_up_to(4096),
    // 65536 columns on 1024 threads 148.9, streaming 172; with a residual 343, and 368.
    up_to(8192, 8),
]);

const FORWARD_LAYER: Ladder<u32> = Borrowed(&[
    // 128 columns on 4 threads 137.7; 1024 on 32 37.2, on 64 38.4; 4096 on 128 132.7, on 64 134.8.
    up_to(1023, 5),
    // 8192 columns on 128 threads 135.3, on 256 140.3; 12288 on 192 134.0, on 256 137.5, on 384 144; 16384 on 256 136.5, on 512
    // 149.7.
    up_to(2048, 8),
    // 32768 columns on 1024 threads 190, on 512 200, streaming 171.
    none_up_to(4096),
    // 65536 columns on 1024 threads 186, streaming in three visits 202.
    up_to(8192, 8),
]);

const FORWARD_WIDE: Ladder<u32> = Borrowed(&[
    // 1024 columns on 64 threads 67.6, on 128 67.0, on 32 69; 4096 on 256 262, on 512 260.
    up_to(1024, 2),
    // 16384 columns on 512 threads 270, on 1024 286.
    up_to(u32::MAX, 4),
]);

/// By a given scale / one of a row, of 201 MB a call; a copy takes 49.7. What a row has more than its norm waits in registers.
const TO_CODES: Ladder<u32> = Borrowed(&[
    // 1024 columns on 32 threads 59.6 / 64.8, on 64 65.4 / 73.9, on 16 62.3 / 65.6; 2048 on 64 60.9 / 66.5, on 32 63.5 / 66.6; 4096 on
    // 128 62.6 / 67.0, on 64 64.3 / 69.1, on 256 75.8 / 81.6.
    up_to(1023, 5),
    // 8192 columns on 128 threads 64.9 / 70.1, on 256 65.0 / 72.8.
    up_to(2048, 8),
]);

const fn division(without_idle: &'static [u32], most_threads: u32, most: u32) -> Division {
    Division { without_idle: (without_idle, most_threads), most }
}

const ONE_GRADIENT: Ladder<Division> = Borrowed(&[
    // 128 columns on 16 threads 212.5, on 8 229, on 4 219.
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    // 1536 columns on 64 threads 205, on 96 206; 2560 on 160 204, on 64 207; 5120 on 160 208, on 128 210.
    up_to(640, division(&[3, 4, 2], 512, 5)),
    // 7168 columns on 224 threads 218, on 448 214, on 128 227; 12288 on 512 212, on 384 243.
    up_to(u32::MAX, division(&[3, 4, 2], 512, 4)),
]);

/// Two sums take twice the registers.
const TWO_GRADIENTS: Ladder<Division> = Borrowed(&[
    // 128 columns on 16 threads 220.6, on 8 243, on 4 262.
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    // 2560 columns on 160 threads 238, on 64 262; 4096 on 256 228, on 128 235; 5120 on 320 255, on 128 266; 1536 on 96 218, on 64
    // 218 by two rows at once.
    up_to(640, division(&[2, 3, 4], 512, 5)),
    // 7168 columns on 448 threads 241, on 128 246, on 224 331.
    up_to(u32::MAX, division(&[2, 3, 4], 512, 4)),
]);

/// RMS norm of 1024 columns on 128 threads 87, on 32 105; of 4096 on 512 346, on 128 383; of 16384 on 1024 329, on 512 410.
const F16: Ladder<Division> = Borrowed(&[
    up_to(32, division(&[], 512, 1)),
    up_to(64, division(&[], 512, 5)),
    up_to(512, division(&[1, 2], 512, 5)),
    up_to(640, division(&[1, 2], 1024, 5)),
    up_to(u32::MAX, division(&[1, 2], 1024, 4)),
]);

const BACKWARD_WIDE: Ladder<Division> = Borrowed(&[
    up_to(32, division(&[], 512, 1)),
    // 1024 columns of f32 on 64 threads 107, on 32 110, on 128 116; 4096 on 128 392, on 256 396; 8192 on 256 391, on 512 391.
    up_to(u32::MAX, division(&[], 512, 4)),
]);
