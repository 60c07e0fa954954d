//! A program's storage buffers in WGSL: their declarations, and functions that load and store pairs of a tensor, for every
//! tensor that the program's files may name. What a call has not got loads as zeros and stores nothing.
//!
//! A pair is two quads of four columns. It moves in pieces: the largest accesses that the tensors' places allow. In the texts
//! below, words in capitals stand for the tensor's name, its dtype and so on; `substitute` puts them in.

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_spec::{DType, Direction, Tensor, TensorSet, TensorShape};

use super::substitute::substitute;
use super::tensors::{Kind, Use, uses};
use super::{binding_number, dtype_of, is_layer, is_split};
use crate::plan::{Access, KernelKey, Program};

/// The declarations and functions of all tensors.
pub(super) fn accessors(key: &KernelKey) -> String {
    let bound = uses(key);
    let absent = key.program.info().optional.iter().filter(|tensor| bound.iter().all(|used| used.tensor != *tensor));
    bound.iter().map(|used| of_bound(key, used)).chain(absent.map(|tensor| of_absent(key, tensor))).collect()
}

fn of_bound(key: &KernelKey, used: &Use) -> String {
    let elements = dtype_of(key, used.tensor);
    let pieces = Pieces::of(key, elements);
    let stored = match used.kind {
        Kind::Statistic => "f32",
        Kind::Workspace => workspace(key).0,
        Kind::Elements if pieces.quad == Quad::Halves && used.is_written(key) => ATOMIC_WORD,
        Kind::Elements => pieces.name,
    };
    let mut parts = vec![DECLARATION];
    match used.kind {
        Kind::Statistic => parts.extend(chosen(used, [LOAD_STATISTIC, STORE_STATISTIC])),
        Kind::Workspace if key.program == Program::BackwardColumns => {
            parts.push(if stored == ATOMIC_WORD { LOAD_ROW_SUMS_BY_WORDS } else { LOAD_ROW_SUMS });
        }
        Kind::Workspace => {}
        Kind::Elements => {
            let has_groups = key.call.has_row_groups && used.tensor.is_matrix();
            parts.push(if has_groups { AT_IN_GROUPS } else { AT });
            parts.extend(pieces.functions(key, used).into_iter().flat_map(|functions| chosen(used, functions)));
            if key.program == Program::ReducePartials {
                parts.push(STORE_VALUES);
            }
        }
    }
    let names = [
        ("TENSOR", used.tensor.name()),
        ("DTYPE", elements.name()),
        ("BINDING", &binding_number(used.tensor).to_string()),
        ("ACCESS", if used.is_written(key) { "read_write" } else { "read" }),
        ("STORED", stored),
        ("PIECE", pieces.name),
        ("SHIFT", &format!("{}u", pieces.shift)),
    ];
    parts.into_iter().map(|part| substitute(part, &names)).collect()
}

