//! A program as the compiler gets it: one text with its headers in front, and the options that make a kernel of it.
//!
//! The kernels have no `#include`, so a driver and NVRTC are all that a user needs. No number is written in both
//! languages: what Rust decides reaches the kernels as `-D` options, and only through here.

use rmsnorm_kernels::{self as kernels, Source};
use rmsnorm_spec::{CastOrder, Norm};

use crate::caps::Arch;
use crate::params::Params;
use crate::plan::{Accumulate, KernelKey, Program};

/// Each may use what stands before it.
const HEADERS: [Source; 6] =
    [kernels::DTYPE, kernels::PARAMS, kernels::REDUCE, kernels::MEMORY, kernels::NORMALIZE, kernels::GRADIENTS];

const fn file(program: Program) -> Source {
    match program {
        Program::Forward => kernels::FORWARD,
        Program::ForwardCluster => kernels::FORWARD_CLUSTER,
        Program::ForwardLong => kernels::FORWARD_LONG,
        Program::ForwardStreaming => kernels::FORWARD_STREAMING,
        Program::Backward => kernels::BACKWARD,
        Program::BackwardRowSums | Program::BackwardColumns => kernels::BACKWARD_STREAMING,
        Program::ReducePartials => kernels::REDUCE_PARTIALS,
    }
}

/// The file of a program, under the name that the compiler's messages have for it.
pub(crate) const fn file_name(program: Program) -> &'static str {
    file(program).path
}

/// Headers and program as one text. Messages of the compiler name the file and its line.
pub(crate) fn text(program: Program) -> String {
    HEADERS
        .into_iter()
        .chain([file(program)])
        .map(|Source { path, text }| format!("#line 1 \"{path}\"\n{text}\n"))
        .collect()
}

/// The compiler's options for a kernel: the device, the language, then all that the sources leave open. Nothing here
/// loosens IEEE arithmetic.
pub(crate) fn options(key: &KernelKey, arch: Arch) -> Vec<String> {
    let language = [format!("--gpu-architecture=sm_{}", arch.0), "--std=c++17".into(), "-default-device".into()];
    let dtypes = [("T", key.activation), ("W", key.weight), ("R", key.residual)];
    let names = dtypes.map(|(name, dtype)| format!("-D{name}={dtype}"));
    let numbers = numbers(key).map(|(name, value)| format!("-D{name}={value}"));
    language.into_iter().chain(names).chain(numbers).collect()
}

