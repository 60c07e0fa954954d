//! The definitions that a program's files need: constants, and types and functions that depend on
//! dtypes, norm and device.
//!
//! Drivers evaluate `if` of a constant at compile time. Only code that would be invalid WGSL on one
//! side of such an `if` is chosen here: a type, a built-in, a conversion that a device lacks.

use rmsnorm_gpu::program::QuantNumbers;
use rmsnorm_gpu::reduction;
use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec};
use rmsnorm_spec::{Activation, DType, Norm, Tensor};

use super::substitute::substitute;
use super::{
    dtypes, gradients, holds_gate, is_clamped, is_folded, is_layer, is_shuffled_twice, is_split, magnitudes, norms,
    of_h, segment, set_lanes, shuffled_lanes,
};
use crate::caps::F16;
use crate::plan::{Access, KernelKey, MOST_PACKS, PAIR};

/// The first lines of a program.
pub(super) fn prelude(key: &KernelKey, f16: F16) -> String {
    let mut text = constants(key, f16);
    for (role, dtype) in roles(key) {
        let of = if role == "0" && holds_gate(key) { HELD_WITH_GATE } else { ROLE };
        text += &substitute(of, &[("ROLE", role), ("DTYPE", dtype.name())]);
    }
    if key.has_groups {
        text += COLUMN_GROUP;
    }
    if is_clamped(key) {
        text += &format!("const CLAMPED_FROM = {:?};\n", Norm::CLAMPED_FROM);
    }
    if let Some(gate) = key.call.gate {
        text += &declared(&[("IS_SILU", gate.activation == Activation::Silu)], &[]);
    }
    if let Some(quant) = &key.call.quant {
        text += &of_codes(key, quant);
    }
    if dtypes(key).contains(&DType::F16) {
        text += conversions(f16);
        text += UNKNOWN_ZERO;
    }
    text
}

/// Every constant that a file may name. Absent values are 0, or 1 if used as a divisor or array
/// length.
fn constants(key: &KernelKey, f16: F16) -> String {
    let (tile, tensors) = (&key.tile, key.call.tensors);
    let flags = [
        ("IS_LAYER", is_layer(key)),
        ("IS_CLAMPED", is_clamped(key)),
        ("IS_SPLIT", is_split(key)),
        ("IS_ALIGNED", key.access == Access::Aligned),
        ("IS_WHOLE", key.is_whole),
        ("IS_SHUFFLED_TWICE", is_shuffled_twice(key)),
        ("IS_EARLY", key.is_early),
        ("IS_READ_AGAIN", tile.reads_again),
        ("IS_VISITED_ONCE", key.visits_once),
        ("IS_CAST_BEFORE_WEIGHT", key.call.cast_order.rounds_x_hat()),
        ("IS_RSTD_CAST", key.call.cast_order.rounds_rstd()),
        ("IS_WEIGHT_FIRST", key.call.cast_order.is_weight_first()),
        ("IS_FOLDED", is_folded(key)),
        ("HAS_WEIGHT_OFFSET", key.has_weight_offset),
        ("HAS_DWEIGHT", tensors.has(Tensor::Dweight)),
        ("HAS_DBIAS", tensors.has(Tensor::Dbias)),
        ("HAS_UNPACK", f16 == F16::Unpacks),
        ("CONVERTS_F16", f16 == F16::Converts),
    ];
    let lanes = shuffled_lanes(key);
    let numbers = [
        ("WORKGROUP", tile.threads()),
        ("THREADS_PER_ROW", tile.threads_per_row),
        ("PACKS", tile.packs),
        ("NORMS", norms(key)),
        ("MOST_PACKS", MOST_PACKS),
        ("ROWS_AT_ONCE", tile.rows_at_once),
        // Threads whose sums are added first, in workgroup memory.
        ("SEGMENT", segment(key)),
        ("SUBGROUP", lanes),
        ("SUBGROUPS", (tile.threads() / lanes).max(1)),
        ("GRADIENTS", gradients(key)),
        // The index of dbias among the gradients: the last.
        ("DBIAS", gradients(key).saturating_sub(1)),
        ("FOLDED", if is_folded(key) { tile.threads() } else { 1 }),
        ("PAIR", PAIR as u32),
        ("QUAD", reduction::COLUMNS),
        ("PADDING", reduction::ROW_MULTIPLE),
    ];
    declared(&flags, &numbers)
}

fn declared(flags: &[(&str, bool)], numbers: &[(&str, u32)]) -> String {
    let flags = flags.iter().map(|(name, flag)| format!("const {name} = {flag};\n"));
    flags.chain(numbers.iter().map(|(name, number)| format!("const {name} = {number}u;\n"))).collect()
}

