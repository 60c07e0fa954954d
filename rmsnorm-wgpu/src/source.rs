//! A program as the device gets it: one text, put together from the files of `shaders/`, the tensors that it binds, and
//! the numbers that the text leaves open.
//!
//! Types, tensors and yes-or-no questions are settled in the text, since an `override` cannot change a type, and a branch
//! that is never taken still needs its bindings. So are the sizes that are the same in all programs. Numbers that plans choose are
//! `override`s without a default.

mod assemble;
#[cfg(test)]
mod programs;
mod tensors;

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_gpu::reduction;
use rmsnorm_shaders as shaders;
use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, Tensor};

use crate::plan::{Access, FORWARD_BATCH, Flavour, KernelKey, PAIR, Program};
use assemble::{expand, substitute};
use tensors::{Kind, Use, uses};

/// Entry point of every program.
pub(crate) const ENTRY: &str = "main";

/// Where the uniform buffer with [`Params`](crate::params::Params) is bound; tensors follow.
pub(crate) const PARAMS_BINDING: u32 = 0;

/// A storage buffer that a program binds, in group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) tensor: Tensor,
    /// Whether it is declared `read_write`.
    pub(crate) is_written: bool,
    /// Bytes of the smallest access, and so of the smallest binding.
    pub(crate) unit: u32,
}

impl Binding {
    /// The number of the binding.
    pub(crate) const fn number(self) -> u32 {
        binding_number(self.tensor)
    }
}

/// A tensor has the same in all programs.
const fn binding_number(tensor: Tensor) -> u32 {
    tensor as u32 + 1
}

/// The storage buffers that a program binds, by their numbers. What is absent has no binding.
pub(crate) fn bindings(key: &KernelKey) -> Vec<Binding> {
    let binding = |used: Use| Binding { tensor: used.tensor, is_written: used.is_written(key), unit: unit(key, &used) };
    uses(key).into_iter().map(binding).collect()
}

/// A shader that validates where there is `unpack2x16float`, which wgpu leaves out of a few software devices.
pub(crate) const UNPACKS_F16: &str = "@compute @workgroup_size(1) fn main() { let unpacked = unpack2x16float(0u); }";

/// The WGSL of a program. `has_unpack`: for a device with `unpack2x16float`.
pub(crate) fn text(key: &KernelKey, has_unpack: bool) -> String {
    let DTypes { activation, weight, residual } = key.call.dtypes;
    let normalized = if has_residual(key) { residual } else { activation };
    let names = [("T", activation), ("W", weight), ("R", residual), ("H", normalized)].map(|(n, d)| (n, d.name()));
    let holds = |name: &str| answer(key, name) == Some(true);
    let counts = |counter: &str| match counter {
        "J" => 0..key.tile.rows_at_once,
        "BATCH" => 0..FORWARD_BATCH,
        _ => 0..key.tile.packs,
    };
    let [pair, quad, padding] = [PAIR as u32, reduction::COLUMNS, reduction::ROW_MULTIPLE].map(|n| format!("{n}u"));
    let sizes = [("PAIR", &*pair), ("QUAD", &quad), ("PADDING", &padding)];
    let mut text = String::new();
    for part in shared(key) {
        text += &substitute(&expand(part, &holds, &counts), &sizes);
    }
    for dtype in DType::ALL {
        if dtypes(key).contains(&dtype) {
            text += &expand(io(dtype), &|name| name == "HAS_UNPACK" && has_unpack, &|_| 0..1);
            text += &substitute(shaders::PAIR.text, &[("DTYPE", dtype.name())]);
        }
    }
    for used in uses(key) {
        text += &of_tensor(key, &used);
    }
    for part in of_program(key) {
        text += &substitute(&substitute(&expand(part, &holds, &counts), &names), &sizes);
    }
    text
}

/// The numbers that [`text`] leaves open: all of its overrides, and no other.
pub(crate) fn constants(key: &KernelKey) -> Vec<(&'static str, f64)> {
    let tile = &key.tile;
    let mut numbers = vec![("WORKGROUP", tile.threads()), ("THREADS_PER_ROW", tile.threads_per_row)];
    if has_sums(key.program) {
        match tile.flavour {
            Flavour::Workgroup => {
                numbers.extend([("SEGMENT", segment(key)), ("SEGMENTS", tile.threads() / segment(key))])
            }
            Flavour::Subgroup(lanes) => numbers.extend([("SUBGROUP", lanes), ("EXCHANGE", exchange(key, lanes))]),
        }
    }
    if gradients(key) > 0 {
        numbers.push(("GRADIENTS", gradients(key)));
    }
    if key.program == Program::Backward {
        numbers.push(("ROWS_AT_ONCE", tile.rows_at_once));
    }
    if matches!(key.program, Program::ForwardStreaming | Program::Copy) {
        numbers.push(("PACKS", tile.packs));
    }
    numbers.into_iter().map(|(name, number)| (name, f64::from(number))).collect()
}

