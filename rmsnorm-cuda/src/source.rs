//! The source and the compiler options of a program: one text with its headers in front, and the
//! options that select a kernel.
//!
//! The kernels have no `#include`, so a driver and NVRTC are all that a user needs. A constant is
//! written in one language only: Rust passes constants to the kernels as `-D` options, in this
//! file.

use rmsnorm_gpu::program::{Accumulate, CallKey, QuantNumbers};
use rmsnorm_gpu::reduction;
use rmsnorm_kernels::{self as kernels, Source};
use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec};
use rmsnorm_spec::{Activation, DTypes, Direction, Gate, Norm, Piece, Slot, Tensor, TensorSet};

use crate::caps::Arch;
use crate::params::{self, Columns, MOST_COLUMN_RANKS};
use crate::plan::{BLOCK_VISITS, COLUMN_LANES, ColumnGroups, KernelKey, OPTIONAL, Program, TREE_SENDERS};

/// Each header may use the headers before it.
const HEADERS: [Source; 9] = [
    kernels::DTYPE,
    kernels::PARAMS,
    kernels::REDUCE,
    kernels::MEMORY,
    kernels::AT,
    kernels::STATISTICS,
    kernels::AFFINE,
    kernels::GRADIENTS,
    kernels::CODES,
];

/// The number of [`HEADERS`] before the kernel's `Params`.
const BEFORE_PARAMS: usize = 2;

/// A program's own files, after those of the call's pieces; the last file gives the program its name.
const fn files(program: Program) -> &'static [Source] {
    match program {
        Program::Forward => &[kernels::FORWARD],
        Program::ForwardCluster => &[kernels::FORWARD_CLUSTER],
        Program::ForwardLong => &[kernels::FORWARD_LONG],
        Program::ForwardStreaming => &[kernels::FORWARD_VISITS, kernels::FORWARD_STREAMING],
        Program::Backward => &[kernels::BACKWARD_ROWS, kernels::BACKWARD],
        Program::BackwardSplit => &[kernels::BACKWARD_ROWS, kernels::BACKWARD_SPLIT],
        Program::BackwardRowSums | Program::BackwardColumns => &[kernels::BACKWARD_VISITS, kernels::BACKWARD_STREAMING],
        Program::ReducePartials => &[kernels::REDUCE_PARTIALS],
        Program::QuantizedForward => &[kernels::QUANTIZE, kernels::QUANTIZED_ROWS, kernels::QUANTIZED_FORWARD],
        Program::QuantizedForwardTransposed => {
            &[kernels::QUANTIZE, kernels::QUANTIZED_ROWS, kernels::STRIPS, kernels::QUANTIZED_FORWARD_TRANSPOSED]
        }
        Program::QuantizedForwardStreaming => {
            &[kernels::QUANTIZE, kernels::FORWARD_VISITS, kernels::QUANTIZED_FORWARD_STREAMING]
        }
        Program::TransposeCodes => &[kernels::STRIPS, kernels::TRANSPOSE_CODES],
        Program::Columnwise => &[kernels::QUANTIZE, kernels::COLUMNWISE],
        Program::Clear => &[kernels::CLEAR],
        Program::PartialStatistics => {
            &[kernels::FORWARD_VISITS, kernels::COLUMNS, kernels::FORWARD_COLUMNS, kernels::COLUMN_STATISTICS]
        }
        Program::ForwardWithStatistics => {
            &[kernels::FORWARD_VISITS, kernels::COLUMNS, kernels::FORWARD_COLUMNS, kernels::FORWARD_GIVEN]
        }
        Program::PartialBackwardStatistics => {
            &[kernels::BACKWARD_VISITS, kernels::COLUMNS, kernels::BACKWARD_STATISTICS]
        }
        Program::BackwardWithStatistics => &[kernels::BACKWARD_VISITS, kernels::COLUMNS, kernels::BACKWARD_GIVEN],
        #[cfg(feature = "peers")]
        Program::ReduceForward => &[kernels::PEERS, kernels::SUM_OVER_RANKS, kernels::REDUCE_FORWARD],
        #[cfg(feature = "peers")]
        Program::ReduceForwardPacks => &[kernels::PEERS, kernels::SUM_OVER_RANKS, kernels::REDUCE_FORWARD_PACKS],
        #[cfg(feature = "peers")]
        Program::ReduceForwardRows => &[kernels::PEERS, kernels::SUM_OVER_RANKS, kernels::REDUCE_FORWARD_ROWS],
        #[cfg(feature = "peers")]
        Program::GatherNumbers => &[kernels::PEERS, kernels::GATHER_NUMBERS],
        #[cfg(feature = "peers")]
        Program::ForwardExchange => &[kernels::PEERS, kernels::COLUMNS, kernels::FORWARD_EXCHANGE],
    }
}

