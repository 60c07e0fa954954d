//! The settings of `rmsnorm run`, from options or from the metadata of the file.

use rmsnorm_core::{Activation, CastOrder, DType, Gate, Norm, Slot};

use super::quantize::Quantize;
use super::setting::{Setting, parse_number};
use crate::args::SettingArgs;
use crate::tensors::TensorFile;

/// The names of the settings, without those of [`QuantizeArgs`](crate::args::QuantizeArgs) other
/// than `codes`.
pub const KEYS: [&str; 9] =
    ["op", "eps", "weight_offset", "cast_order", "gate", "activation", "groups", "codes", "out_dtype"];

/// The norm without its size. The library validates the numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The kind of norm.
    pub norm: Norm,
    /// Added inside the root.
    pub eps: f32,
    /// Added to every weight.
    pub weight_offset: f32,
    /// The roundings on the way to `y`.
    pub cast_order: CastOrder,
    /// The gate, which the file has a tensor for.
    pub gate: Option<Gate>,
    /// The number of groups of columns.
    pub groups: usize,
    /// The format of the codes, for a quantized result.
    pub quantize: Option<Quantize>,
    /// The dtype of `y`, if it is not said by `x`.
    pub out_dtype: Option<DType>,
}

impl Settings {
    /// Reads each setting from its option or, without the option, from the metadata.
    ///
    /// # Errors
    /// A required setting is missing, or a value does not parse. The message names the setting and
    /// its source.
    pub fn read(flags: &SettingArgs, file: &TensorFile<'_>) -> Result<Self, String> {
        let find = |key, flag| Setting::find(key, flag, file);
        let norm = find("op", &flags.op).ok_or_else(|| missing("op", "rms_norm"))?.parse(parse_norm)?;
        let eps = find("eps", &flags.eps).ok_or_else(|| missing("eps", "1e-6"))?.parse(parse_number)?;
        let weight_offset = find("weight_offset", &flags.weight_offset);
        let cast_order = find("cast_order", &flags.cast_order);
        let slot = find("gate", &flags.gate).map(|setting| setting.parse(parse_slot)).transpose()?;
        let activation = find("activation", &flags.activation);
        let activation = activation.map(|setting| setting.parse(parse_activation)).transpose()?;
        let gate = match (slot, activation) {
            (Some(slot), Some(activation)) => Some(Gate { activation, slot }),
            (None, None) => None,
            (Some(_), None) => return Err(missing("activation", "silu")),
            (None, Some(_)) => return Err(format!("there is an activation but no gate: {}", missing("gate", "after"))),
        };
        let groups = find("groups", &flags.groups);
        let out_dtype = find("out_dtype", &flags.out_dtype).map(|setting| setting.parse(parse_dtype)).transpose()?;
        let quantize = Quantize::read(&flags.quantize, file)?;
        if quantize.is_some() && out_dtype.is_some() {
            return Err(
                "out_dtype is the dtype of y, but codes ask for a quantized result: leave one of them out".into()
            );
        }
        Ok(Settings {
            norm,
            eps,
            weight_offset: weight_offset.map_or(Ok(0.0), |setting| setting.parse(parse_number))?,
            cast_order: cast_order.map_or(Ok(CastOrder::default()), |setting| setting.parse(parse_cast_order))?,
            gate,
            groups: groups.map_or(Ok(1), |setting| setting.parse(parse_count))?,
            quantize,
            out_dtype,
        })
    }
}

fn missing(key: &str, example: &str) -> String {
    format!(r#"{key} is missing: pass --{key}, such as --{key} {example}, or add the metadata key "{key}" to the file"#)
}

fn parse_norm(name: &str) -> Result<Norm, &'static str> {
    Norm::from_name(name).ok_or("the op rms_norm, layer_norm, l2_norm or l2_norm_clamped")
}

fn parse_cast_order(name: &str) -> Result<CastOrder, &'static str> {
    CastOrder::from_name(name).ok_or("at_store, before_weight, rstd_first or weight_first")
}

fn parse_dtype(name: &str) -> Result<DType, &'static str> {
    DType::from_name(name).ok_or("the dtype f32, f16 or bf16")
}

fn parse_slot(name: &str) -> Result<Slot, &'static str> {
    [Slot::After, Slot::Before].into_iter().find(|&slot| slot_name(slot) == name).ok_or("after or before")
}

fn parse_activation(name: &str) -> Result<Activation, &'static str> {
    Activation::from_name(name).ok_or("silu or sigmoid")
}

fn parse_count(text: &str) -> Result<usize, &'static str> {
    text.parse().ok().filter(|count| *count > 0).ok_or("a count of at least 1")
}

/// The name of a gate's place in options and metadata.
pub const fn slot_name(slot: Slot) -> &'static str {
    match slot {
        Slot::After => "after",
        Slot::Before => "before",
    }
}
