//! The settings of 8-bit results, from options or from the metadata of the file.

use rmsnorm_core::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};
use serde_json::{Value, json};

use super::setting::{Setting, parse_number};
use crate::args::QuantizeArgs;
use crate::tensors::TensorFile;

/// The format of a quantized result, and the outputs that are written with its codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantize {
    /// The format, the scales and their layout.
    pub spec: QuantSpec,
    /// Whether the transposed codes are written too.
    pub is_transposed: bool,
    /// Whether a copy that is quantized along the columns is written too.
    pub is_columnwise: bool,
    /// Whether y is written too.
    pub keeps_y: bool,
}

impl Quantize {
    /// Reads each setting from its option or, without the option, from the metadata. `None` without
    /// `codes`.
    ///
    /// # Errors
    /// A value does not parse, or an option is given without `codes`. The message names the setting
    /// and its source.
    pub fn read(flags: &QuantizeArgs, file: &TensorFile<'_>) -> Result<Option<Self>, String> {
        let find = |key, flag| Setting::find(key, flag, file);
        let Some(codes) = find("codes", &flags.codes) else {
            let lone = about_codes(flags).into_iter().find(|(_, flag)| flag.is_some());
            return lone.map_or(Ok(None), |(key, _)| {
                Err(format!(
                    "--{} applies to quantized results: pass --codes, such as --codes e4m3",
                    key.replace('_', "-")
                ))
            });
        };
        let is = |key, flag| find(key, flag).map_or(Ok(false), |setting| setting.parse(parse_switch));
        let number = |key, flag, default| find(key, flag).map_or(Ok(default), |setting| setting.parse(parse_number));
        let is_power_of_two = is("pow2", &flags.pow2)?;
        let rounding = find("mx_rounding", &flags.mx_rounding)
            .map_or(Ok(ScaleRounding::Up), |setting| setting.parse(parse_rounding))?;
        let scale = find("scale", &flags.scale).map_or(Ok(ScaleKind::Row), |setting| setting.parse(parse_scale))?;
        let scale = match scale {
            ScaleKind::Block { cols, .. } => ScaleKind::Block { cols, is_power_of_two },
            ScaleKind::Mx { .. } => ScaleKind::Mx { rounding },
            ScaleKind::Given | ScaleKind::Current | ScaleKind::Row => scale,
        };
        let settings_of_others = [
            ("pow2", &flags.pow2, matches!(scale, ScaleKind::Block { .. }), "block128 or block64"),
            ("mx_rounding", &flags.mx_rounding, matches!(scale, ScaleKind::Mx { .. }), "mx"),
        ];
        for (key, flag, has_it, kinds) in settings_of_others {
            if !has_it && find(key, flag).is_some() {
                return Err(format!("{key} applies to scale {kinds}: pass such a scale, or leave {key} out"));
            }
        }
        let source = find("source", &flags.source);
        let layout = find("layout", &flags.layout);
        let spec = QuantSpec::new(codes.parse(parse_codes)?, scale)
            .source(source.map_or(Ok(QuantSource::F32), |setting| setting.parse(parse_source))?)
            .layout(layout.map_or(Ok(ScaleLayout::RowMajor), |setting| setting.parse(parse_layout))?)
            .amax_floor(number("amax_floor", &flags.amax_floor, 0.0)?)
            .amax_ceiling(number("amax_ceiling", &flags.amax_ceiling, f32::INFINITY)?);
        let (is_transposed, keeps_y) = (is("transposed", &flags.transposed)?, is("keep_y", &flags.keep_y)?);
        let is_columnwise = is("columnwise", &flags.columnwise)?;
        Ok(Some(Quantize { spec, is_transposed, is_columnwise, keeps_y }))
    }

    /// The settings with the leading dimensions of the scales: `rows`, and `cols` for the
    /// columnwise copy, rounded up to a multiple of 16 bytes, which matrix products need.
    ///
    /// # Errors
    /// The settings contradict each other.
    pub fn for_shape(self, rows: usize, cols: usize) -> Result<Self, String> {
        let with_room = |rows: usize| match self.spec.layout {
            ScaleLayout::RowMajor | ScaleLayout::Swizzled128x4 => self.spec.layout,
            ScaleLayout::ColumnMajor { .. } => ScaleLayout::ColumnMajor { ld: rows.next_multiple_of(4) },
            ScaleLayout::PackedUe8m0 { .. } => ScaleLayout::PackedUe8m0 { ld: rows.next_multiple_of(4) },
        };
        let spec = self.spec.layout(with_room(rows));
        let spec = if self.is_columnwise { spec.columnwise_layout(with_room(cols)) } else { spec };
        spec.check().map_err(|error| error.to_string())?;
        Ok(Quantize { spec, ..self })
    }

