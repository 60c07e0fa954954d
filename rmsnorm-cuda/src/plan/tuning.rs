//! The tables of tiles: the built-in ones, which were fastest on an H200, and loaded ones.
//!
//! A ladder is a list of rungs, each a tile and the longest row that it is for. Lengths are counted
//! in packs: 16 bytes of a row of the widest matrix. So 12 packs are 96 columns of 16 bits, or 48
//! of f32. Three things decide the speed of a tile: bytes in flight per multiprocessor (best from
//! 64 to 128 KiB), idle lanes, and the cost per row besides its packs. Between powers of two,
//! threads with three, five, six or seven packs leave fewer lanes idle.

#[cfg(any(test, feature = "conformance"))]
mod breakpoints;
#[cfg(feature = "conformance")]
pub(crate) mod candidates;
pub(crate) mod data;
pub(super) mod legal;
mod narrow;
mod wide;

use std::borrow::Cow;

use rmsnorm_gpu::tuning::{Ladder, find, up_to};
use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{Direction, Norm, Problem};
use rmsnorm_tuning::Kept;

use super::{Tile, reads_more};

/// Tables that were loaded, or that `rmsnorm tune` tries.
pub(crate) static KEPT: Kept<Tuning> = Kept::new();

/// Tables for every kind of call: first for 16-bit widest matrices, then for f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) widths: [Tables; 2],
    /// The bytes that backward reads a second time from the L2 in the time of another kernel; 0 if
    /// it never should.
    pub(crate) split_bytes: u64,
    /// Whether forward keeps a row in registers where that is faster than to read it again. Not stored
    /// in files: true in all tables.
    pub(crate) keeps_rows: bool,
}

/// Tables for one width of the widest matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    /// RMS norm; RMS norm with a residual or several parts, which reads more than one matrix; layer
    /// norm, which visits a row three times; layer norm with a residual or several parts.
    pub(crate) forward: [Ladders; 4],
    /// At most one sum per row and one per column; two of each, which need more registers.
    pub(crate) backward: [Ladders; 2],
    /// Forward to codes in one block: RMS norm with a scale per tensor, per row, per block; layer
    /// norm. Other lengths, and every call with a residual, use the tile of forward.
    pub(crate) to_codes: [Ladder<Tile>; 4],
    /// RMS norm, for the search of the tensor's scale. Other lengths use the tile that writes the
    /// codes.
    pub(crate) finds_scale: Ladder<Tile>,
}

/// Where a row is kept, in the order of search. A row without a rung, or without room on the
/// device, streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ladders {
    /// On chip, divided among the blocks of a cluster.
    pub(crate) cluster: Ladder<Tile>,
    /// On chip, in one block.
    pub(crate) block: Ladder<Tile>,
    /// Forward: in shared memory, of a block or a cluster.
    pub(crate) long: Ladder<Tile>,
}

impl Tuning {
    /// The built-in tables.
    pub(crate) const H200: &Tuning = &BUILT_IN;

    /// These tables, with the programs of large calls and long rows for every size: forward reads rows
    /// again, backward always has partial sums.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_large_plans(&self) -> &'static Tuning {
        KEPT.keep(Tuning { split_bytes: 0, keeps_rows: false, ..self.clone() })
    }

    const fn tables(&self, pack: u32) -> &Tables {
        let [narrow, wide] = &self.widths;
        if pack == 8 { narrow } else { wide }
    }

    /// The ladders of a call with packs of `pack` columns.
    pub(super) fn ladders(&self, problem: &Problem, pack: u32) -> &Ladders {
        let Tables { forward: [plain, residual, layer, layer_residual], backward: [one, two], .. } = self.tables(pack);
        let (is_layer, has_two_sums) = (problem.norm == Norm::Layer, problem.tensors.sums_over_rows() == 2);
        match (problem.direction, is_layer, reads_more(problem)) {
            (Direction::Backward, ..) if is_layer || has_two_sums => two,
            (Direction::Backward, ..) => one,
            (Direction::Forward | Direction::QuantizedForward, false, false) => plain,
            (Direction::Forward | Direction::QuantizedForward, false, true) => residual,
            (Direction::Forward | Direction::QuantizedForward, true, false) => layer,
            (Direction::Forward | Direction::QuantizedForward, true, true) => layer_residual,
        }
    }

    /// The ladder of a call to codes.
    pub(super) fn to_codes(&self, problem: &Problem, scale: ScaleKind, pack: u32) -> Option<&Ladder<Tile>> {
        let Tables { to_codes: [tensor, row, block, layer], finds_scale, .. } = self.tables(pack);
        let rms = match scale {
            ScaleKind::Current if find(finds_scale, problem.cols.div_ceil(pack as usize)).is_some() => finds_scale,
            ScaleKind::Given | ScaleKind::Current => tensor,
            ScaleKind::Row => row,
            ScaleKind::Block { .. } | ScaleKind::Mx { .. } => block,
        };
        let table = if problem.norm == Norm::Layer { layer } else { rms };
        (!reads_more(problem)).then_some(table)
    }
}

/// Threads per row, groups of such threads in a block, rows in flight per group, and blocks per
/// multiprocessor.
pub(super) const fn block(threads_per_row: u32, groups: u32, unroll: u32, blocks_per_sm: u32) -> Tile {
    Tile { threads_per_row, groups, unroll, blocks_per_sm, ..Tile::NONE }
}

/// Blocks per row, threads of each, and blocks per multiprocessor.
const fn cluster(cluster: u32, threads_per_row: u32, blocks_per_sm: u32) -> Tile {
    Tile { cluster, ..block(threads_per_row, 1, 1, blocks_per_sm) }
}

/// Backward: blocks per row, threads of each, concurrent rows, and blocks per multiprocessor.
const fn grouped(cluster: u32, threads_per_row: u32, groups: u32, blocks_per_sm: u32) -> Tile {
    Tile { cluster, ..block(threads_per_row, groups, 1, blocks_per_sm) }
}

/// Backward: with this many steps in shared memory. Two where three would put too many bytes in
/// flight.
pub(super) const fn ring(stages: u32, tile: Tile) -> Tile {
    Tile { stages, ..tile }
}

/// Backward: runs the next step's first pass while the sums of this step are exchanged.
const fn overlapped(tile: Tile) -> Tile {
    Tile { is_overlapped: true, ..tile }
}

/// Forward on devices that refuse the clusters of [`Ladders::long`]: one matrix, in the shared memory of
/// one block.
pub(super) const LONG_WITHOUT_CLUSTERS: Ladder<Tile> = Cow::Borrowed(&[up_to(8192, block(1024, 1, 1, 1))]);

/// A static, because a program may contain several copies of a constant.
static BUILT_IN: Tuning = Tuning { widths: [narrow::TABLES, wide::TABLES], split_bytes: 10 << 20, keeps_rows: true };
