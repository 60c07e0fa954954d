//! The quantization of a case: its part of an id, and what a kind of scale cannot have.

use std::fmt;

use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};
use rmsnorm_spec::{Tensor, TensorSet};

use super::presence;
use crate::names::{name_of, named};

/// The default quantization of a case.
pub(crate) const PLAIN: QuantSpec = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);

/// All kinds of scales.
pub(crate) const SCALES: [ScaleKind; 9] = [
    ScaleKind::Given,
    ScaleKind::Current,
    ScaleKind::Row,
    ScaleKind::Block { cols: 128, is_power_of_two: false },
    ScaleKind::Block { cols: 128, is_power_of_two: true },
    ScaleKind::Block { cols: 64, is_power_of_two: false },
    ScaleKind::Block { cols: 64, is_power_of_two: true },
    ScaleKind::Mx { rounding: ScaleRounding::Up },
    ScaleKind::Mx { rounding: ScaleRounding::Floor },
];

/// The quantization of the case at a place of a list.
pub(crate) fn at(place: usize) -> Option<QuantSpec> {
    let quant = QuantSpec::new(CodeType::ALL[place % 3], SCALES[place % SCALES.len()]);
    Some(if quant.check().is_ok() { quant } else { QuantSpec::new(CodeType::E4m3, quant.scale) })
}

/// Their names in ids.
const NAMES: [&str; SCALES.len()] =
    ["given", "current", "row", "block128", "block128_pow2", "block64", "block64_pow2", "mx_up", "mx_floor"];

const SOURCES: [(QuantSource, &str); 2] = [(QuantSource::F32, "f32"), (QuantSource::Rounded, "rounded")];

/// A `QuantSpec` as the last part of an id: `e4m3,row,f32,row_major,floor0e0,ceilinginf`, then
/// `,columnwise_` and the columnwise layout unless it is row-major, and `,fold` if amax is folded.
pub(crate) struct Id(pub QuantSpec);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quant = self.0;
        let scale = SCALES.iter().position(|scale| *scale == quant.scale).map_or("?", |place| NAMES[place]);
        let source = name_of(&SOURCES, quant.source);
        let (layout, floor, ceiling) = (layout_name(quant.layout), quant.amax_floor, quant.amax_ceiling);
        write!(f, "{},{scale},{source},{layout},floor{floor:e},ceiling{ceiling:e}", quant.codes)?;
        if quant.columnwise_layout != ScaleLayout::RowMajor {
            write!(f, ",columnwise_{}", layout_name(quant.columnwise_layout))?;
        }
        f.write_str(if quant.folds_amax { ",fold" } else { "" })
    }
}

fn layout_name(layout: ScaleLayout) -> String {
    match layout {
        ScaleLayout::RowMajor => "row_major".into(),
        ScaleLayout::ColumnMajor { ld } => format!("column_major{ld}"),
        ScaleLayout::PackedUe8m0 { ld } => format!("packed_ue8m0{ld}"),
        ScaleLayout::Swizzled128x4 => "swizzled128x4".into(),
    }
}

fn parse_layout(field: &str) -> Option<ScaleLayout> {
    Some(match field {
        "row_major" => ScaleLayout::RowMajor,
        "swizzled128x4" => ScaleLayout::Swizzled128x4,
        field => match (field.strip_prefix("column_major"), field.strip_prefix("packed_ue8m0")) {
            (Some(ld), _) => ScaleLayout::ColumnMajor { ld: ld.parse().ok()? },
            (None, Some(ld)) => ScaleLayout::PackedUe8m0 { ld: ld.parse().ok()? },
            (None, None) => return None,
        },
    })
}

/// Parses the quantization part of an id.
pub(crate) fn parse(field: &str) -> Option<QuantSpec> {
    let mut fields = field.split(',');
    let codes = CodeType::from_name(fields.next()?)?;
    let name = fields.next()?;
    let scale = SCALES[NAMES.iter().position(|known| *known == name)?];
    let source = named(&SOURCES, fields.next()?)?;
    let layout = parse_layout(fields.next()?)?;
    let floor = fields.next()?.strip_prefix("floor")?.parse().ok()?;
    let ceiling = fields.next()?.strip_prefix("ceiling")?.parse().ok()?;
    let mut quant = QuantSpec::new(codes, scale).source(source).layout(layout).amax_floor(floor).amax_ceiling(ceiling);
    for field in fields {
        quant = match field.strip_prefix("columnwise_") {
            Some(layout) => quant.columnwise_layout(parse_layout(layout)?),
            None => quant.folds_amax(),
        };
    }
    quant.check().is_ok().then_some(quant)
}

/// The spec without the settings that its kind of scale cannot have, for a (rows, cols) matrix.
pub(crate) fn normalized(quant: QuantSpec, (rows, cols): (usize, usize), present: TensorSet) -> QuantSpec {
    let with_room = |layout, rows: usize| match layout {
        ScaleLayout::RowMajor | ScaleLayout::Swizzled128x4 => layout,
        ScaleLayout::ColumnMajor { ld } => ScaleLayout::ColumnMajor { ld: ld.max(rows) },
        ScaleLayout::PackedUe8m0 { ld } => ScaleLayout::PackedUe8m0 { ld: ld.max(rows) },
    };
    let mut plain = quant.layout(ScaleLayout::RowMajor).columnwise_layout(ScaleLayout::RowMajor);
    plain.folds_amax = quant.folds_amax && present.has(Tensor::Amax);
    let or_plain = |laid_out: QuantSpec, plain| if laid_out.check().is_ok() { laid_out } else { plain };
    let laid_out = or_plain(plain.layout(with_room(quant.layout, rows)), plain);
    if !present.has(Tensor::CodesColumnwise) {
        return laid_out;
    }
    or_plain(laid_out.columnwise_layout(with_room(quant.columnwise_layout, cols)), laid_out)
}

/// The optional tensors of a call with this quantization.
pub(crate) fn present(quant: &QuantSpec, given: TensorSet) -> TensorSet {
    let is_one = matches!(quant.scale, ScaleKind::Given | ScaleKind::Current);
    given
        .intersection(presence::OF_CODES.with(Tensor::CodesColumnwise))
        .set(Tensor::CodesColumnwise, given.has(Tensor::CodesColumnwise) && quant.has_columnwise())
        .set(Tensor::CodesT, given.has(Tensor::CodesT) && is_one)
        .set(Tensor::Amax, given.has(Tensor::Amax) && quant.scale == ScaleKind::Given)
}
