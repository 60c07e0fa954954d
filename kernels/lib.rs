//! The CUDA C++ of `rmsnorm-cuda`, as text: headers (`.cuh`) and one file per stage. It has no `#include`; what puts a
//! program together, and what it leaves open (`-D` options), is in that crate's `source.rs`.
#![no_std]
#![forbid(unsafe_code)]

/// A file of this folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name in the repository, as messages of a compiler have it.
    pub path: &'static str,
    /// What is in it.
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:ident = $file:literal,)*) => {
        $(
            #[doc = concat!("`", $file, "`")]
            pub const $name: Source = Source { path: concat!("kernels/", $file), text: include_str!($file) };
        )*

        /// Every file.
        pub const ALL: &[Source] = &[$($name),*];
    };
}

sources! {
    BACKWARD = "backward.cu",
    BACKWARD_GIVEN = "backward_given.cu",
    BACKWARD_ROWS = "backward_rows.cuh",
    BACKWARD_SPLIT = "backward_split.cu",
    BACKWARD_STATISTICS = "backward_statistics.cu",
    BACKWARD_STREAMING = "backward_streaming.cu",
    BACKWARD_VISITS = "backward_visits.cuh",
    CLEAR = "clear.cu",
    CODES = "codes.cuh",
    COLUMNS = "columns.cuh",
    COLUMNWISE = "columnwise.cu",
    COLUMN_STATISTICS = "column_statistics.cu",
    DTYPE = "dtype.cuh",
    FORWARD = "forward.cu",
    FORWARD_CLUSTER = "forward_cluster.cu",
    FORWARD_COLUMNS = "forward_columns.cuh",
    FORWARD_EXCHANGE = "forward_exchange.cu",
    FORWARD_GIVEN = "forward_given.cu",
    FORWARD_PARTS = "forward_parts.cuh",
    FORWARD_LONG = "forward_long.cu",
    FORWARD_ROWS = "forward_rows.cuh",
    FORWARD_STREAMING = "forward_streaming.cu",
    FORWARD_VISITS = "forward_visits.cuh",
    GATHER_NUMBERS = "gather_numbers.cu",
    GRADIENTS = "gradients.cuh",
    MEMORY = "memory.cuh",
    NORMALIZE = "normalize.cuh",
    PARAMS = "params.cuh",
    PEERS = "peers.cuh",
    QUANTIZE = "quantize.cuh",
    QUANTIZED_FORWARD = "quantized_forward.cu",
    QUANTIZED_FORWARD_STREAMING = "quantized_forward_streaming.cu",
    REDUCE = "reduce.cuh",
    REDUCE_FORWARD = "reduce_forward.cu",
    REDUCE_FORWARD_ROWS = "reduce_forward_rows.cu",
    REDUCE_PARTIALS = "reduce_partials.cu",
    SUM_OVER_RANKS = "sum_over_ranks.cuh",
    TRANSPOSE_CODES = "transpose_codes.cu",
}

/// Tells versions of all these texts apart: the hash of Fowler, Noll and Vo. A constant, so that who asks has no second copy of them.
pub const REVISION: u64 = revision(ALL);

const fn revision(sources: &[Source]) -> u64 {
    let (mut hash, mut file) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while file < sources.len() {
        let (text, mut byte) = (sources[file].text.as_bytes(), 0);
        while byte < text.len() {
            hash = (hash ^ text[byte] as u64).wrapping_mul(0x0100_0000_01b3);
            byte += 1;
        }
        // Where a text ends counts: no text has this byte.
        hash = (hash ^ 0xff).wrapping_mul(0x0100_0000_01b3);
        file += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;
    use std::format;
    use std::string::String;

    use super::ALL;

    #[test]
    fn every_file_of_the_folder_is_listed() {
        let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let names = folder.map(|file| format!("kernels/{}", file.expect("a file").file_name().display()));
        let there: BTreeSet<String> = names.filter(|name| name.ends_with(".cu") || name.ends_with(".cuh")).collect();
        assert_eq!(there, ALL.iter().map(|source| source.path.into()).collect());
    }
}
