//! The WGSL of `rmsnorm-wgpu`, as text: one file per stage, and what stages share. What puts a program together is in that
//! crate's `source.rs`.
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
            pub const $name: Source = Source { path: concat!("shaders/", $file), text: include_str!($file) };
        )*

        /// Every file.
        pub const ALL: &[Source] = &[$($name),*];
    };
}

sources! {
    ATOMICS = "atomics.wgsl",
    BACKWARD = "backward.wgsl",
    BACKWARD_COLUMNS = "backward_columns.wgsl",
    BACKWARD_ROW_SUMS = "backward_row_sums.wgsl",
    CHECK_F16 = "check_f16.wgsl",
    CLEAR = "clear.wgsl",
    CODES = "codes.wgsl",
    COLUMNWISE = "columnwise.wgsl",
    COPY = "copy.wgsl",
    FOLD = "fold.wgsl",
    FORWARD = "forward.wgsl",
    FORWARD_STREAMING = "forward_streaming.wgsl",
    FORWARD_STREAMING_TWICE = "forward_streaming_twice.wgsl",
    FORWARD_TWICE = "forward_twice.wgsl",
    GRADIENTS = "gradients.wgsl",
    IO_BF16 = "io_bf16.wgsl",
    IO_F16 = "io_f16.wgsl",
    IO_F32 = "io_f32.wgsl",
    NEXT_NORM = "next_norm.wgsl",
    NORMALIZE = "normalize.wgsl",
    PARAMETERS = "parameters.wgsl",
    PARAMS = "params.wgsl",
    PARTIALS = "partials.wgsl",
    QUANTIZE = "quantize.wgsl",
    QUANTIZED_FORWARD = "quantized_forward.wgsl",
    QUANTIZED_FORWARD_STREAMING = "quantized_forward_streaming.wgsl",
    REDUCE_PARTIALS = "reduce_partials.wgsl",
    REDUCE_SUBGROUP = "reduce_subgroup.wgsl",
    REDUCE_WORKGROUP = "reduce_workgroup.wgsl",
    SCALES = "scales.wgsl",
    STATISTICS = "statistics.wgsl",
    TENSOR_SCALE = "tensor_scale.wgsl",
    THREADS = "threads.wgsl",
    TRANSPOSE_CODES = "transpose_codes.wgsl",
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
        let names = folder.map(|file| format!("shaders/{}", file.expect("a file").file_name().display()));
        let there: BTreeSet<String> = names.filter(|name| name.ends_with(".wgsl")).collect();
        assert_eq!(there, ALL.iter().map(|source| source.path.into()).collect());
    }
}
