//! A program's storage buffers in WGSL: declarations, and functions that load and store pairs of a
//! tensor.
//!
//! A pair is two quads of four columns. It moves in pieces, the largest accesses that the layout
//! allows. Words in capitals in the texts below stand for the tensor's name, its dtype and so on;
//! `substitute` replaces them.

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_spec::{DType, Storage, Tensor};

use super::substitute::substitute;
use super::{binding_number, in_group, is_split, storage_of};
use crate::plan::uses::{Kind, Use, uses};
use crate::plan::{Access, KernelKey, Program};

/// The declarations and functions of all tensors.
pub(super) fn accessors(key: &KernelKey) -> String {
    let uses = uses(key);
    let shared = if key.shares_binding { shared_words(key) } else { String::new() };
    uses.iter().map(|used| of_use(key, used)).chain([of_absent(key, &uses), shared]).collect()
}

fn of_use(key: &KernelKey, used: &Use) -> String {
    let elements = storage_of(key, used.tensor);
    let pieces = Pieces::of(key, elements);
    let is_byte = elements.size() == 1;
    let stored = match used.kind {
        Kind::Statistic | Kind::Scalar => "f32",
        Kind::Workspace => workspace(key).0,
        Kind::Elements if matches!(pieces.quad, Quad::Halves | Quad::Bytes) && used.is_written(key) => ATOMIC_WORD,
        Kind::Elements => pieces.name,
        Kind::Bytes if key.access == Access::Parts && used.is_written(key) => ATOMIC_WORD,
        Kind::Cleared if key.access == Access::Parts && is_byte => ATOMIC_WORD,
        Kind::Bytes | Kind::Cleared | Kind::Found => "u32",
        Kind::Amax | Kind::ColumnBytes => ATOMIC_WORD,
        Kind::Scales if key.gathers_scales => "u32",
        Kind::Scales if is_byte => ATOMIC_WORD,
        Kind::Scales => "f32",
    };
    let is_shared = used.is_shared(key);
    let mut parts = if is_shared { vec![] } else { vec![DECLARATION] };
    match used.kind {
        Kind::Statistic if is_shared => parts.extend(chosen(used, [LOAD_STATISTIC, STORE_SHARED])),
        Kind::Statistic => parts.extend(chosen(used, [LOAD_STATISTIC, STORE_STATISTIC])),
        Kind::Workspace if key.program == Program::BackwardColumns => {
            parts.push(if stored == ATOMIC_WORD { LOAD_ROW_SUMS_BY_WORDS } else { LOAD_ROW_SUMS });
        }
        Kind::Workspace | Kind::Found => {}
        Kind::Scalar => parts.push(LOAD_SCALAR),
        Kind::Amax => parts.push(FOLD_AMAX),
        Kind::Scales if used.tensor == Tensor::ScalesColumnwise && is_byte => {
            parts.extend([STORE_BYTES, STORE_COLUMN_BYTE_OF_SCALES]);
        }
        Kind::Scales if used.tensor == Tensor::ScalesColumnwise => parts.push(STORE_COLUMN_SCALE),
        Kind::ColumnBytes => parts.extend([STORE_BYTES, STORE_TRANSPOSED_BYTES]),
        Kind::Scales if key.gathers_scales => parts.extend([STORE_NO_SCALE, STORE_WORD_OF_SCALES]),
        Kind::Scales if is_byte => parts.extend([STORE_BYTES, STORE_BYTE_OF_SCALES, STORE_NO_WORD_OF_SCALES]),
        Kind::Scales => parts.extend([STORE_SCALE, STORE_NO_WORD_OF_SCALES]),
        Kind::Cleared if !is_byte => parts.push(CLEAR_WORD),
        Kind::Cleared if stored == ATOMIC_WORD => parts.extend([STORE_BYTES, CLEAR_BYTES]),
        Kind::Cleared => parts.push(CLEAR_WORD_OF_BYTES),
        Kind::Bytes if used.is_loaded => {
            parts.push(if key.call.has_row_groups { AT_IN_GROUPS } else { AT });
            parts.push(if key.access == Access::Parts { LOAD_CODES_BY_BYTES } else { LOAD_WORD_OF_CODES });
        }
        Kind::Bytes if stored == ATOMIC_WORD => parts.extend([STORE_BYTES, STORE_TRANSPOSED_BYTES]),
        Kind::Bytes => parts.push(STORE_TRANSPOSED_WORD),
        Kind::Elements => {
            let has_groups = key.call.has_row_groups && used.tensor.is_matrix();
            parts.push(if has_groups { AT_IN_GROUPS } else { AT });
            parts.extend(pieces.functions(key).into_iter().flat_map(|functions| chosen(used, functions)));
            if key.program == Program::ReducePartials {
                parts.push(if key.call.adds_to_gradients { ADD_VALUES } else { STORE_VALUES });
            }
        }
    }
    let [row, col, ..] = in_group(key);
    let names = [
        row,
        col,
        ("TENSOR", used.tensor.name()),
        ("DTYPE", suffix(elements)),
        ("BINDING", &binding_number(used.tensor).to_string()),
        ("ACCESS", if used.is_written(key) { "read_write" } else { "read" }),
        ("STORED", stored),
        ("PIECE", pieces.name),
        ("SHIFT", &format!("{}u", pieces.shift)),
        ("WORDS", if stored == "f32" { "f32" } else { pieces.name.trim_end_matches("<u32>") }),
    ];
    // A shared tensor has no array: its functions load from the workspace. Another thread may be
    // writing the other part of an atomic word, which is dropped.
    let [before, after] = match (is_shared, stored == ATOMIC_WORD) {
        (true, _) => ["shared_WORDS(", ")"],
        (false, true) => ["atomicLoad(&TENSOR[", "])"],
        (false, false) => ["TENSOR[", "]"],
    };
    let loading = |part: &str| match part.split_once("TENSOR[").and_then(|(to, from)| Some((to, from.split_once(']')?)))
    {
        Some((to, (index, from))) if to.ends_with("return ") || to.ends_with('(') => {
            format!("{to}{before}{index}{after}{from}")
        }
        Some(_) | None => part.to_owned(),
    };
    parts.into_iter().map(|part| substitute(&loading(part), &names)).collect()
}

