//! How threads divide rows.

/// Registers of a multiprocessor, on every architecture.
pub(crate) const REGISTERS_PER_SM: u32 = 1 << 16;

/// Bytes of a block's shared memory that are not rows: the exchange between threads, and the
/// driver's reserve.
pub(crate) const RESERVED_BYTES: usize = 4 << 10;

/// How threads divide a row, and a block its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Contiguous elements of a thread.
    pub(crate) pack: u32,
    /// Packs of a thread in a row.
    pub(crate) packs: u32,
    /// Threads of one block per row; a power of two or a multiple of 32.
    pub(crate) threads_per_row: u32,
    /// Rows that a block handles concurrently.
    pub(crate) groups: u32,
    /// Blocks per row, which exchange sums through distributed shared memory.
    pub(crate) cluster: u32,
    /// Rows that a thread has in flight in one step. In `QuantizedForwardTransposed`: rows of a tile that a
    /// thread has, one in each step.
    pub(crate) unroll: u32,
    /// Steps that shared memory holds; 0 if rows go straight to registers.
    pub(crate) stages: u32,
    /// Whether the next step's first pass runs while the sums of the current step are exchanged.
    pub(crate) is_overlapped: bool,
    /// Whether all blocks of the launch run at the same time and wait for one another:
    /// `QuantizedForward` then finds the tensor's scale and also writes the codes.
    pub(crate) is_cooperative: bool,
    /// Blocks per multiprocessor that registers must suffice for.
    pub(crate) blocks_per_sm: u32,
    /// Bytes of one memory access, at most 16; divides all addresses and strides.
    pub(crate) access_bytes: u32,
    /// Whether cols differs from the number of columns that the threads cover.
    pub(crate) is_ragged: bool,
    /// Whether the last pack of a row is partial, which needs code for single elements.
    pub(crate) has_tail: bool,
    /// When forward reads the data that it needs after the statistics.
    pub(crate) reads: Reads,
}

/// When forward reads the data that it needs after the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reads {
    /// `Forward`, `PartialStatistics`, sums over ranks: a row stays in registers and is read once.
    pub(crate) keeps_row: bool,
    /// `Forward`: the second read of a pack comes just before its use, instead of all packs at
    /// once. `ForwardCluster`: the same for a residual that is added after the norm.
    pub(crate) loads_at_use: bool,
    /// `ForwardCluster`, `ForwardLong`: the weight is read together with the row, the bias later.
    /// `ForwardExchange`: both are read once, before all rows.
    pub(crate) prefetches_weight: bool,
    /// `ForwardCluster`, `ForwardLong`: packs that are read together. `QuantizedForward` with scales of
    /// blocks of columns: packs whose scales are computed together.
    pub(crate) batch: u32,
}

impl Tile {
    /// The default values.
    pub(super) const NONE: Tile = Tile {
        pack: 0,
        packs: 0,
        threads_per_row: 0,
        groups: 0,
        cluster: 1,
        unroll: 1,
        stages: 0,
        is_overlapped: false,
        is_cooperative: false,
        blocks_per_sm: 1,
        access_bytes: 16,
        is_ragged: false,
        has_tail: false,
        reads: Reads { keeps_row: false, loads_at_use: false, prefetches_weight: false, batch: 1 },
    };

    /// Threads of a block.
    pub(super) fn threads(&self) -> u32 {
        self.threads_per_row * self.groups
    }

    /// Registers of a thread: a multiple of eight, at most 255.
    pub(super) fn registers(&self) -> u32 {
        (REGISTERS_PER_SM / (self.threads() * self.blocks_per_sm)).min(255) / 8 * 8
    }
}
