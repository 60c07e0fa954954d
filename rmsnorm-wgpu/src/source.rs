//! The WGSL text of a program: constants and types that the key determines ([`mod@prelude`]), the
//! bound tensors with their load and store functions ([`mod@accessors`]), the functions that join
//! the pieces of the call ([`mod@chains`]), and files of `shaders/`, which are plain WGSL except for
//! `@include` and `@unroll` ([`mod@unroll`]).

mod accessors;
mod chains;
mod prelude;
mod substitute;
#[cfg(test)]
mod tests;
mod unroll;

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_shaders as shaders;
use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{DType, DTypes, Norm, Piece, Storage, Tensor};

use crate::caps::F16;
use crate::params::{self, Uniform};
#[cfg(test)]
use crate::plan::SIDE;
use crate::plan::uses::{Kind, Use, bound};
use crate::plan::{COLUMNWISE_TILE, CROWDED_BATCH, FORWARD_BATCH, KernelKey, Program, Reduction, lanes_of_set};
use accessors::{Pieces, accessors, workspace};
use chains::{chains, normalized, norms, pieces, stores_after};
use prelude::{conversions, prelude};
use substitute::substitute;
use unroll::unroll;

/// Entry point of every program.
pub(crate) const ENTRY: &str = "main";

/// A storage buffer that a program binds, in group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) tensor: Tensor,
    /// Whether it is declared `read_write`.
    pub(crate) is_written: bool,
    /// Bytes of the smallest access, and hence of the smallest binding.
    pub(crate) unit: u32,
}

impl Binding {
    /// The binding number.
    pub(crate) const fn number(self) -> u32 {
        binding_number(self.tensor)
    }
}

/// A tensor has the same binding number in all programs.
const fn binding_number(tensor: Tensor) -> u32 {
    params::BINDING + 1 + tensor as u32
}

/// The storage buffers that a program binds, by binding number. Absent tensors have no binding.
pub(crate) fn bindings(key: &KernelKey) -> Vec<Binding> {
    let binding = |used: Use| Binding { tensor: used.tensor, is_written: used.is_written(key), unit: unit(key, &used) };
    bound(key).into_iter().map(binding).collect()
}

/// A shader that validates if `unpack2x16float` is available, which wgpu lacks on a few software
/// devices.
pub(crate) const UNPACKS_F16: &str = "@compute @workgroup_size(1) fn main() { let unpacked = unpack2x16float(0u); }";

/// A shader that counts the f16 magnitudes for which the device's conversions match integer
/// arithmetic. The count is the first word of the storage buffer at binding 0; the second word
/// stays 0. It has one thread per magnitude, in workgroups of 128.
pub(crate) fn check_f16() -> String {
    const LEFT_OPEN: &str = "
const HAS_UNPACK = false;
const CONVERTS_F16 = false;
struct Pair { lo: vec4<f32>, hi: vec4<f32> }
fn unknown_zero() -> u32 { return atomicLoad(&right[1]); }
";
    [LEFT_OPEN, conversions(F16::Converts), io(DType::F16), file("check_f16")].concat()
}

/// The WGSL of a program, for a device that converts f16 in this way.
pub(crate) fn text(key: &KernelKey, f16: F16) -> String {
    let counts = |counter: &str| match counter {
        "J" => 0..key.tile.rows_at_once,
        "BATCH" => 0..batch(key),
        "N" => 0..norms(key),
        "AFTER" => 0..u32::from(stores_after(key)),
        _ => 0..key.tile.packs,
    };
    let normalized = normalized(key);
    let names: Vec<_> = [("NORMALIZED", &*normalized)].into_iter().chain(in_group(key)).collect();
    let files = files(key).into_iter().map(|file| substitute(&unroll(&file, &counts), &names));
    let text: String = [prelude(key, f16), accessors(key), chains(key)].into_iter().chain(files).collect();
    Uniform::of(&text).declaration() + &text
}

