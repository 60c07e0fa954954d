//! The scalars of `rmsnorm run`: from flags or from the file's metadata, with one reading and one wording for both.

use rmsnorm_core::{CastOrder, Norm};

use super::quantize::Quantize;
use crate::args::SettingArgs;
use crate::tensors::TensorFile;

/// The names of all settings but those of codes.
pub const KEYS: [&str; 5] = ["op", "eps", "weight_offset", "cast_order", "codes"];

/// What the norm is, without its size. The numbers are parsed, not yet validated: the library does that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The kind of norm.
    pub norm: Norm,
    /// Inside the root.
    pub eps: f32,
    /// Added to every weight.
    pub weight_offset: f32,
    /// Where `x_hat` is rounded.
    pub cast_order: CastOrder,
    /// To what the result is quantized, if it is.
    pub quantize: Option<Quantize>,
}

impl Settings {
    /// Reads every setting from its flag or, without one, from the file.
    ///
    /// # Errors
    /// If one that has no default is missing, or one does not parse; the message names it and where it came from.
    pub fn read(flags: &SettingArgs, file: &TensorFile<'_>) -> Result<Self, String> {
        let find = |key, flag| Setting::find(key, flag, file);
        let norm = find("op", &flags.op).ok_or_else(|| missing("op", "rms_norm"))?.parse(parse_norm)?;
        let eps = find("eps", &flags.eps).ok_or_else(|| missing("eps", "1e-6"))?.parse(parse_number)?;
        let weight_offset = find("weight_offset", &flags.weight_offset);
        let cast_order = find("cast_order", &flags.cast_order);
        Ok(Settings {
            norm,
            eps,
            weight_offset: weight_offset.map_or(Ok(0.0), |setting| setting.parse(parse_number))?,
            cast_order: cast_order.map_or(Ok(CastOrder::default()), |setting| setting.parse(parse_cast_order))?,
            quantize: Quantize::read(&flags.quantize, file)?,
        })
    }
}

fn missing(key: &str, example: &str) -> String {
    format!(r#"{key} is missing: give --{key}, such as --{key} {example}, or the file's metadata key "{key}""#)
}

/// A value with its source, for the error message.
pub(super) struct Setting<'a> {
    value: &'a str,
    source: String,
}

impl<'a> Setting<'a> {
    pub(super) fn find(key: &str, flag: &'a Option<String>, file: &'a TensorFile<'_>) -> Option<Self> {
        match flag {
            Some(value) => Some(Setting { value, source: format!("--{}", key.replace('_', "-")) }),
            None => file.metadata(key).map(|value| Setting { value, source: format!(r#"metadata "{key}""#) }),
        }
    }

    pub(super) fn parse<V>(self, parse: fn(&str) -> Result<V, &'static str>) -> Result<V, String> {
        parse(self.value).map_err(|expected| format!("{}: expected {expected}, got {:?}", self.source, self.value))
    }
}

fn parse_norm(name: &str) -> Result<Norm, &'static str> {
    Norm::from_name(name).ok_or("the op rms_norm or layer_norm")
}

pub(super) fn parse_number(text: &str) -> Result<f32, &'static str> {
    text.trim().parse().map_err(|_| "a number")
}

fn parse_cast_order(name: &str) -> Result<CastOrder, &'static str> {
    let order = [CastOrder::AtStore, CastOrder::BeforeWeight].into_iter().find(|&order| cast_order_name(order) == name);
    order.ok_or("at_store or before_weight")
}

/// The name that flags and metadata use.
pub const fn cast_order_name(order: CastOrder) -> &'static str {
    match order {
        CastOrder::AtStore => "at_store",
        CastOrder::BeforeWeight => "before_weight",
    }
}