/// Bytes of workgroup memory that a program declares.
#[cfg(test)]
pub(crate) fn workgroup_bytes(key: &KernelKey) -> u32 {
    let threads = key.tile.threads();
    let sum = if is_layer(key) && !key.program.is_forward() { 8 } else { 4 };
    let sums = match key.tile.flavour {
        _ if !has_sums(key.program) => 0,
        Flavour::Workgroup => sum * (threads + threads / segment(key)),
        Flavour::Subgroup(lanes) => sum * exchange(key, lanes),
    };
    let folded = if is_folded(key) || key.program == Program::ReducePartials { 16 * threads } else { 0 };
    sums + folded
}

/// Whether a matrix is f32, so that the quads of a pair lie apart, and a 16-bit access has one of them.
pub(crate) fn is_split(key: &KernelKey) -> bool {
    key.call.dtypes.activation == DType::F32 || (has_stream(key) && key.call.dtypes.residual == DType::F32)
}

/// The answer to what the files ask with `// if`; `None` if nobody knows. `HAS_` and a tensor's name asks for that tensor.
fn answer(key: &KernelKey, question: &str) -> Option<bool> {
    let tensor = question.strip_prefix("HAS_").and_then(|name| Tensor::from_name(&name.to_ascii_lowercase()));
    Some(match (question, tensor) {
        ("IS_LAYER", _) => is_layer(key),
        ("IS_SPLIT", _) => is_split(key),
        ("IS_ALIGNED", _) => key.access == Access::Aligned,
        ("IS_WHOLE", _) => key.is_whole,
        ("IS_SUBGROUP", _) => has_sums(key.program) && matches!(key.tile.flavour, Flavour::Subgroup(_)),
        ("IS_SHUFFLED_TWICE", _) => is_shuffled_twice(key),
        ("IS_IN_PLACE", _) => key.call.tensors.is_in_place(),
        ("IS_CAST_BEFORE_WEIGHT", _) => key.call.cast_order == CastOrder::BeforeWeight,
        ("IS_FOLDED", _) => is_folded(key),
        ("HAS_WEIGHT_OFFSET", _) => key.has_weight_offset,
        ("HAS_ROW_GROUPS", _) => key.call.has_row_groups,
        ("HAS_GRADIENTS", _) => gradients(key) > 0,
        ("HAS_ROW_SUMS", _) => key.program == Program::BackwardColumns,
        (_, Some(Tensor::Residual)) => has_residual(key),
        (_, Some(tensor)) => key.call.tensors.has(tensor),
        (_, None) => return None,
    })
}

/// What all programs begin with.
fn shared(key: &KernelKey) -> Vec<&'static str> {
    let mut parts = vec![shaders::PARAMS.text, shaders::ROW.text, shaders::ME.text];
    if gradients(key) > 0 {
        parts.push(shaders::PARTIAL_ROWS.text);
    }
    if has_sums(key.program) {
        parts.push(match key.tile.flavour {
            Flavour::Workgroup => shaders::REDUCE_WORKGROUP.text,
            Flavour::Subgroup(_) => shaders::REDUCE_SUBGROUP.text,
        });
    }
    parts
}

/// The program itself, after what it shares with others.
fn of_program(key: &KernelKey) -> Vec<&'static str> {
    let mut parts = match key.program {
        Program::Forward | Program::ForwardStreaming => vec![shaders::PARAMETERS.text, shaders::NORMALIZE.text],
        Program::Backward | Program::BackwardRowSums | Program::BackwardColumns => {
            vec![shaders::PARAMETERS.text, shaders::GRADIENTS.text]
        }
        Program::ReducePartials | Program::Copy => vec![],
    };
    if gradients(key) > 0 && key.program != Program::ReducePartials {
        parts.push(shaders::FOLD.text);
    }
    parts.push(match key.program {
        Program::Forward => shaders::FORWARD.text,
        Program::ForwardStreaming => shaders::FORWARD_STREAMING.text,
        Program::Backward => shaders::BACKWARD.text,
        Program::BackwardRowSums => shaders::BACKWARD_ROW_SUMS.text,
        Program::BackwardColumns => shaders::BACKWARD_COLUMNS.text,
        Program::ReducePartials => shaders::REDUCE_PARTIALS.text,
        Program::Copy => shaders::COPY.text,
    });
    parts
}

const fn io(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => shaders::IO_F32.text,
        DType::F16 => shaders::IO_F16.text,
        DType::Bf16 => shaders::IO_BF16.text,
    }
}

/// A tensor's declaration, and the functions that load and store it.
fn of_tensor(key: &KernelKey, used: &Use) -> String {
    let dtype = match used.kind {
        Kind::Elements(dtype) => dtype,
        Kind::Statistic | Kind::Workspace => DType::F32,
    };
    let number = binding_number(used.tensor).to_string();
    let names = [
        ("TENSOR", used.tensor.name()),
        ("DTYPE", dtype.name()),
        ("BINDING", &number),
        ("ACCESS", if used.is_written(key) { "read_write" } else { "read" }),
    ];
    let holds = |name: &str| match name {
        "IS_LOADED" => used.is_loaded,
        "IS_STORED" => used.is_stored,
        // What another thread may be writing to next to it.
        "IS_ATOMIC" => used.is_written(key),
        "IS_GROUPED" => key.call.has_row_groups && used.tensor.is_matrix(),
        _ => answer(key, name) == Some(true),
    };
    fragments(key, used).into_iter().map(|part| substitute(&expand(part, &holds, &|_| 0..1), &names)).collect()
}