/// The places of a row and a column in tensors, of a block of columns among the scales of a row, and
/// of sums in the workspace, by their names in files: a program on groups of columns counts columns
/// within the group of its workgroup.
const fn in_group(key: &KernelKey) -> [(&'static str, &'static str); 5] {
    match key.has_groups {
        true => [
            ("ATROW", "(row * params.groups + column_group)"),
            ("ATCOL", "(column_group * params.cols + col)"),
            ("ATBLOCK", "(column_group * (params.cols / SET) + group)"),
            ("PARTIALS", "(params.workspace + column_group * (partial_stride() / params.groups))"),
            ("SECTIONS", "(PADDING * params.groups)"),
        ],
        false => [
            ("ATROW", "row"),
            ("ATCOL", "col"),
            ("ATBLOCK", "group"),
            ("PARTIALS", "params.workspace"),
            ("SECTIONS", "PADDING"),
        ],
    }
}

/// Maximum packs of another matrix that are held in registers in addition to the packs of x (the same
/// number).
const MOST_WAITING_PACKS: u32 = 4;

/// Packs whose weights and biases are in flight at once.
const fn batch(key: &KernelKey) -> u32 {
    let has_bias = key.call.tensors.has(Tensor::Bias) || key.call.tensors.has(Tensor::NextBias);
    let is_crowded = key.tile.threads() > 512 && key.tile.packs == 8 && has_bias;
    if is_crowded { CROWDED_BATCH } else { FORWARD_BATCH }
}

/// Bytes of workgroup memory that a program declares.
#[cfg(test)]
pub(crate) fn workgroup_bytes(key: &KernelKey) -> u32 {
    let threads = key.tile.threads();
    let sum = if is_layer(key) { 8 } else { 4 };
    let sums = match key.tile.reduction {
        _ if !has_sums(key.program) => 0,
        Reduction::Workgroup => sum * (threads + threads / segment(key)),
        Reduction::Subgroup(lanes) => sum * 2 * (threads / lanes).max(1),
    };
    let of_codes = if key.program.writes_codes() { 4 * magnitudes(key) } else { 0 };
    let tile = if key.program == Program::TransposeCodes { (SIDE * SIDE) as u32 } else { 0 };
    let folds = matches!(key.program, Program::Backward | Program::BackwardColumns);
    let folded = match key.program == Program::ReducePartials || is_folded(key) {
        true => 16 * threads,
        false if folds => 16,
        false => 0,
    };
    sums + folded + of_codes + tile
}

/// Whether a matrix is f32: the quads of a pair are then apart, and a 16-bit access moves one quad.
pub(crate) fn is_split(key: &KernelKey) -> bool {
    key.call.dtypes.activation == DType::F32 || key.call.dtypes.residual == DType::F32
}