/// Functions that load words of the workspace, from tensors that share its binding.
fn shared_words(key: &KernelKey) -> String {
    let word = match workspace(key).0 {
        "vec4<f32>" => "bitcast<u32>(workspace[at >> 2u][at & 3u])",
        "vec2<f32>" => "bitcast<u32>(workspace[at >> 1u][at & 1u])",
        ATOMIC_WORD => "atomicLoad(&workspace[at])",
        _ => "workspace[at]",
    };
    substitute(SHARED_WORDS, &[("WORD", word)])
}

/// By the type of the loaded words; `at` counts loads of that type.
const SHARED_WORDS: &str = "
fn shared_u32(at: u32) -> u32 { return WORD; }
fn shared_f32(at: u32) -> f32 { return bitcast<f32>(shared_u32(at)); }
fn shared_vec2(at: u32) -> vec2<u32> { return vec2(shared_u32(2u * at), shared_u32(2u * at + 1u)); }
fn shared_vec4(at: u32) -> vec4<u32> { return vec4(shared_vec2(2u * at), shared_vec2(2u * at + 1u)); }
";

/// The suffix of a pair's type.
pub(super) const fn suffix(storage: Storage) -> &'static str {
    match storage {
        Storage::Float(dtype) => dtype.name(),
        Storage::Code(_) | Storage::E8m0 => "codes",
    }
}

