//! The second stage of `dweight` and `dbias`: the layout of partial rows, and the threads that add
//! them.
//!
//! Lengths are in f32 elements. A thread of the second stage owns [`COLUMNS`] columns of one
//! gradient. [`LANES`] threads cover adjacent columns, and several such groups share the partial
//! rows.

/// Columns that a thread of the second stage owns: one access of 16 bytes.
pub const COLUMNS: u32 = 4;

/// Threads of the second stage on adjacent columns.
pub const LANES: u32 = 8;

/// The length of a partial row is a multiple of this. Each row begins on 32 bytes, and its last
/// columns are stored as whole packs.
pub const ROW_MULTIPLE: u32 = 8;

/// Alignment of a workspace in bytes, and the bytes of one access to partial rows.
pub const ALIGNMENT: u64 = 16;

/// The most elements by which an unaligned workspace is shifted to begin on [`ALIGNMENT`].
pub const ALIGNMENT_SLACK: u64 = ALIGNMENT / size_of::<f32>() as u64 - 1;

/// Elements from one partial row of a gradient to the next.
pub const fn row_stride(cols: usize) -> u64 {
    (cols as u64).next_multiple_of(ROW_MULTIPLE as u64)
}

/// Blocks of the second stage, for `gradients` gradients of `cols` columns.
pub const fn blocks(cols: usize, gradients: usize) -> u64 {
    (cols as u64).div_ceil((COLUMNS * LANES) as u64) * gradients as u64
}

/// Threads that share the partial rows of a column: a power of two, at most `most`. Each has about
/// two rows, so that all loads are in flight at once.
pub fn groups(partial_rows: u64, most: u32) -> u32 {
    (partial_rows.div_ceil(2).min(128).next_power_of_two() as u32).max(4).min(most)
}

/// Chunks of rows whose gradients are summed serially: one per block, or a multiple of that if a
/// chunk would have more than `most_rows` rows.
pub fn chunks(rows: u64, blocks: u64, most_rows: u64) -> u64 {
    blocks * rows.div_ceil((blocks * most_rows).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_rows_begin_on_32_bytes() {
        assert_eq!([1, 8, 9, 4096].map(row_stride), [8, 8, 16, 4096]);
        assert_eq!(ALIGNMENT_SLACK, 3);
    }

    #[test]
    fn every_column_of_every_gradient_has_a_block() {
        assert_eq!(
            [(1, 1), (32, 1), (33, 2), (4096, 2)].map(|(cols, gradients)| blocks(cols, gradients)),
            [1, 1, 4, 256]
        );
    }

    #[test]
    fn threads_share_partial_rows_two_each() {
        assert_eq!([0, 1, 8, 9, 10, 11, 255, 10_000].map(|rows| groups(rows, 128)), [4, 4, 4, 8, 8, 8, 128, 128]);
        assert_eq!(groups(10_000, 64), 64);
    }

    #[test]
    fn chunks_are_whole_rounds_of_blocks() {
        assert_eq!(chunks(1000, 10, 100), 10);
        assert_eq!(chunks(1001, 10, 100), 20);
        assert_eq!(chunks(0, 0, 100), 0);
    }
}