/// The files of a program: common, shared with some programs, its pieces', and its main file.
fn files(key: &KernelKey) -> Vec<String> {
    let mut files = vec![file("threads"), file(if is_layer(key) { "sum_layer" } else { "sum_rms" })];
    let is_held = |dtype: &DType| dtypes(key).contains(dtype) || *dtype == of_h(key);
    files.extend(DType::ALL.into_iter().filter(is_held).map(io));
    files.extend(match key.tile.reduction {
        // Only programs that use subgroups may name their built-ins.
        Reduction::Subgroup(_) if has_sums(key.program) => vec![file("reduce_subgroup")],
        Reduction::Workgroup if has_sums(key.program) => vec![file("me"), file("reduce_workgroup")],
        Reduction::Subgroup(_) | Reduction::Workgroup => vec![file("me")],
    });
    let is_backward = matches!(key.program, Program::Backward | Program::BackwardRowSums | Program::BackwardColumns);
    if key.program.is_forward() || is_backward {
        files.push(file("affine"));
    }
    if is_backward {
        files.push(if is_clamped(key) { file("clamped") } else { NO_CLAMP });
        files.push(file("gradients"));
    } else if key.program.is_forward() && has_sums(key.program) {
        files.push(file("statistics"));
    }
    if key.program.writes_codes() {
        files.push(file("codes"));
    }
    if key.program.writes_codes() || key.program == Program::TensorScale {
        files.push(file("scales"));
    }
    // The next norm has no file: it is the first norm's code once more.
    files.extend(pieces(key).iter().map(|piece| file(&format!("pieces/{}", stem_of(piece)))));
    if matches!(key.program, Program::Backward | Program::BackwardColumns) {
        files.push(file("fold"));
        files.push(match key.call.accumulate {
            _ if gradients(key) == 0 => NO_HAND_ON,
            Accumulate::Atomics => file("atomics"),
            Accumulate::Partials | Accumulate::Locks => file("partials"),
        });
    }
    let schedule = file(key.program.info().stem).lines().map(|line| match included(line) {
        Some(stem) => file(stem).to_owned(),
        None if key.has_groups && line == MAIN => format!("{line}\n    column_group = work.group.z;\n"),
        None => format!("{line}\n"),
    });
    let schedule = schedule.collect();
    files.into_iter().map(str::to_owned).chain([schedule]).collect()
}

/// The first line of every entry point.
const MAIN: &str = "fn main(me: Me, work: Work) {";

/// The name of a piece's file. A gate has one for both places.
const fn stem_of(piece: Piece) -> &'static str {
    match piece {
        Piece::GateBefore | Piece::GateAfter => "gate",
        Piece::Parts
        | Piece::WeightFirst
        | Piece::Residual
        | Piece::ResidualAfter
        | Piece::NextNorm
        | Piece::Quantize => piece.name(),
    }
}

/// The file that a line of a schedule stands for: `@include(STEM)`.
fn included(line: &str) -> Option<&str> {
    line.trim().strip_prefix("@include(")?.strip_suffix(')')
}

/// The text of a file of `shaders/`; empty if there is none.
fn file(stem: &str) -> &'static str {
    let is_it = |path: &str| path.strip_prefix("shaders/").and_then(|path| path.strip_suffix(".wgsl")) == Some(stem);
    shaders::ALL.iter().find(|source| is_it(source.path)).map_or("", |source| source.text)
}

fn io(dtype: DType) -> &'static str {
    file(&format!("io_{}", dtype.name()))
}

/// Replaces `partials.wgsl` in programs without sums over rows.
const NO_HAND_ON: &str = "
fn hand_on(gradient: u32, chunk: u32, col: u32, sum: vec4<f32>) {}
";

/// Replaces `clamped.wgsl`, so that the others have no eps in backward.
const NO_CLAMP: &str = "
fn unless_clamped(averages: vec2<f32>, rstd: f32) -> vec2<f32> { return averages; }
";

/// Bytes of the smallest access to a tensor.
fn unit(key: &KernelKey, used: &Use) -> u32 {
    match used.kind {
        Kind::Workspace => workspace(key).1,
        Kind::Elements => Pieces::of(key, storage_of(key, used.tensor)).bytes,
        Kind::Statistic | Kind::Scalar | Kind::Amax | Kind::Scales => 4,
        Kind::Bytes | Kind::ColumnBytes | Kind::Found | Kind::Cleared => 4,
    }
}

/// Dtypes of activations, weight and residual. Absent tensors have the dtype of the activations
/// (`CallKey`).
const fn dtypes(key: &KernelKey) -> [DType; 3] {
    let DTypes { activation, weight, residual } = key.call.dtypes;
    [activation, weight, residual]
}

/// The dtype in which what is normalized is held, until a sum with a residual after the norm. The
/// product with a gate is not rounded.
fn of_h(key: &KernelKey) -> DType {
    match pieces(key).has(Piece::GateBefore) {
        true => DType::F32,
        false if key.call.form.is_residual_after() => key.call.dtypes.activation,
        false => key.call.dtypes.residual,
    }
}