/// Whether the program is a schedule around what pieces do: it reads rows of a norm.
const fn has_pieces(program: Program) -> bool {
    let info = program.info();
    !info.is_reduction && !info.optional.is_empty()
}

/// What comes before the statistics and after the norm: the files, and two types in them. A file is
/// there only if its tensors are.
fn pieces(key: &KernelKey) -> (Vec<Source>, String) {
    if key.program.is_backward() { pulls(&key.call) } else { chain(key) }
}

/// The type of the gate's activation.
const fn activation(call: &CallKey) -> &'static str {
    match call.gate {
        Some(Gate { activation: Activation::Silu, .. }) => "Silu",
        Some(Gate { activation: Activation::Sigmoid, .. }) => "Sigmoid",
        None => "void",
    }
}

/// The pieces of a backward program.
fn pulls(call: &CallKey) -> (Vec<Source>, String) {
    let of_gate = |slot| call.gate.is_some_and(|gate| gate.slot == slot);
    let activation = activation(call);
    let after = if of_gate(Slot::After) { format!("GateAfterPull<{activation}>") } else { "StorePull".into() };
    let before = if of_gate(Slot::Before) { format!("GateBeforePull<{activation}>") } else { "SumPull".into() };
    let files = [kernels::PULL].into_iter().chain(call.gate.map(|_| kernels::GATE)).collect();
    (files, format!("using AfterPull = {after};\nusing BeforePull = {before};\n"))
}

/// The pieces of a forward program.
fn chain(key: &KernelKey) -> (Vec<Source>, String) {
    let (pieces, activation) = (key.pieces(), activation(&key.call));
    let mut files = vec![kernels::NORM, kernels::X, kernels::STORE];
    let x = if key.call.form.is_cast() { "Plain<R>" } else { "X" };
    let (mut before, mut after, mut next) = (x.to_owned(), "Store".to_owned(), "void");
    // From the inner types to those that wrap them.
    for piece in Piece::ALL.into_iter().rev().filter(|piece| pieces.has(*piece)) {
        files.extend(match piece {
            Piece::GateBefore => {
                before = format!("GateBefore<{activation}>");
                Some(kernels::GATE)
            }
            Piece::WeightFirst => {
                before = "WeightFirst".to_owned();
                Some(kernels::WEIGHT_FIRST)
            }
            Piece::GateAfter => {
                after = format!("GateAfter<{activation}>");
                Some(kernels::GATE)
            }
            Piece::Parts => {
                before = format!("Parts<{before}>");
                Some(kernels::PARTS)
            }
            Piece::Residual => {
                before = "Residual".to_owned();
                Some(kernels::RESIDUAL)
            }
            Piece::NextNorm => {
                next = "NextNorm";
                Some(kernels::NEXT_NORM)
            }
            Piece::ResidualAfter => {
                after = format!("ResidualAfter<{next}>");
                Some(kernels::RESIDUAL_AFTER)
            }
            // The programs of codes quantize themselves.
            Piece::Quantize => None,
        });
    }
    (files, format!("using Before = {before};\nusing H = Before::Value;\nusing After = {after};\n"))
}

/// The file of a program, as named in compiler messages.
pub(crate) fn file_name(program: Program) -> &'static str {
    files(program).last().map_or("", |file| file.path)
}