fn chosen(used: &Use, [load, store]: [&'static str; 2]) -> impl Iterator<Item = &'static str> {
    [(used.is_loaded, load), (used.is_stored, store)].into_iter().filter_map(|(is_used, part)| is_used.then_some(part))
}

/// Functions that the files for codes name and that this call does not need.
fn of_absent(key: &KernelKey, bound: &[Use]) -> String {
    let lacks = |kind: Kind| bound.iter().all(|used| used.kind != kind || used.tensor == Tensor::ScalesColumnwise);
    let needed = [
        (Kind::Scalar, [LOAD_NO_SCALAR, ""]),
        (Kind::Amax, [FOLD_NO_AMAX, ""]),
        (Kind::Scales, [STORE_NO_SCALE, STORE_NO_WORD_OF_SCALES]),
    ];
    let needed = needed.into_iter().filter(|(kind, _)| key.program.writes_codes() && lacks(*kind));
    needed.map(|(_, functions)| functions.concat()).collect()
}

/// The element type of the workspace in this program, and the bytes of the smallest access.
pub(super) fn workspace(key: &KernelKey) -> (&'static str, u32) {
    if key.program.is_forward() {
        ("u32", 4)
    } else if key.program == Program::BackwardRowSums {
        ("vec2<f32>", 8)
    } else if key.call.accumulate == Accumulate::Atomics {
        (ATOMIC_WORD, 4)
    } else {
        ("vec4<f32>", 16)
    }
}

const ATOMIC_WORD: &str = "atomic<u32>";

/// How the elements of a tensor are loaded and stored.
pub(super) struct Pieces {
    /// The type of a piece.
    name: &'static str,
    /// Bytes of a piece, the smallest access.
    pub(super) bytes: u32,
    /// The index of a column is shifted right by this many bits to get the index of its piece.
    shift: u32,
    quad: Quad,
}

/// The pieces of a quad.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quad {
    /// Half of a piece; a piece is a pair.
    OfPair,
    One,
    Two,
    Four,
    /// Four halves of words.
    Halves,
    /// Four bytes of words.
    Bytes,
}

impl Pieces {
    pub(super) fn of(key: &KernelKey, storage: Storage) -> Pieces {
        const F32: Storage = Storage::Float(DType::F32);
        const F16: Storage = Storage::Float(DType::F16);
        const BF16: Storage = Storage::Float(DType::Bf16);
        // The second phase of gradients has single quads.
        let moves_pairs = !is_split(key) && key.program != Program::ReducePartials;
        let (name, bytes, shift, quad) = match (key.access, storage) {
            (Access::Aligned, F16 | BF16) if moves_pairs => ("vec4<u32>", 16, 3, Quad::OfPair),
            (Access::Aligned, F16 | BF16) => ("vec2<u32>", 8, 2, Quad::One),
            (Access::Aligned, F32) => ("vec4<u32>", 16, 2, Quad::One),
            (Access::Words, F16 | BF16) => ("u32", 4, 1, Quad::Two),
            (Access::Parts, F16 | BF16) => ("u32", 4, 1, Quad::Halves),
            (Access::Words | Access::Parts, F32) => ("u32", 4, 0, Quad::Four),
            (Access::Aligned, Storage::Code(_) | Storage::E8m0) if moves_pairs => ("vec2<u32>", 8, 3, Quad::OfPair),
            (Access::Aligned | Access::Words, Storage::Code(_) | Storage::E8m0) => ("u32", 4, 2, Quad::One),
            (Access::Parts, Storage::Code(_) | Storage::E8m0) => ("u32", 4, 2, Quad::Bytes),
        };
        Pieces { name, bytes, shift, quad }
    }

    /// Functions to load and store a piece, a quad and a pair, as far as they exist.
    fn functions(&self, key: &KernelKey) -> Vec<[&'static str; 2]> {
        let (pieces, quads) = match self.quad {
            Quad::OfPair => return vec![[LOAD_PIECE, STORE_PIECE], WHOLE_PAIRS],
            Quad::One => ([LOAD_PIECE, STORE_PIECE], WHOLE_QUADS),
            Quad::Two => ([LOAD_PIECE, STORE_PIECE], QUADS_OF_TWO),
            Quad::Four => ([LOAD_PIECE, STORE_PIECE], QUADS_OF_FOUR),
            Quad::Halves => ([LOAD_HALF, STORE_HALF], QUADS_OF_HALVES),
            // No program loads codes in this way.
            Quad::Bytes => (["", STORE_BYTES], ["", STORE_QUAD_OF_BYTES]),
        };
        if key.program == Program::ReducePartials { vec![pieces, quads] } else { vec![pieces, quads, PAIRS_OF_QUADS] }
    }
}

const DECLARATION: &str = "
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<STORED>;
";

/// Index of an element in its binding.
const AT: &str = "
fn at_TENSOR(row: u32, col: u32) -> u32 { return params.TENSOR + row * params.TENSOR_row_stride + ATCOL; }
";

const AT_IN_GROUPS: &str = "
fn at_TENSOR(row: u32, col: u32) -> u32 {
    let there = row + params.first_in_group;
    let group = there / params.rows_per_group;
    let row_of_group = there - group * params.rows_per_group;
    return params.TENSOR + group * params.TENSOR_group_stride + row_of_group * params.TENSOR_row_stride + ATCOL;
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

// A row may begin and end in the middle of a word that it shares with another thread. Each half has
// one writer, which replaces its bits atomically and leaves the other half unchanged.
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

// A word may contain bytes of other threads. Each byte has one writer, which replaces its bits
// atomically and leaves the other bytes unchanged.
const STORE_BYTES: &str = "
fn replace_TENSOR(word: u32, mask: u32, bits: u32) {
    if (mask == 0xffffffffu) {
        atomicStore(&TENSOR[word], bits);
    } else {
        atomicAnd(&TENSOR[word], ~mask);
        atomicOr(&TENSOR[word], bits);
    }
}
fn store_bytes_TENSOR(at: u32, bytes: u32, count: u32) {
    let mask = 0xffffffffu >> (32u - 8u * count);
    let shift = 8u * (at & 3u);
    replace_TENSOR(at >> 2u, mask << shift, (bytes & mask) << shift);
    if (shift + 8u * count > 32u) {
        replace_TENSOR((at >> 2u) + 1u, mask >> (32u - shift), (bytes & mask) >> (32u - shift));
    }
}
";

const STORE_QUAD_OF_BYTES: &str = "
fn store_quad_TENSOR(row: u32, col: u32, quad: u32) {
    if (col >= params.cols) { return; }
    store_bytes_TENSOR(at_TENSOR(row, col), quad, min(4u, params.cols - col));
}
";

/// Up to four codes of a row.
const LOAD_WORD_OF_CODES: &str = "
fn load_TENSOR(row: u32, col: u32) -> u32 { return TENSOR[at_TENSOR(row, col) >> 2u]; }
";
const LOAD_CODES_BY_BYTES: &str = "
fn load_TENSOR(row: u32, col: u32) -> u32 {
    var word = 0u;
    let at = at_TENSOR(row, col);
    for (var i = 0u; i < min(4u, params.cols - col); i += 1u) {
        word |= ((TENSOR[(at + i) >> 2u] >> (8u * ((at + i) & 3u))) & 0xffu) << (8u * i);
    }
    return word;
}
";
/// Up to four codes of a column, from adjacent rows.
const STORE_TRANSPOSED_WORD: &str = "
fn store_TENSOR(row: u32, col: u32, word: u32) {
    TENSOR[(params.TENSOR + col * params.TENSOR_row_stride + params.first_row + row) >> 2u] = word;
}
";
const STORE_TRANSPOSED_BYTES: &str = "
fn store_TENSOR(row: u32, col: u32, word: u32) {
    let at = params.TENSOR + ATCOL * params.TENSOR_row_stride + params.first_row + row;
    store_bytes_TENSOR(at, word, min(4u, params.rows - row));
}
";

const LOAD_SCALAR: &str = "
fn load_TENSOR() -> f32 { return TENSOR[params.TENSOR]; }
";
const LOAD_NO_SCALAR: &str = "
fn load_scale() -> f32 { return 1.0; }
";

// A stale value is smaller, so at worst the atomicMax is unnecessary.
const FOLD_AMAX: &str = "
fn fold_amax(magnitude: u32) {
    if (magnitude > atomicLoad(&TENSOR[params.TENSOR])) { atomicMax(&TENSOR[params.TENSOR], magnitude); }
}
";
const FOLD_NO_AMAX: &str = "
fn fold_amax(magnitude: u32) {}
";

const STORE_SCALE: &str = "
fn store_scales(row: u32, group: u32, scale: Scale) { TENSOR[at_scales(row, group)] = scale.value; }
";
const STORE_BYTE_OF_SCALES: &str = "
fn store_scales(row: u32, group: u32, scale: Scale) { store_bytes_TENSOR(at_scales(row, group), scale.byte, 1u); }
";
const STORE_NO_SCALE: &str = "
fn store_scales(row: u32, group: u32, scale: Scale) {}
";
const STORE_WORD_OF_SCALES: &str = "
fn store_word_of_scales(row: u32, group: u32, word: u32) { TENSOR[at_scales(row, group) >> 2u] = word; }
";
const STORE_NO_WORD_OF_SCALES: &str = "
fn store_word_of_scales(row: u32, group: u32, word: u32) {}
";

const STORE_COLUMN_SCALE: &str = "
fn store_TENSOR(col: u32, group: u32, scale: Scale) { TENSOR[at_TENSOR(col, group)] = scale.value; }
";
const STORE_COLUMN_BYTE_OF_SCALES: &str = "
fn store_TENSOR(col: u32, group: u32, scale: Scale) { store_bytes_TENSOR(at_TENSOR(col, group), scale.byte, 1u); }
";

const CLEAR_WORD: &str = "
fn clear(byte: u32) { TENSOR[params.TENSOR + (byte >> 2u)] = 0u; }
";
const CLEAR_WORD_OF_BYTES: &str = "
fn clear(byte: u32) { TENSOR[(params.TENSOR + byte) >> 2u] = 0u; }
";
const CLEAR_BYTES: &str = "
fn clear(byte: u32) { store_bytes_TENSOR(params.TENSOR + byte, 0u, min(4u, params.cols - byte)); }
";

const LOAD_STATISTIC: &str = "
fn load_TENSOR(row: u32) -> f32 { return TENSOR[params.TENSOR + ATROW]; }
";
const STORE_STATISTIC: &str = "
fn store_TENSOR(row: u32, value: f32) { TENSOR[params.TENSOR + ATROW] = value; }
";
const STORE_SHARED: &str = "
fn store_TENSOR(row: u32, value: f32) { workspace[params.TENSOR + ATROW] = bitcast<u32>(value); }
";
const STORE_VALUES: &str = "
fn store_TENSOR(col: u32, values: vec4<f32>) { store_quad_TENSOR(0u, col, words_DTYPE(values)); }
";
// One addition after the sum over the rows. Each quad has one writer.
const ADD_VALUES: &str = "
fn store_TENSOR(col: u32, values: vec4<f32>) {
    let held = quad_DTYPE(load_quad_TENSOR(0u, col));
    store_quad_TENSOR(0u, col, words_DTYPE(held + values));
}
";
/// mean_wdy_xhat and mean_wdy of a row.
const LOAD_ROW_SUMS: &str = "
fn load_row_sums(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * ATROW;
    let quad = workspace[at >> 2u];
    return select(quad.xy, quad.zw, (at & 2u) == 2u);
}
";
const LOAD_ROW_SUMS_BY_WORDS: &str = "
fn load_row_sums(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * ATROW;
    return vec2(bitcast<f32>(atomicLoad(&workspace[at])), bitcast<f32>(atomicLoad(&workspace[at + 1u])));
}
";