    /// The shape of the scales in a file.
    pub fn scales_shape(&self, batch_shape: &[usize], rows: usize, cols: usize) -> Vec<usize> {
        let Some(groups) = self.spec.scale.groups(cols) else { return vec![1] };
        if self.spec.scale == ScaleKind::Row {
            batch_shape.to_vec()
        } else {
            laid_out(self.spec.layout, batch_shape, rows, groups)
        }
    }

    /// The shape of the scales of the columnwise copy in a file.
    pub fn scales_columnwise_shape(&self, rows: usize, cols: usize) -> Vec<usize> {
        let groups = self.spec.scale.groups(rows).unwrap_or(0);
        laid_out(self.spec.columnwise_layout, &[cols], cols, groups)
    }

    /// The settings as JSON, for the report.
    pub fn described(&self) -> Value {
        let QuantSpec { codes, scale, source, layout, amax_floor, .. } = self.spec;
        json!({
            "codes": codes.name(),
            "scale": format!("{scale:?}"),
            "source": format!("{source:?}"),
            "layout": format!("{layout:?}"),
            "columnwise_layout": self.is_columnwise.then(|| format!("{:?}", self.spec.columnwise_layout)),
            "amax_floor": amax_floor,
            "amax_ceiling": self.spec.amax_ceiling.is_finite().then_some(self.spec.amax_ceiling),
        })
    }
}

/// The settings that apply to quantized results only, with their names.
pub fn about_codes(flags: &QuantizeArgs) -> [(&'static str, &Option<String>); 10] {
    [
        ("scale", &flags.scale),
        ("pow2", &flags.pow2),
        ("mx_rounding", &flags.mx_rounding),
        ("source", &flags.source),
        ("amax_floor", &flags.amax_floor),
        ("amax_ceiling", &flags.amax_ceiling),
        ("layout", &flags.layout),
        ("transposed", &flags.transposed),
        ("columnwise", &flags.columnwise),
        ("keep_y", &flags.keep_y),
    ]
}

/// The shape of scales in a layout, for rows with this batch shape.
fn laid_out(layout: ScaleLayout, batch_shape: &[usize], rows: usize, groups: usize) -> Vec<usize> {
    match layout {
        ScaleLayout::RowMajor => [batch_shape, &[groups]].concat(),
        ScaleLayout::ColumnMajor { ld } => vec![groups, ld],
        ScaleLayout::PackedUe8m0 { ld } => vec![groups.div_ceil(4), ld, 4],
        ScaleLayout::Swizzled128x4 => vec![rows.div_ceil(128), groups.div_ceil(4), 32, 4, 4],
    }
}

fn parse_codes(name: &str) -> Result<CodeType, &'static str> {
    CodeType::from_name(name).ok_or("e4m3, e5m2 or int8")
}

fn parse_scale(name: &str) -> Result<ScaleKind, &'static str> {
    match name {
        "tensor" => Ok(ScaleKind::Given),
        "current" => Ok(ScaleKind::Current),
        "row" => Ok(ScaleKind::Row),
        "block128" => Ok(ScaleKind::Block { cols: 128, is_power_of_two: false }),
        "block64" => Ok(ScaleKind::Block { cols: 64, is_power_of_two: false }),
        "mx" => Ok(ScaleKind::Mx { rounding: ScaleRounding::Up }),
        _ => Err("tensor, current, row, block128, block64 or mx"),
    }
}

fn parse_rounding(name: &str) -> Result<ScaleRounding, &'static str> {
    match name {
        "up" => Ok(ScaleRounding::Up),
        "floor" => Ok(ScaleRounding::Floor),
        _ => Err("up or floor"),
    }
}

fn parse_source(name: &str) -> Result<QuantSource, &'static str> {
    match name {
        "f32" => Ok(QuantSource::F32),
        "rounded" => Ok(QuantSource::Rounded),
        _ => Err("f32 or rounded"),
    }
}

/// The layout, with a leading dimension of 0 until the shape is known.
fn parse_layout(name: &str) -> Result<ScaleLayout, &'static str> {
    match name {
        "row_major" => Ok(ScaleLayout::RowMajor),
        "column_major" => Ok(ScaleLayout::ColumnMajor { ld: 0 }),
        "packed_ue8m0" => Ok(ScaleLayout::PackedUe8m0 { ld: 0 }),
        "swizzled128x4" => Ok(ScaleLayout::Swizzled128x4),
        _ => Err("row_major, column_major, packed_ue8m0 or swizzled128x4"),
    }
}

fn parse_switch(text: &str) -> Result<bool, &'static str> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1"),
    }
}