/// Headers, argument, pieces and program as one text. Compiler messages name the file and its line.
pub(crate) fn text(key: &KernelKey) -> String {
    let join = |files: &[Source]| {
        files.iter().map(|Source { path, text }| format!("#line 1 \"{path}\"\n{text}\n")).collect::<String>()
    };
    let (before, after) = HEADERS.split_at(BEFORE_PARAMS);
    let params = format!("#line 1 \"{}\"\n{}\n", params::FILE, params::source(key));
    let (of_call, types) = if has_pieces(key.program) { pieces(key) } else { (Vec::new(), String::new()) };
    [join(before), params, join(after), join(&of_call), types, join(files(key.program))].concat()
}

/// The compiler options of a kernel: the device, the language, and all parameters of the sources.
/// No option loosens IEEE arithmetic.
pub(crate) fn options(key: &KernelKey, arch: Arch) -> Vec<String> {
    let language = [format!("--gpu-architecture=sm_{}", arch.0), "--std=c++17".into(), "-default-device".into()];
    let DTypes { activation, weight, residual } = key.call.dtypes;
    let dtypes = [("T", activation), ("W", weight), ("R", residual), ("G", key.call.gradient)];
    let names = dtypes.map(|(name, dtype)| format!("-D{name}={dtype}"));
    let define = |(name, value): (&str, u32)| format!("-D{name}={value}");
    let has = |tensor: Tensor| {
        format!("-DHAS_{}={}", tensor.name().to_ascii_uppercase(), u32::from(key.call.tensors.has(tensor)))
    };
    let of_some = key.call.quant.map(quant_numbers).into_iter().flatten();
    let of_some = of_some.chain(column_numbers(key).into_iter().flatten());
    #[cfg(feature = "peers")]
    let of_some = of_some.chain(peer_numbers(key).into_iter().flatten());
    let options = language.into_iter().chain(names).chain(numbers(key).map(define));
    options.chain(TOLD.iter().map(has)).chain(of_some.map(define)).collect()
}

/// The tensors whose presence is a constant. `Before` and `After` say which matrices forward reads.
const TOLD: TensorSet = OPTIONAL.difference(Direction::Forward.reads().intersection(TensorSet::MATRICES));