/// Whether a gate is held beside what is normalized until the result is made, as the schedules of
/// codes make it several times.
fn holds_gate(key: &KernelKey) -> bool {
    key.program.writes_codes() && pieces(key).has(Piece::GateAfter)
}

/// The element type of a tensor; f32 if the program does not have it.
const fn storage_of(key: &KernelKey, tensor: Tensor) -> Storage {
    // The layout in a key is the layout of the scales that its program writes.
    if let (Tensor::ScalesColumnwise, Some(quant)) = (tensor, &key.call.quant) {
        return Storage::of_scales(quant.scale_type());
    }
    match tensor.storage(key.program.info().direction, key.call.dtypes, key.call.quant.as_ref()) {
        Some(storage) => storage,
        None => Storage::Float(DType::F32),
    }
}

/// Whether threads combine sums over a row.
const fn has_sums(program: Program) -> bool {
    let streams = matches!(program, Program::ForwardStreaming | Program::QuantizedForwardStreaming);
    program.is_on_chip() || streams || matches!(program, Program::BackwardRowSums)
}

fn is_clamped(key: &KernelKey) -> bool {
    key.call.norm == Norm::L2Clamped
}

fn is_layer(key: &KernelKey) -> bool {
    key.call.norm == Norm::Layer
}

/// Whether the matrices of pieces after the norm are loaded with x and held in registers: if there
/// are few packs, or few rows; always for codes.
fn is_early_after(key: &KernelKey) -> bool {
    let is_small = key.is_early || key.tile.packs <= MOST_WAITING_PACKS;
    key.program.writes_codes() || key.program == Program::Forward && is_small
}

/// Number of parameter gradients that the program contributes to.
fn gradients(key: &KernelKey) -> u32 {
    key.call.tensors.sums_over_rows() as u32
}

/// Whether the row groups of a workgroup add up their gradients.
fn is_folded(key: &KernelKey) -> bool {
    let has_rows = matches!(key.program, Program::Backward | Program::BackwardColumns);
    has_rows && gradients(key) > 0 && key.tile.groups > 1
}

fn is_shuffled_twice(key: &KernelKey) -> bool {
    match key.tile.reduction {
        Reduction::Workgroup => false,
        Reduction::Subgroup(lanes) => has_sums(key.program) && key.tile.shuffles_twice(lanes),
    }
}

/// Terms of the first pass of a sum in workgroup memory.
fn segment(key: &KernelKey) -> u32 {
    key.tile.segment().min(key.tile.threads_per_row)
}

/// Adjacent lanes that shuffles reach.
fn shuffled_lanes(key: &KernelKey) -> u32 {
    match key.tile.reduction {
        Reduction::Workgroup => 1,
        Reduction::Subgroup(lanes) => lanes,
    }
}

/// Lanes whose columns share a scale; 1 if scales are not for adjacent columns.
fn set_lanes(key: &KernelKey) -> u32 {
    key.call.quant.and_then(|quant| lanes_of_set(quant.scale, is_split(key))).unwrap_or(1)
}

/// Magnitudes in workgroup memory: one per row or thread if shuffles do not reach all lanes; in the
/// columnwise copy one per scale of a tile.
fn magnitudes(key: &KernelKey) -> u32 {
    if key.program == Program::Columnwise {
        let set = key.call.quant.and_then(|quant| quant.scale.set_cols(usize::MAX)).unwrap_or(1) as u64;
        return (COLUMNWISE_TILE.0 * COLUMNWISE_TILE.1 / set) as u32;
    }
    let is_by_row = key.call.quant.is_some_and(|quant| quant.scale == ScaleKind::Row);
    if is_by_row && key.tile.threads_per_row > shuffled_lanes(key) {
        key.tile.groups
    } else if set_lanes(key) > shuffled_lanes(key) {
        key.tile.threads()
    } else {
        1
    }
}
