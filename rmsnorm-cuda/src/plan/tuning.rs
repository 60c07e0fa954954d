//! The tables that plans look tiles up in, and those that are built in: what was best on an H200.
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
mod narrow;
mod wide;

use rmsnorm_gpu::tuning::{Ladder, find};
use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{Direction, Norm, Problem};
use rmsnorm_tuning::Kept;

use super::{Tile, is_sum};

/// Those that were loaded, or are tried.
pub(crate) static KEPT: Kept<Tuning> = Kept::new();

/// Tables for every kind of call: those whose widest matrix has 16 bits, then those with f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) widths: [Tables; 2],
    /// Bytes that backward had better read twice, the second time from the L2, than launch another kernel; 0 if it never had.
    pub(crate) split_bytes: u64,
    /// Whether forward holds the rows of small calls in registers. Not in files: all tables do.
    pub(crate) holds_small: bool,
}

/// Tables of calls of one width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    /// RMS norm, and with a residual or of several parts: more than one matrix is read. Layer norm, whose row is visited three times, and
    /// likewise.
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

    /// The same with the programs of large calls for every size: small ones have others in forward, and no partial rows in backward.
    #[cfg(feature = "conformance")]
    pub(crate) fn as_if_large(&self) -> &'static Tuning {
        KEPT.keep(Tuning { split_bytes: 0, holds_small: false, ..self.clone() })
    }

    const fn tables(&self, pack: u32) -> &Tables {
        let [narrow, wide] = &self.widths;
        if pack == 8 { narrow } else { wide }
    }

    /// The tables of a call in packs of `pack` columns.
    pub(super) fn ladders(&self, problem: &Problem, pack: u32) -> &Ladders {
        let Tables { forward: [plain, residual, layer, layer_residual], backward: [one, two], .. } = self.tables(pack);
        let (is_layer, has_two_sums) = (problem.norm == Norm::Layer, problem.tensors.sums_over_rows() == 2);
        match (problem.direction, is_layer, is_sum(problem)) {
            (Direction::Backward, ..) if is_layer || has_two_sums => two,
            (Direction::Backward, ..) => one,
            (Direction::Forward | Direction::QuantizedForward, false, false) => plain,
            (Direction::Forward | Direction::QuantizedForward, false, true) => residual,
            (Direction::Forward | Direction::QuantizedForward, true, false) => layer,
            (Direction::Forward | Direction::QuantizedForward, true, true) => layer_residual,
        }
    }

    /// The table of a call to codes.
    pub(super) fn to_codes(&self, problem: &Problem, scale: ScaleKind, pack: u32) -> Option<&Ladder<Tile>> {
        let Tables { to_codes: [tensor, row, block, layer], finds_scale, .. } = self.tables(pack);
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
static BUILT_IN: Tuning = Tuning { widths: [narrow::TABLES, wide::TABLES], split_bytes: 10 << 20, holds_small: true };