/// The constants of `peers.cuh`; `None` for programs without peers.
#[cfg(feature = "peers")]
fn peer_numbers(key: &KernelKey) -> Option<[(&'static str, u32); 6]> {
    use crate::peers::{EMPTY_WORD, MOST_RANKS, Peers, STATE_BYTES};
    use crate::plan::gather_numbers::MOST_NUMBERS;

    key.program.has_peers().then_some([
        ("RANKS", key.ranks),
        ("MOST_NUMBERS", MOST_NUMBERS as u32),
        ("MOST_RANKS", MOST_RANKS as u32),
        ("PEERS_BYTES", size_of::<Peers>() as u32),
        ("STATE_BYTES", STATE_BYTES as u32),
        ("EMPTY_WORD", EMPTY_WORD),
    ])
}

/// The constants of `columns.cuh`; `None` if columns are not divided.
fn column_numbers(key: &KernelKey) -> Option<[(&'static str, u32); 2]> {
    key.program
        .divides_columns()
        .then_some([("MOST_COLUMN_RANKS", MOST_COLUMN_RANKS as u32), ("COLUMNS_BYTES", size_of::<Columns>() as u32)])
}

/// The constants of `quantize.cuh`.
fn quant_numbers(quant: QuantSpec) -> [(&'static str, u32); 6] {
    let codes = match quant.codes {
        CodeType::E4m3 => 0,
        CodeType::E5m2 => 1,
        CodeType::Int8 => 2,
    };
    let QuantNumbers { scale, form, layout, set } = QuantNumbers::of(&quant);
    [
        ("CODES", codes),
        ("SCALE", scale),
        ("SCALE_FORM", form),
        ("SCALE_LAYOUT", layout),
        ("SET", set),
        ("IS_ROUNDED", (quant.source == QuantSource::Rounded).into()),
    ]
}

fn numbers(key: &KernelKey) -> [(&'static str, u32); 36] {
    let KernelKey {
        program,
        call: CallKey { norm, cast_order, accumulate, has_row_groups, has_weight_offset, quant, .. },
        tile,
        ..
    } = *key;
    let accumulate = match accumulate {
        Accumulate::Partials => 0,
        Accumulate::Locks => 1,
        Accumulate::Atomics => 2,
    };
    [
        ("IS_BACKWARD", program.is_backward().into()),
        ("IS_SPLIT", (program == Program::BackwardSplit).into()),
        ("IS_QUANTIZED", quant.is_some().into()),
        ("IS_LAYER", (norm == Norm::Layer).into()),
        ("IS_CLAMPED", (norm == Norm::L2Clamped).into()),
        ("CLAMPED_FROM", Norm::CLAMPED_FROM.to_bits()),
        ("CAST_BEFORE_WEIGHT", cast_order.rounds_x_hat().into()),
        ("CAST_RSTD", cast_order.rounds_rstd().into()),
        ("IS_WEIGHT_FIRST", cast_order.is_weight_first().into()),
        ("ACCUMULATE", accumulate),
        ("ADDS_TO_GRADIENTS", key.call.adds_to_gradients.into()),
        ("HAS_ROW_GROUPS", has_row_groups.into()),
        ("HAS_COLUMN_GROUPS", (key.column_groups == ColumnGroups::Blocks).into()),
        ("GROUPS_ARE_ROWS", (key.column_groups == ColumnGroups::Rows).into()),
        ("HAS_WEIGHT_OFFSET", has_weight_offset.into()),
        ("PACK", tile.pack),
        ("PACKS", tile.packs),
        ("THREADS_PER_ROW", tile.threads_per_row),
        ("GROUPS", tile.groups),
        ("CLUSTER", tile.cluster),
        ("UNROLL", tile.unroll),
        ("STAGES", tile.stages),
        ("IS_OVERLAPPED", tile.is_overlapped.into()),
        ("IS_COOPERATIVE", tile.is_cooperative.into()),
        ("BLOCKS_PER_SM", tile.blocks_per_sm),
        ("ACCESS_BYTES", tile.access_bytes),
        ("IS_RAGGED", tile.is_ragged.into()),
        ("HAS_TAIL", tile.has_tail.into()),
        ("KEEPS_ROW", tile.reads.keeps_row.into()),
        ("LOADS_AT_USE", tile.reads.loads_at_use.into()),
        ("PREFETCHES_WEIGHT", tile.reads.prefetches_weight.into()),
        ("BATCH", tile.reads.batch),
        ("TREE_SENDERS", TREE_SENDERS),
        ("BLOCK_VISITS", BLOCK_VISITS as u32),
        ("COLUMN_LANES", COLUMN_LANES),
        ("ROW_MULTIPLE", reduction::ROW_MULTIPLE),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rmsnorm_gpu::program::Form;
    use rmsnorm_spec::quant::{ScaleKind, ScaleLayout, ScaleRounding};
    use rmsnorm_spec::{CastOrder, DType};

    use super::*;
    use crate::plan::{Reads, Tile};

    const CALL: CallKey = CallKey {
        norm: Norm::Layer,
        dtypes: DTypes { activation: DType::Bf16, weight: DType::F32, residual: DType::F16 },
        gradient: DType::Bf16,
        adds_to_gradients: false,
        cast_order: CastOrder::AtStore,
        accumulate: Accumulate::Partials,
        has_row_groups: false,
        has_parts: false,
        has_weight_offset: true,
        form: Form::Norm,
        gate: None,
        quant: None,
        tensors: TensorSet::of(&[Tensor::Weight, Tensor::Residual]),
    };
    const QUANT: QuantSpec = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
    const KEY: KernelKey = KernelKey {
        program: Program::Forward,
        call: CALL,
        tile: Tile {
            pack: 8,
            packs: 2,
            threads_per_row: 32,
            groups: 4,
            cluster: 1,
            unroll: 3,
            stages: 0,
            is_overlapped: false,
            is_cooperative: false,
            blocks_per_sm: 5,
            access_bytes: 16,
            is_ragged: true,
            has_tail: false,
            reads: Reads { keeps_row: false, loads_at_use: true, prefetches_weight: false, batch: 4 },
        },
        column_groups: ColumnGroups::None,
        ranks: 1,
    };

    #[test]
    fn options_are_what_the_kernels_expect() {
        let expected = "--gpu-architecture=sm_90 --std=c++17 -default-device -DT=bf16 -DW=f32 -DR=f16 -DG=bf16 -DIS_BACKWARD=0 -DIS_SPLIT=0 -DIS_QUANTIZED=0 \
            -DIS_LAYER=1 -DIS_CLAMPED=0 -DCLAMPED_FROM=1065353200 -DCAST_BEFORE_WEIGHT=0 -DCAST_RSTD=0 -DIS_WEIGHT_FIRST=0 -DACCUMULATE=0 -DADDS_TO_GRADIENTS=0 -DHAS_ROW_GROUPS=0 -DHAS_COLUMN_GROUPS=0 -DGROUPS_ARE_ROWS=0 -DHAS_WEIGHT_OFFSET=1 -DPACK=8 -DPACKS=2 -DTHREADS_PER_ROW=32 -DGROUPS=4 \
            -DCLUSTER=1 -DUNROLL=3 -DSTAGES=0 -DIS_OVERLAPPED=0 -DIS_COOPERATIVE=0 -DBLOCKS_PER_SM=5 -DACCESS_BYTES=16 -DIS_RAGGED=1 \
            -DHAS_TAIL=0 -DKEEPS_ROW=0 -DLOADS_AT_USE=1 -DPREFETCHES_WEIGHT=0 -DBATCH=4 -DTREE_SENDERS=8 -DBLOCK_VISITS=64 -DCOLUMN_LANES=8 \
            -DROW_MULTIPLE=8";
        let tensors = "-DHAS_WEIGHT=1 -DHAS_BIAS=0 -DHAS_Y=0 -DHAS_DRESIDUAL_OUT=0 -DHAS_DWEIGHT=0 -DHAS_DBIAS=0 \
             -DHAS_DRESIDUAL=0 -DHAS_CODES_T=0 -DHAS_AMAX=0 -DHAS_NEXT_WEIGHT=0 -DHAS_NEXT_BIAS=0";
        assert_eq!(options(&KEY, Arch(90)).join(" "), format!("{expected} {tensors}"));
    }

    #[test]
    fn options_follow_the_key() {
        let differs = |key: KernelKey, option: &str| {
            let (before, after) = (options(&KEY, Arch(90)), options(&key, Arch(90)));
            let changed: Vec<_> = after.iter().filter(|option| !before.contains(option)).collect();
            assert_eq!(changed, [option]);
        };
        for (tensor, name) in [
            (Tensor::Weight, "WEIGHT"),
            (Tensor::Bias, "BIAS"),
            (Tensor::DresidualOut, "DRESIDUAL_OUT"),
            (Tensor::Dweight, "DWEIGHT"),
            (Tensor::Dbias, "DBIAS"),
            (Tensor::Dresidual, "DRESIDUAL"),
            (Tensor::NextWeight, "NEXT_WEIGHT"),
            (Tensor::NextBias, "NEXT_BIAS"),
        ] {
            let is_there = !CALL.tensors.has(tensor);
            let call = CallKey { tensors: CALL.tensors.set(tensor, is_there), ..CALL };
            differs(KernelKey { call, ..KEY }, &format!("-DHAS_{name}={}", u32::from(is_there)));
        }
        differs(KernelKey { program: Program::ReducePartials, ..KEY }, "-DIS_BACKWARD=1");
        differs(KernelKey { column_groups: ColumnGroups::Blocks, ..KEY }, "-DHAS_COLUMN_GROUPS=1");
        differs(KernelKey { column_groups: ColumnGroups::Rows, ..KEY }, "-DGROUPS_ARE_ROWS=1");
        for (call, option) in [
            (CallKey { norm: Norm::Rms, ..CALL }, "-DIS_LAYER=0"),
            (CallKey { cast_order: CastOrder::BeforeWeight, ..CALL }, "-DCAST_BEFORE_WEIGHT=1"),
            (CallKey { cast_order: CastOrder::WeightFirst, ..CALL }, "-DIS_WEIGHT_FIRST=1"),
            (CallKey { accumulate: Accumulate::Locks, ..CALL }, "-DACCUMULATE=1"),
            (CallKey { accumulate: Accumulate::Atomics, ..CALL }, "-DACCUMULATE=2"),
            (CallKey { gradient: DType::F32, ..CALL }, "-DG=f32"),
            (CallKey { adds_to_gradients: true, ..CALL }, "-DADDS_TO_GRADIENTS=1"),
            (CallKey { has_row_groups: true, ..CALL }, "-DHAS_ROW_GROUPS=1"),
        ] {
            differs(KernelKey { call, ..KEY }, option);
        }
        let before = KernelKey { call: CallKey { cast_order: CastOrder::BeforeWeight, ..CALL }, ..KEY };
        let first = KernelKey { call: CallKey { cast_order: CastOrder::RstdFirst, ..CALL }, ..KEY };
        let (before, first) = (options(&before, Arch(90)), options(&first, Arch(90)));
        assert_eq!(first.iter().filter(|option| !before.contains(option)).collect::<Vec<_>>(), ["-DCAST_RSTD=1"]);
    }

    /// `codes.cuh` and `quantize.cuh` define these numbers.
    #[test]
    fn what_quantizes_is_said_in_numbers() {
        use ScaleLayout::{ColumnMajor, PackedUe8m0, RowMajor, Swizzled128x4};
        let block = |cols, is_power_of_two| ScaleKind::Block { cols, is_power_of_two };
        let mx = |rounding| ScaleKind::Mx { rounding };
        for (codes, scale, layout, source, expected) in [
            (CodeType::E4m3, ScaleKind::Given, RowMajor, QuantSource::F32, [0, 0, 0, 0, 1, 0]),
            (CodeType::E5m2, ScaleKind::Current, RowMajor, QuantSource::F32, [1, 1, 0, 0, 1, 0]),
            (CodeType::Int8, ScaleKind::Row, RowMajor, QuantSource::Rounded, [2, 2, 0, 0, 1, 1]),
            (CodeType::E4m3, block(128, false), ColumnMajor { ld: 8 }, QuantSource::F32, [0, 3, 0, 1, 128, 0]),
            (CodeType::E4m3, block(64, true), RowMajor, QuantSource::F32, [0, 3, 1, 0, 64, 0]),
            (CodeType::E4m3, block(64, true), PackedUe8m0 { ld: 8 }, QuantSource::F32, [0, 3, 2, 2, 64, 0]),
            (CodeType::E5m2, mx(ScaleRounding::Up), Swizzled128x4, QuantSource::F32, [1, 3, 2, 3, 32, 0]),
            (CodeType::E4m3, mx(ScaleRounding::Floor), RowMajor, QuantSource::F32, [0, 3, 3, 0, 32, 0]),
        ] {
            let quant = QuantSpec::new(codes, scale).layout(layout).source(source);
            let call = CallKey { quant: Some(quant), ..CALL };
            let options = options(&KernelKey { program: Program::QuantizedForward, call, ..KEY }, Arch(90)).join(" ");
            let [codes, scale, form, layout, set, rounded] = expected;
            let expected = format!(
                "-DCODES={codes} -DSCALE={scale} -DSCALE_FORM={form} -DSCALE_LAYOUT={layout} -DSET={set} -DIS_ROUNDED={rounded}"
            );
            assert!(options.ends_with(&expected), "{options}: {expected}");
            assert!(options.contains("-DIS_QUANTIZED=1"), "{options}");
        }
    }

    #[test]
    fn halves_are_told_of_columns() {
        for program in Program::ALL {
            let options = options(&KernelKey { program, ..KEY }, Arch(90)).join(" ");
            let expected = format!("-DMOST_COLUMN_RANKS=64 -DCOLUMNS_BYTES={}", size_of::<Columns>());
            assert_eq!(options.contains(&expected), program.divides_columns(), "{program:?}: {options}");
            let text = text(&KernelKey { program, ..KEY });
            assert_eq!(text.contains("struct Columns {"), program.divides_columns(), "{program:?}");
        }
    }

    /// The table of constants in `kernels/README.md`, if the package is in its repository.
    #[test]
    fn the_readme_has_every_constant() {
        let Ok(page) = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/README.md")) else {
            return;
        };
        let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
        let told: BTreeSet<_> = cells.flat_map(|cell| cell.trim_end_matches('`').split("`, `")).collect();
        let call = CallKey { quant: Some(QUANT), ..CALL };
        let keys = Program::ALL.map(|program| options(&KernelKey { program, call, ..KEY }, Arch(90)));
        let names = keys.iter().flatten().filter_map(|option| option.strip_prefix("-D")?.split('=').next());
        let names: BTreeSet<_> = names.collect();
        assert_eq!(told, names);
        let texts: String = kernels::ALL.iter().map(|source| source.text).collect();
        let words: BTreeSet<_> = texts.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
        assert!(names.is_subset(&words), "nobody reads {:?}", names.difference(&words));
    }

    #[test]
    fn nothing_loosens_the_arithmetic() {
        let options = options(&KEY, Arch(80)).join(" ");
        for loose in ["fast", "ftz", "prec-div", "prec-sqrt"] {
            assert!(!options.contains(loose), "{options}");
        }
    }

    /// Calls that have each piece: `CALL`, whose residual is added before the norm, and these.
    fn calls() -> [CallKey; 7] {
        let alone = CallKey { tensors: CALL.tensors.without(Tensor::Residual), ..CALL };
        let parts = CallKey { has_parts: true, ..CALL };
        let [after, twice] = [Form::AddsToResidual, Form::AddsAndNorms].map(|form| CallKey { form, ..CALL });
        let [before, last] = [Slot::Before, Slot::After].map(|slot| {
            let gate = Some(Gate { activation: Activation::Silu, slot });
            CallKey { gate, tensors: alone.tensors.with(Tensor::Gate), ..alone }
        });
        [CALL, alone, parts, after, twice, before, last]
    }

    #[test]
    fn a_program_has_its_headers_in_front_and_no_include() {
        for (program, call) in Program::ALL.into_iter().flat_map(|program| calls().map(|call| (program, call))) {
            let text = text(&KernelKey { program, call, ..KEY });
            let files: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("#line 1 ")).collect();
            let of_call = if has_pieces(program) { pieces(&KernelKey { program, call, ..KEY }).0.len() } else { 0 };
            assert_eq!(files.len(), HEADERS.len() + 1 + of_call + super::files(program).len());
            assert_eq!(files.last(), Some(&format!("\"{}\"", file_name(program)).as_str()));
            assert_eq!(text.contains("using After"), has_pieces(program), "{program:?}");
            assert!(!text.contains("#include"));
        }
    }

    #[test]
    fn every_file_is_part_of_a_program() {
        let there: BTreeSet<&str> = kernels::ALL.iter().map(|source| source.path).collect();
        let of_programs = Program::ALL.into_iter().flat_map(files).copied();
        let tensors = TensorSet::of(&[Tensor::Weight]);
        let weighed = CallKey { cast_order: CastOrder::WeightFirst, tensors, ..CALL };
        let of_calls = [Program::Forward, Program::Backward].into_iter().flat_map(|program| {
            let calls = calls().into_iter().chain([weighed]);
            calls.flat_map(move |call| pieces(&KernelKey { program, call, ..KEY }).0)
        });
        let used = HEADERS.into_iter().chain(of_programs).chain(of_calls).map(|source| source.path).collect();
        assert_eq!(there, used);
    }
}