fn chosen(used: &Use, [load, store]: [&'static str; 2]) -> impl Iterator<Item = &'static str> {
    [(used.is_loaded, load), (used.is_stored, store)].into_iter().filter_map(|(is_used, part)| is_used.then_some(part))
}

/// Of a tensor that has no buffer of its own. In place the inputs are what is overwritten. What no call of the program can be
/// without has no functions here, so that a program which lacks it does not compile.
fn of_absent(key: &KernelKey, tensor: Tensor) -> String {
    if is_needed(key, tensor) {
        return String::new();
    }
    let is_in_place = key.program.is_forward() && key.call.tensors.is_in_place();
    let output = [(Tensor::X, Tensor::Y), (Tensor::Residual, Tensor::ResidualOut)]
        .into_iter()
        .find_map(|(input, output)| (input == tensor).then_some(output));
    let overwritten = output.filter(|output| is_in_place && key.call.tensors.has(*output));
    let is_read = tensor.access(key.program.info().direction) == Some(rmsnorm_spec::Access::Read);
    let part = match (tensor.shape(), is_read) {
        (TensorShape::Rows, true) => LOAD_NO_STATISTIC,
        (TensorShape::Rows, false) => STORE_NO_STATISTIC,
        (TensorShape::Matrix, true) if overwritten.is_some() => LOAD_OVERWRITTEN,
        (TensorShape::Matrix | TensorShape::Cols, true) => LOAD_NOTHING,
        (TensorShape::Cols, false) if key.program == Program::ReducePartials => STORE_NO_VALUES,
        (TensorShape::Cols, false)
        | (TensorShape::Workspace | TensorShape::Transposed | TensorShape::One | TensorShape::Scales, _) => {
            return String::new();
        }
        (TensorShape::Matrix, false) => STORE_NOTHING,
    };
    let names = [
        ("TENSOR", tensor.name()),
        ("DTYPE", dtype_of(key, tensor).name()),
        ("OVERWRITTEN", overwritten.unwrap_or(tensor).name()),
    ];
    substitute(part, &names)
}

/// Whether every call of the program has the tensor.
fn is_needed(key: &KernelKey, tensor: Tensor) -> bool {
    use Tensor::{Dx, Dy, Mean, Rstd, X, Y};
    let always = match key.program.info().direction {
        Direction::Forward | Direction::QuantizedForward => TensorSet::of(&[Y]).set(X, !key.call.tensors.is_in_place()),
        Direction::Backward => TensorSet::of(&[X, Dy, Dx, Rstd]).set(Mean, is_layer(key)),
    };
    always.has(tensor)
}

/// What the workspace holds, as a program sees it, and the bytes of the smallest access.
pub(super) fn workspace(key: &KernelKey) -> (&'static str, u32) {
    match key.program {
        Program::BackwardRowSums => ("vec2<f32>", 8),
        Program::Backward | Program::BackwardColumns if key.call.accumulate == Accumulate::Atomics => (ATOMIC_WORD, 4),
        Program::Backward | Program::BackwardColumns | Program::ReducePartials => ("vec4<f32>", 16),
        // They bind none.
        Program::Forward | Program::ForwardStreaming | Program::Copy => ("f32", 4),
    }
}

const ATOMIC_WORD: &str = "atomic<u32>";

/// How the elements of a tensor move.
pub(super) struct Pieces {
    /// The type of a piece.
    name: &'static str,
    /// Bytes of a piece, the smallest access.
    pub(super) bytes: u32,
    /// By how many bits the index of a column is shifted to be that of its piece.
    shift: u32,
    quad: Quad,
}

/// How a quad is made of pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quad {
    /// It is half of one, which is a pair.
    OfPair,
    One,
    Two,
    Four,
    /// Of four halves of words.
    Halves,
}

impl Pieces {
    pub(super) fn of(key: &KernelKey, dtype: DType) -> Pieces {
        use DType::{Bf16, F16, F32};
        // The second stage of gradients has single quads.
        let moves_pairs = !is_split(key) && key.program != Program::ReducePartials;
        let (name, bytes, shift, quad) = match (key.access, dtype) {
            (Access::Aligned, F16 | Bf16) if moves_pairs => ("vec4<u32>", 16, 3, Quad::OfPair),
            (Access::Aligned, F16 | Bf16) => ("vec2<u32>", 8, 2, Quad::One),
            (Access::Aligned, F32) => ("vec4<u32>", 16, 2, Quad::One),
            (Access::Words, F16 | Bf16) => ("u32", 4, 1, Quad::Two),
            (Access::Halves, F16 | Bf16) => ("u32", 4, 1, Quad::Halves),
            (Access::Words | Access::Halves, F32) => ("u32", 4, 0, Quad::Four),
        };
        Pieces { name, bytes, shift, quad }
    }

    /// Functions to load and store a piece, a quad and a pair; of one kind those that there are.
    fn functions(&self, key: &KernelKey, used: &Use) -> Vec<[&'static str; 2]> {
        let load_half = if used.is_written(key) { LOAD_HALF_IN_FLUX } else { LOAD_HALF };
        let (pieces, quads) = match self.quad {
            Quad::OfPair => return vec![[LOAD_PIECE, STORE_PIECE], WHOLE_PAIRS],
            Quad::One => ([LOAD_PIECE, STORE_PIECE], WHOLE_QUADS),
            Quad::Two => ([LOAD_PIECE, STORE_PIECE], QUADS_OF_TWO),
            Quad::Four => ([LOAD_PIECE, STORE_PIECE], QUADS_OF_FOUR),
            Quad::Halves => ([load_half, STORE_HALF], QUADS_OF_HALVES),
        };
        match key.program {
            Program::ReducePartials => vec![pieces, quads],
            Program::Forward
            | Program::ForwardStreaming
            | Program::Backward
            | Program::BackwardRowSums
            | Program::BackwardColumns
            | Program::Copy => vec![pieces, quads, PAIRS_OF_QUADS],
        }
    }
}

const DECLARATION: &str = "
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<STORED>;
";

/// Where an element lies in its binding.
const AT: &str = "
fn at_TENSOR(row: u32, col: u32) -> u32 { return params.TENSOR.x + row * params.TENSOR.y + col; }
";

const AT_IN_GROUPS: &str = "
fn at_TENSOR(row: u32, col: u32) -> u32 {
    let there = row + params.first_in_group;
    let group = there / params.rows_per_group;
    let row_of_group = there - group * params.rows_per_group;
    return params.TENSOR.x + group * params.TENSOR_group_stride + row_of_group * params.TENSOR.y + col;
}
";

const LOAD_PIECE: &str = "
fn load_piece_TENSOR(row: u32, col: u32) -> PIECE {
    if (!IS_WHOLE && col >= params.cols) { return PIECE(); }
    return TENSOR[at_TENSOR(row, col) >> SHIFT];
}
";

const STORE_PIECE: &str = "
fn store_piece_TENSOR(row: u32, col: u32, piece: PIECE) {
    if (!IS_WHOLE && col >= params.cols) { return; }
    TENSOR[at_TENSOR(row, col) >> SHIFT] = piece;
}
";

const LOAD_HALF: &str = "
fn load_half_TENSOR(row: u32, col: u32) -> u32 {
    if (col >= params.cols) { return 0u; }
    let at = at_TENSOR(row, col);
    return (TENSOR[at >> 1u] >> (16u * (at & 1u))) & 0xffffu;
}
";

// The other half of the word may be another thread's, which writes it now: it is dropped.
const LOAD_HALF_IN_FLUX: &str = "
fn load_half_TENSOR(row: u32, col: u32) -> u32 {
    if (col >= params.cols) { return 0u; }
    let at = at_TENSOR(row, col);
    return (atomicLoad(&TENSOR[at >> 1u]) >> (16u * (at & 1u))) & 0xffffu;
}
";

// A row may begin and end in the middle of a word whose other half is another thread's. Every bit has one owner: a half is
// replaced without a look at the other, whoever writes that one meanwhile.
const STORE_HALF: &str = "
fn store_half_TENSOR(row: u32, col: u32, half: u32) {
    if (col >= params.cols) { return; }
    let at = at_TENSOR(row, col);
    let shift = 16u * (at & 1u);
    atomicAnd(&TENSOR[at >> 1u], ~(0xffffu << shift));
    atomicOr(&TENSOR[at >> 1u], half << shift);
}
";

const WHOLE_QUADS: [&str; 2] = [
    "
fn load_quad_TENSOR(row: u32, col: u32) -> PIECE { return load_piece_TENSOR(row, col); }
",
    "
fn store_quad_TENSOR(row: u32, col: u32, quad: PIECE) { store_piece_TENSOR(row, col, quad); }
",
];

const QUADS_OF_TWO: [&str; 2] = [
    "
fn load_quad_TENSOR(row: u32, col: u32) -> vec2<u32> {
    return vec2(load_piece_TENSOR(row, col), load_piece_TENSOR(row, col + 2u));
}
",
    "
fn store_quad_TENSOR(row: u32, col: u32, quad: vec2<u32>) {
    store_piece_TENSOR(row, col, quad.x);
    store_piece_TENSOR(row, col + 2u, quad.y);
}
",
];

const QUADS_OF_FOUR: [&str; 2] = [
    "
fn load_quad_TENSOR(row: u32, col: u32) -> vec4<u32> {
    return vec4(
        load_piece_TENSOR(row, col), load_piece_TENSOR(row, col + 1u),
        load_piece_TENSOR(row, col + 2u), load_piece_TENSOR(row, col + 3u),
    );
}
",
    "
fn store_quad_TENSOR(row: u32, col: u32, quad: vec4<u32>) {
    store_piece_TENSOR(row, col, quad.x);
    store_piece_TENSOR(row, col + 1u, quad.y);
    store_piece_TENSOR(row, col + 2u, quad.z);
    store_piece_TENSOR(row, col + 3u, quad.w);
}
",
];

const QUADS_OF_HALVES: [&str; 2] = [
    "
fn load_quad_TENSOR(row: u32, col: u32) -> vec2<u32> {
    return vec2(
        load_half_TENSOR(row, col) | (load_half_TENSOR(row, col + 1u) << 16u),
        load_half_TENSOR(row, col + 2u) | (load_half_TENSOR(row, col + 3u) << 16u),
    );
}
",
    "
fn store_quad_TENSOR(row: u32, col: u32, quad: vec2<u32>) {
    store_half_TENSOR(row, col, quad.x & 0xffffu);
    store_half_TENSOR(row, col + 1u, quad.x >> 16u);
    store_half_TENSOR(row, col + 2u, quad.y & 0xffffu);
    store_half_TENSOR(row, col + 3u, quad.y >> 16u);
}
",
];

const WHOLE_PAIRS: [&str; 2] = [
    "
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE {
    return load_piece_TENSOR(row, column(thread, k, 0u));
}
",
    "
fn store_TENSOR(row: u32, thread: u32, k: u32, kept: Kept_DTYPE) {
    store_piece_TENSOR(row, column(thread, k, 0u), kept);
}
",
];

const PAIRS_OF_QUADS: [&str; 2] = [
    "
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE {
    return Kept_DTYPE(load_quad_TENSOR(row, column(thread, k, 0u)), load_quad_TENSOR(row, column(thread, k, 1u)));
}
",
    "
fn store_TENSOR(row: u32, thread: u32, k: u32, kept: Kept_DTYPE) {
    store_quad_TENSOR(row, column(thread, k, 0u), lo_DTYPE(kept));
    store_quad_TENSOR(row, column(thread, k, 1u), hi_DTYPE(kept));
}
",
];

const LOAD_OVERWRITTEN: &str = "
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE { return load_OVERWRITTEN(row, thread, k); }
";
const LOAD_NOTHING: &str = "
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE { return Kept_DTYPE(); }
";
const STORE_NOTHING: &str = "
fn store_TENSOR(row: u32, thread: u32, k: u32, kept: Kept_DTYPE) {}
";

const LOAD_STATISTIC: &str = "
fn load_TENSOR(row: u32) -> f32 { return TENSOR[params.TENSOR + row]; }
";
const STORE_STATISTIC: &str = "
fn store_TENSOR(row: u32, value: f32) { TENSOR[params.TENSOR + row] = value; }
";
const LOAD_NO_STATISTIC: &str = "
fn load_TENSOR(row: u32) -> f32 { return 0.0; }
";
const STORE_NO_STATISTIC: &str = "
fn store_TENSOR(row: u32, value: f32) {}
";

const STORE_VALUES: &str = "
fn store_TENSOR(col: u32, values: vec4<f32>) { store_quad_TENSOR(0u, col, words_DTYPE(values)); }
";
const STORE_NO_VALUES: &str = "
fn store_TENSOR(col: u32, values: vec4<f32>) {}
";

/// mean_wdy_xhat and mean_wdy of a row.
const LOAD_ROW_SUMS: &str = "
fn load_row_sums(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * row;
    let quad = workspace[at >> 2u];
    return select(quad.xy, quad.zw, (at & 2u) == 2u);
}
";
const LOAD_ROW_SUMS_BY_WORDS: &str = "
fn load_row_sums(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * row;
    return vec2(bitcast<f32>(atomicLoad(&workspace[at])), bitcast<f32>(atomicLoad(&workspace[at + 1u])));
}
";