/// The files of a tensor.
fn fragments(key: &KernelKey, used: &Use) -> Vec<&'static str> {
    let quads = match (used.kind, key.access) {
        (Kind::Statistic, _) => return vec![shaders::STATISTIC.text],
        (Kind::Workspace, _) => return workspace(key),
        (Kind::Elements(DType::F32), Access::Aligned) => shaders::ALIGNED32.text,
        (Kind::Elements(DType::F32), Access::Words | Access::Halves) => shaders::WORDS32.text,
        (Kind::Elements(DType::F16 | DType::Bf16), Access::Aligned) if moves_pairs(key) => {
            return vec![shaders::PLACE.text, shaders::ALIGNED16_PAIR.text];
        }
        (Kind::Elements(DType::F16 | DType::Bf16), Access::Aligned) => shaders::ALIGNED16.text,
        (Kind::Elements(DType::F16 | DType::Bf16), Access::Words) => shaders::WORDS16.text,
        (Kind::Elements(DType::F16 | DType::Bf16), Access::Halves) => shaders::HALVES16.text,
    };
    // The second stage has single quads.
    let mut parts = vec![shaders::PLACE.text, quads];
    if key.program != Program::ReducePartials {
        parts.push(shaders::QUADS.text);
    }
    parts
}

fn workspace(key: &KernelKey) -> Vec<&'static str> {
    match key.program {
        Program::BackwardRowSums => vec![shaders::ROW_SUMS.text],
        Program::ReducePartials => vec![shaders::PARTIAL_SUMS.text],
        Program::Backward | Program::BackwardColumns if key.call.accumulate == Accumulate::Atomics => {
            vec![shaders::ATOMICS.text]
        }
        Program::Backward | Program::BackwardColumns => vec![shaders::PARTIALS.text],
        Program::Forward | Program::ForwardStreaming | Program::Copy => vec![],
    }
}

/// Bytes of the smallest access to a tensor.
fn unit(key: &KernelKey, used: &Use) -> u32 {
    match used.kind {
        Kind::Statistic => 4,
        Kind::Workspace if key.program == Program::BackwardRowSums => 8,
        Kind::Workspace if key.call.accumulate == Accumulate::Atomics => 4,
        Kind::Workspace => 16,
        Kind::Elements(_) if key.access != Access::Aligned => 4,
        Kind::Elements(DType::F16 | DType::Bf16) if !moves_pairs(key) => 8,
        Kind::Elements(_) => 16,
    }
}

/// Whether one access moves both quads of a 16-bit pair, where it is aligned.
fn moves_pairs(key: &KernelKey) -> bool {
    !is_split(key) && key.program != Program::ReducePartials
}

const fn dtypes(key: &KernelKey) -> [DType; 3] {
    let DTypes { activation, weight, residual } = key.call.dtypes;
    [activation, weight, residual]
}

const fn has_sums(program: Program) -> bool {
    match program {
        Program::Forward | Program::ForwardStreaming | Program::Backward | Program::BackwardRowSums => true,
        Program::BackwardColumns | Program::ReducePartials | Program::Copy => false,
    }
}

fn is_layer(key: &KernelKey) -> bool {
    key.call.norm == Norm::Layer
}

fn has_residual(key: &KernelKey) -> bool {
    key.program.is_forward() && key.call.tensors.adds_residual()
}

/// Whether the residual stream is one of the program's matrices.
fn has_stream(key: &KernelKey) -> bool {
    match key.program {
        Program::Forward | Program::ForwardStreaming => key.call.tensors.adds_residual(),
        Program::Backward | Program::BackwardRowSums | Program::BackwardColumns => true,
        Program::ReducePartials | Program::Copy => false,
    }
}

/// Gradients of parameters that the program has a part in.
fn gradients(key: &KernelKey) -> u32 {
    key.call.tensors.sums_over_rows() as u32
}

/// Whether the groups of a workgroup add up their gradients.
fn is_folded(key: &KernelKey) -> bool {
    let has_rows = matches!(key.program, Program::Backward | Program::BackwardColumns);
    has_rows && gradients(key) > 0 && key.tile.groups > 1
}

fn is_shuffled_twice(key: &KernelKey) -> bool {
    match key.tile.flavour {
        Flavour::Workgroup => false,
        Flavour::Subgroup(lanes) => has_sums(key.program) && key.tile.shuffles_twice(lanes),
    }
}

/// Terms of the first visit of a sum in workgroup memory.
fn segment(key: &KernelKey) -> u32 {
    key.tile.segment().min(key.tile.threads_per_row)
}

/// Sums that subgroups exchange, in two halves that take turns.
fn exchange(key: &KernelKey, lanes: u32) -> u32 {
    2 * (key.tile.threads() / lanes).max(1)
}