/// The definitions for quantization: the values that integer conversion to [`CodeType`] needs, and
/// the names that `SCALE`, `SCALE_FORM` and `SCALE_LAYOUT` are compared with.
fn of_codes(key: &KernelKey, quant: &QuantSpec) -> String {
    let tensors = key.call.tensors;
    let flags = [
        ("IS_INT8", quant.codes == CodeType::Int8),
        ("IS_ROUNDED", quant.source == QuantSource::Rounded),
        ("FINDS_AMAX", tensors.has(Tensor::Amax) || key.finds_scale()),
        ("GATHERS_SCALES", key.gathers_scales),
    ];
    // Significand bits of f32 that a code lacks, and the biased f32 exponent of the smallest normal
    // code.
    let (shift, min_exponent) = match quant.codes {
        CodeType::E4m3 | CodeType::Int8 => (20, 121),
        CodeType::E5m2 => (21, 113),
    };
    let QuantNumbers { scale, form, layout, set } = QuantNumbers::of(quant);
    let numbers = [
        ("CODE_SHIFT", shift),
        ("CODE_MIN_EXPONENT", min_exponent),
        // The difference of exponent biases, at the position of a code's exponent.
        ("CODE_BIAS", ((min_exponent - 1) << 23) >> shift),
        ("LARGEST_CODE_BITS", quant.codes.largest().to_bits()),
        ("SET", set),
        ("SET_LANES", set_lanes(key)),
        ("SHUFFLED_LANES", shuffled_lanes(key)),
        ("MAGNITUDES", magnitudes(key)),
    ];
    let chosen = [("SCALE", SCALES, scale), ("SCALE_FORM", FORMS, form), ("SCALE_LAYOUT", LAYOUTS, layout)];
    let chosen: String =
        chosen.into_iter().map(|(name, of, number)| format!("const {name} = {};\n", of[number as usize])).collect();
    // Steps of the smallest code in 1.
    let steps = f32::from_bits((254 - min_exponent + 23 - shift) << 23);
    let largest = format!("const LARGEST_CODE = {:?}f;\nconst CODE_STEPS = {steps:?}f;\n", quant.codes.largest());
    [quantizing(), chosen, largest, declared(&flags, &numbers)].concat()
}

/// The names of dtypes in the files: the letters of activation, weight and residual, and a number
/// for what a norm normalizes, or would: x or its sum with a residual, then the sum after the norm.
fn roles(key: &KernelKey) -> [(&'static str, DType); 6] {
    let [activation, weight, residual] = dtypes(key);
    [("T", activation), ("W", weight), ("R", residual), ("0", of_h(key)), ("1", residual), ("2", residual)]
}

/// A pair as held in registers, and as values.
const ROLE: &str = "
alias Kept_ROLE = Kept_DTYPE;
fn pair_ROLE(kept: Kept_ROLE) -> Pair { return pair_DTYPE(kept); }
fn kept_ROLE(pair: Pair) -> Kept_ROLE { return kept_DTYPE(pair); }
fn settled_ROLE(kept: Kept_ROLE) -> Kept_ROLE { return settled_DTYPE(kept); }
fn rounded_ROLE(values: vec4<f32>) -> vec4<f32> { return rounded_DTYPE(values); }
";

const COLUMN_GROUP: &str = "
var<private> column_group: u32;
";

/// A pair with its gate.
const HELD_WITH_GATE: &str = "
struct Kept_ROLE { h: Kept_DTYPE, gate: Kept_T }
fn pair_ROLE(kept: Kept_ROLE) -> Pair { return pair_DTYPE(kept.h); }
";

/// The source of a scale: the caller, or the amax of the tensor, of a row or of adjacent columns.
/// FIND only computes the tensor's amax.
const SCALES: [&str; 4] = ["GIVEN", "FIND", "BY_ROW", "BY_BLOCK"];
/// The form of a scale: a quotient, a power of two as f32, or a power of two as a byte, rounded up
/// or by the exponent.
const FORMS: [&str; 4] = ["QUOTIENT", "POWER", "BYTE_UP", "BYTE_FLOOR"];
/// The layout of scales.
const LAYOUTS: [&str; 4] = ["ROW_MAJOR", "COLUMN_MAJOR", "PACKED_UE8M0", "SWIZZLED_128X4"];

/// These names with their numbers.
pub(super) fn quantizing() -> String {
    let named = |names: [&'static str; 4]| declared(&[], &std::array::from_fn::<_, 4, _>(|at| (names[at], at as u32)));
    let names: String = [SCALES, FORMS, LAYOUTS].into_iter().map(named).collect();
    format!("\n{names}const LEAST_SCALE = 1.1754943508222875e-38f;\n")
}

/// WGSL's conversions of four f16, if the device has them.
pub(super) const fn conversions(f16: F16) -> &'static str {
    match f16 {
        F16::Integers => NO_CONVERSIONS,
        F16::Unpacks | F16::Converts => CONVERSIONS,
    }
}

// The zero that `settled_f16` ORs in.
const UNKNOWN_ZERO: &str = "
fn unknown_zero() -> u32 { return params.zero; }
";

const CONVERSIONS: &str = "
fn unpack_f16(words: vec2<u32>) -> vec4<f32> { return vec4(unpack2x16float(words.x), unpack2x16float(words.y)); }
fn pack_f16(values: vec4<f32>) -> vec2<u32> { return vec2(pack2x16float(values.xy), pack2x16float(values.zw)); }
";
// Never called.
const NO_CONVERSIONS: &str = "
fn unpack_f16(words: vec2<u32>) -> vec4<f32> { return vec4<f32>(); }
fn pack_f16(values: vec4<f32>) -> vec2<u32> { return vec2<u32>(); }
";