fn numbers(key: &KernelKey) -> [(&'static str, u32); 23] {
    let KernelKey { program, norm, cast_order, grad_reduction, flags, tile, .. } = *key;
    let accumulate = match grad_reduction {
        Accumulate::Partials => 0,
        Accumulate::Locks => 1,
        Accumulate::Atomics => 2,
    };
    [
        ("IS_BACKWARD", (!program.is_forward()).into()),
        ("IS_LAYER", (norm == Norm::Layer).into()),
        ("HAS_WEIGHT", flags.weight.into()),
        ("HAS_BIAS", flags.bias.into()),
        ("HAS_RESIDUAL", flags.residual.into()),
        ("HAS_DRESIDUAL_OUT", flags.dresidual_out.into()),
        ("HAS_DWEIGHT", flags.dweight.into()),
        ("HAS_DBIAS", flags.dbias.into()),
        ("CAST_BEFORE_WEIGHT", (cast_order == CastOrder::BeforeWeight).into()),
        ("ACCUMULATE", accumulate),
        ("PACK", tile.pack),
        ("PACKS", tile.packs),
        ("THREADS_PER_ROW", tile.threads_per_row),
        ("GROUPS", tile.groups),
        ("CLUSTER", tile.cluster),
        ("UNROLL", tile.unroll),
        ("STAGES", tile.stages),
        ("IS_OVERLAPPED", tile.is_overlapped.into()),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("ACCESS_BYTES", tile.access_bytes),
        ("IS_RAGGED", tile.is_ragged.into()),
        ("HAS_TAIL", tile.has_tail.into()),
        ("PARAMS_BYTES", size_of::<Params>() as u32),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rmsnorm_spec::DType;

    use super::*;
    use crate::plan::{Flags, Tile};

    const KEY: KernelKey = KernelKey {
        program: Program::Forward,
        norm: Norm::Layer,
        activation: DType::Bf16,
        weight: DType::F32,
        residual: DType::F16,
        cast_order: CastOrder::AtStore,
        grad_reduction: Accumulate::Partials,
        flags: Flags { weight: true, bias: false, residual: true, dresidual_out: false, dweight: false, dbias: false },
        tile: Tile {
            pack: 8,
            packs: 2,
            threads_per_row: 32,
            groups: 4,
            cluster: 1,
            unroll: 3,
            stages: 0,
            is_overlapped: false,
            blocks_per_sm: 5,
            access_bytes: 16,
            is_ragged: true,
            has_tail: false,
        },
    };

    #[test]
    fn options_are_what_the_kernels_expect() {
        let expected = "--gpu-architecture=sm_90 --std=c++17 -default-device -DT=bf16 -DW=f32 -DR=f16 -DIS_BACKWARD=0 \
            -DIS_LAYER=1 -DHAS_WEIGHT=1 -DHAS_BIAS=0 -DHAS_RESIDUAL=1 -DHAS_DRESIDUAL_OUT=0 -DHAS_DWEIGHT=0 \
            -DHAS_DBIAS=0 -DCAST_BEFORE_WEIGHT=0 -DACCUMULATE=0 -DPACK=8 -DPACKS=2 -DTHREADS_PER_ROW=32 -DGROUPS=4 \
            -DCLUSTER=1 -DUNROLL=3 -DSTAGES=0 -DIS_OVERLAPPED=0 -DBLOCKS_PER_SM=5 -DACCESS_BYTES=16 -DIS_RAGGED=1 -DHAS_TAIL=0 -DPARAMS_BYTES=";
        assert_eq!(options(&KEY, Arch(90)).join(" "), format!("{expected}{}", size_of::<Params>()));
    }

    #[test]
    fn options_follow_the_key() {
        let differs = |key: KernelKey, option: &str| {
            let (before, after) = (options(&KEY, Arch(90)), options(&key, Arch(90)));
            let changed: Vec<_> = after.iter().filter(|option| !before.contains(option)).collect();
            assert_eq!(changed, [option]);
        };
        let flag = |flags: Flags, option: &str| differs(KernelKey { flags, ..KEY }, option);
        flag(Flags { weight: false, ..KEY.flags }, "-DHAS_WEIGHT=0");
        flag(Flags { bias: true, ..KEY.flags }, "-DHAS_BIAS=1");
        flag(Flags { residual: false, ..KEY.flags }, "-DHAS_RESIDUAL=0");
        flag(Flags { dresidual_out: true, ..KEY.flags }, "-DHAS_DRESIDUAL_OUT=1");
        flag(Flags { dweight: true, ..KEY.flags }, "-DHAS_DWEIGHT=1");
        flag(Flags { dbias: true, ..KEY.flags }, "-DHAS_DBIAS=1");
        differs(KernelKey { program: Program::ReducePartials, ..KEY }, "-DIS_BACKWARD=1");
        differs(KernelKey { norm: Norm::Rms, ..KEY }, "-DIS_LAYER=0");
        differs(KernelKey { cast_order: CastOrder::BeforeWeight, ..KEY }, "-DCAST_BEFORE_WEIGHT=1");
        differs(KernelKey { grad_reduction: Accumulate::Locks, ..KEY }, "-DACCUMULATE=1");
        differs(KernelKey { grad_reduction: Accumulate::Atomics, ..KEY }, "-DACCUMULATE=2");
    }

    #[test]
    fn nothing_loosens_the_arithmetic() {
        let options = options(&KEY, Arch(80)).join(" ");
        for loose in ["fast", "ftz", "prec-div", "prec-sqrt"] {
            assert!(!options.contains(loose), "{options}");
        }
    }

    #[test]
    fn a_program_has_its_headers_in_front_and_no_include() {
        for program in [Program::Forward, Program::Backward, Program::ReducePartials] {
            let text = text(program);
            let files: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("#line 1 ")).collect();
            assert_eq!(files.len(), HEADERS.len() + 1);
            assert_eq!(files.last(), Some(&format!("\"{}\"", file_name(program)).as_str()));
            assert!(!text.contains("#include"));
        }
    }

    #[test]
    fn every_file_is_part_of_a_program() {
        let there: BTreeSet<&str> = kernels::ALL.iter().map(|source| source.path).collect();
        let used = HEADERS.iter().map(|header| header.path).chain(Program::ALL.map(file_name)).collect();
        assert_eq!(there, used);
    }
}
