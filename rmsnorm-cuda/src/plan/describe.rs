//! Plans in a line each, for tables and records. A line reads
//!
//! program, blocks `x` threads on a row `x` packs of a thread `x` elements of a pack, `~` if that is not just the row;
//! `in` rows side by side `x` rows in flight, if not one; `ring` steps that shared memory holds, `+` if passes overlap;
//! `on` blocks `x` threads. `Reduce` says how many threads share the partial rows of a column, `Zero` how many words.

use std::fmt;

use super::{KernelKey, Plan, Program, Step, Tile};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<String> = self.steps.iter().flatten().map(Step::to_string).collect();
        f.write_str(&steps.join("; "))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, grid, threads, shared_bytes) = match *self {
            Step::Zero { len, .. } => return write!(f, "Zero {len}"),
            Step::Launch { key, grid, threads, shared_bytes } => (key, grid, threads, shared_bytes),
        };
        let KernelKey { program, tile, .. } = key;
        let Tile { pack, packs, threads_per_row, groups, cluster, unroll, .. } = tile;
        let name = match program {
            Program::Forward => "Forward",
            Program::ForwardCluster => "Cluster",
            Program::ForwardLong => "Long",
            Program::ForwardStreaming => "Streaming",
            Program::Backward => "Backward",
            Program::BackwardRowSums => "RowSums",
            Program::BackwardColumns => "Columns",
            Program::ReducePartials => return write!(f, "Reduce {groups} on {grid}x{threads}"),
        };
        let ragged = if tile.is_ragged { "~" } else { "" };
        write!(f, "{name} {cluster}x{threads_per_row}x{packs}x{pack}{ragged}")?;
        if groups * unroll > 1 {
            write!(f, " in {groups}x{unroll}")?;
        }
        match (tile.stages, shared_bytes.div_ceil(1024)) {
            (0, 0) => {}
            (0, kib) => write!(f, ", {kib} KiB")?,
            (stages, kib) => {
                let overlapped = if tile.is_overlapped { "+" } else { "" };
                write!(f, ", ring {stages}{overlapped} of {kib} KiB")?;
            }
        }
        write!(f, ", on {grid}x{threads}")
    }
}
