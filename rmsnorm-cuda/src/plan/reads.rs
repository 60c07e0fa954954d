//! When a forward kernel reads, and what its registers hold.

use rmsnorm_gpu::program::inputs;
use rmsnorm_spec::{Norm, Piece, Slot};

use super::{KernelKey, Program, Reads, Tile};

impl Tile {
    /// Whether a thread's registers can hold its part of the rows from the first sum to the last
    /// store, if forward reads `matrices` matrices before the norm. A pack takes four registers in
    /// each. The rest of the formula is the smallest count at which ptxas did not spill. A spill
    /// costs layer norm with a residual 18 % at 4608 columns, 11 % at 7168.
    pub(super) fn holds_rows(&self, norm: Norm, matrices: u32) -> bool {
        let packs = self.packs * self.unroll;
        let needed = match (norm, matrices) {
            (Norm::Rms | Norm::L2 | Norm::L2Clamped, _) => 40 + 4 * matrices * (packs + 1),
            (Norm::Layer, ..2) => 28 + 17 * packs,
            (Norm::Layer, 2..) => 36 + packs + 4 * matrices * (packs + 1) + if self.is_ragged { 4 } else { 0 },
        };
        needed <= self.registers()
    }

    /// The same with a gate or a weight before the norm: a pack of h is f32, and takes the registers
    /// of two packs of 16 bits.
    pub(super) fn holds_gated(&self, norm: Norm) -> bool {
        let packs = self.packs * self.unroll;
        let needed = match norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => 40 + 8 * packs,
            Norm::Layer => 48 + 9 * packs,
        };
        needed <= self.registers()
    }

    /// The same if `x` is the sum of several parts. A thread adds two packs at a time, with four
    /// parts of each in flight. Packs that are already added stay in registers, or with
    /// `forward_long` in shared memory.
    pub(super) fn holds_parts(&self, program: Program, norm: Norm) -> bool {
        let packs = if program == Program::ForwardLong { 3 } else { self.packs };
        let needed = match (self.pack, norm) {
            (8, Norm::Rms | Norm::L2 | Norm::L2Clamped) => 44 + 16 * packs,
            (8, Norm::Layer) => 48 + 16 * packs,
            (_, Norm::Rms | Norm::L2 | Norm::L2Clamped) => 56 + 4 * packs,
            (_, Norm::Layer) => 44 + 12 * packs,
        };
        needed <= self.registers()
    }
}

/// Sets how a forward kernel reads; all other kernels read in one way.
pub(super) fn reads(key: &KernelKey) -> Reads {
    let KernelKey { program, call, tile, .. } = key;
    let (weight_bytes, reads, pieces) = (call.dtypes.weight.size() as u32, tile.reads, key.pieces());
    let [before, after] = [Slot::Before, Slot::After].map(|slot| inputs(pieces, slot, program.info().direction).len());
    let has_parts = pieces.has(Piece::Parts);
    // One pack if registers are short: a row with a whole multiprocessor to itself.
    let batch = |others| match has_parts {
        true if tile.holds_parts(*program, call.norm) => 2,
        true => 1,
        false => others,
    };
    if *program == Program::QuantizedForward {
        // With few packs, reading them all at once gains nothing. A kernel that waits for all rows before
        // it writes codes may keep its row. Values of a batch of packs take eight registers for each.
        let loads_at_use = tile.packs <= 2 && !tile.is_cooperative;
        return Reads { loads_at_use, batch: if before == 0 && tile.registers() >= 80 { 4 } else { 2 }, ..reads };
    }
    if *program == Program::Forward {
        // The registers of a row in flight are used for what waits for the norm.
        if after > 0 {
            return Reads { keeps_row: false, loads_at_use: true, ..reads };
        }
        // A second read would have to read all parts, or several matrices, to activate a gate or to
        // multiply by a weight.
        let holds_h = match pieces.has(Piece::GateBefore) || pieces.has(Piece::WeightFirst) {
            true => tile.holds_gated(call.norm),
            false => before > 0 && tile.holds_rows(call.norm, 1 + before as u32),
        };
        let keeps_row = reads.keeps_row || has_parts || holds_h;
        return Reads { keeps_row, loads_at_use: tile.packs <= 2 && !keeps_row, batch: batch(reads.batch), ..reads };
    }
    if *program == Program::ForwardCluster {
        // Reads early what is needed last, if registers suffice: what waits for the norm, which
        // comes from DRAM, otherwise the weights.
        let is_narrow = tile.pack * weight_bytes <= 16;
        let others = match (after > 0 && !is_narrow, pieces.has(Piece::NextNorm)) {
            (false, _) => 4,
            (true, false) => 2,
            (true, true) => 1,
        };
        let (loads_at_use, prefetches_weight) = (after > 0 && tile.packs > 4, after == 0 && is_narrow);
        return Reads { loads_at_use, prefetches_weight, batch: batch(others), ..reads };
    }
    if *program == Program::ForwardLong {
        // Registers do not suffice for all packs. They do not suffice for f32 parameters either,
        // nor for ragged rows, nor in clusters, which have more blocks per multiprocessor.
        let prefetches_weight = tile.cluster == 1 && weight_bytes == 2 && !tile.is_ragged;
        return Reads { prefetches_weight, batch: batch(if call.norm == Norm::Layer { 4 } else { 2 }), ..reads };
    }
    reads
}
