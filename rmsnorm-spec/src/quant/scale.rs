//! Which elements share a scale, and how it follows from the largest of them: (Q3) and (Q4).

use std::hash::{Hash, Hasher};

use super::{CodeType, ScaleLayout};
use crate::Error;

/// The elements that share a scale, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleKind {
    /// All of the tensor, by a scale that the caller gives: static, or delayed by the history of `amax`.
    Given,
    /// All of the tensor, by its own largest element.
    Current,
    /// A row: a token.
    Row,
    /// Columns of a row side by side.
    Block {
        /// How many: 128 or 64. The last block of a row has what is left.
        cols: usize,
        /// Whether the scale is rounded up to a power of two.
        is_power_of_two: bool,
    },
    /// 32 columns of a row by the byte of a power of two: OCP's MXFP8.
    Mx {
        /// To which power.
        rounding: ScaleRounding,
    },
}

impl ScaleKind {
    /// Columns of a block.
    pub const MX_COLS: usize = 32;

    /// Columns side by side that share a scale, the last ones of a row being fewer; `None` where the tensor has one.
    pub const fn set_cols(self, cols: usize) -> Option<usize> {
        match self {
            ScaleKind::Given | ScaleKind::Current => None,
            ScaleKind::Row => Some(cols),
            ScaleKind::Block { cols, .. } => Some(cols),
            ScaleKind::Mx { .. } => Some(ScaleKind::MX_COLS),
        }
    }

    /// Scales of a row, where a row has some of its own.
    pub const fn groups(self, cols: usize) -> Option<usize> {
        match self.set_cols(cols) {
            Some(0) | None => None,
            Some(set) => Some(cols.div_ceil(set)),
        }
    }
}

/// The power of two that a scale is rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleRounding {
    /// The least that is not below `amax / Q`: nothing saturates.
    #[default]
    Up,
    /// By the exponents alone, as OCP's specification has it: what exceeds `Q`, by up to a seventh of it, saturates.
    Floor,
}

/// What a scale is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// f32.
    F32,
    /// The byte `127 + exponent` of a power of two; 255 is NaN.
    E8m0,
}

/// What is quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QuantSource {
    /// `y` in f32.
    #[default]
    F32,
    /// `y` rounded to the dtype of the activations first, as a norm that writes it and a second kernel would have it.
    Rounded,
}

/// How a result is quantized.
///
/// # Example
/// ```
/// use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
/// let tokens = QuantSpec::new(CodeType::E4m3, ScaleKind::Row).amax_floor(1.0 / 512.0);
/// tokens.check()?;
/// assert_eq!((tokens.scale(0.0), tokens.scale(896.0)), (1.0 / 512.0 / 448.0, 2.0));
/// # Ok::<(), rmsnorm_spec::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct QuantSpec {
    /// The format of the codes.
    pub codes: CodeType,
    /// What shares a scale.
    pub scale: ScaleKind,
    /// What is quantized.
    pub source: QuantSource,
    /// Where the scales of blocks lie.
    pub layout: ScaleLayout,
    /// Where those of the copy along columns lie, of which a row is a column: [`columnwise`](Self::columnwise). Its `ld` has room for
    /// the columns.
    pub columnwise_layout: ScaleLayout,
    /// A smaller `amax` counts as this: not negative, 0 by default.
    pub amax_floor: f32,
    /// A larger `amax` counts as this, and what exceeds it saturates: at least the floor, infinite by default.
    pub amax_ceiling: f32,
    /// Whether the tensor `amax` takes up what it holds already, as the largest of several calls; else it is overwritten.
    pub folds_amax: bool,
}

/// Equal in every bit, so that a spec can be looked up.
impl PartialEq for QuantSpec {
    fn eq(&self, other: &Self) -> bool {
        self.fields() == other.fields()
    }
}

impl Eq for QuantSpec {}

impl Hash for QuantSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.fields().hash(state);
    }
}

/// The exponent field of an f32.
const EXPONENT_BITS: u32 = 23;

impl QuantSpec {
    /// Codes of that format with such scales: of `y` in f32, row-major, with neither floor nor ceiling.
    pub const fn new(codes: CodeType, scale: ScaleKind) -> Self {
        QuantSpec {
            codes,
            scale,
            source: QuantSource::F32,
            layout: ScaleLayout::RowMajor,
            columnwise_layout: ScaleLayout::RowMajor,
            amax_floor: 0.0,
            amax_ceiling: f32::INFINITY,
            folds_amax: false,
        }
    }

    fn fields(&self) -> (CodeType, ScaleKind, QuantSource, [ScaleLayout; 2], [u32; 2], bool) {
        let QuantSpec { codes, scale, source, layout, columnwise_layout, amax_floor, amax_ceiling, folds_amax } = *self;
        let limits = [amax_floor.to_bits(), amax_ceiling.to_bits()];
        (codes, scale, source, [layout, columnwise_layout], limits, folds_amax)
    }

    /// With that source.
    pub const fn source(self, source: QuantSource) -> Self {
        QuantSpec { source, ..self }
    }

    /// With scales of blocks that lie so.
    pub const fn layout(self, layout: ScaleLayout) -> Self {
        QuantSpec { layout, ..self }
    }

    /// With scales of the copy along columns that lie so.
    pub const fn columnwise_layout(self, columnwise_layout: ScaleLayout) -> Self {
        QuantSpec { columnwise_layout, ..self }
    }

    /// How the copy along columns is quantized: as the transposed matrix would be, of `cols` rows of `rows` columns, with the layout
    /// of its own.
    pub const fn columnwise(&self) -> QuantSpec {
        QuantSpec { layout: self.columnwise_layout, ..*self }
    }

    /// Whether there can be such a copy: where scales are of blocks. With one scale the transposed codes are it, and with scales
    /// of rows a matrix product over rows has no use for it.
    pub const fn has_columnwise(&self) -> bool {
        matches!(self.scale, ScaleKind::Block { .. } | ScaleKind::Mx { .. })
    }

    /// With that floor of `amax`.
    pub const fn amax_floor(self, amax_floor: f32) -> Self {
        QuantSpec { amax_floor, ..self }
    }

    /// With that ceiling of `amax`.
    pub const fn amax_ceiling(self, amax_ceiling: f32) -> Self {
        QuantSpec { amax_ceiling, ..self }
    }

    /// With an `amax` that takes up what it holds already: the largest of several calls, such as micro-batches.
    pub const fn folds_amax(self) -> Self {
        QuantSpec { folds_amax: true, ..self }
    }

    /// How many scales a call of so many rows and columns writes, padding included: none of a given scale, one of a tensor;
    /// `None` if they are more than can be counted, or `ld` is less than the rows.
    pub fn scales_len(&self, rows: usize, cols: usize) -> Option<usize> {
        match (self.scale, self.scale.groups(cols)) {
            (ScaleKind::Given, _) => Some(0),
            (_, None) => Some(1),
            (_, Some(groups)) => self.layout.len(rows, groups),
        }
    }

    /// What scales are written as.
    pub const fn scale_type(&self) -> ScaleType {
        match (self.scale, self.layout) {
            (ScaleKind::Mx { .. }, _) | (_, ScaleLayout::PackedUe8m0 { .. }) => ScaleType::E8m0,
            _ => ScaleType::F32,
        }
    }

    /// Whether these go together.
    ///
    /// # Errors
    /// `InvalidArgument` with the rule that does not hold: the limits of `amax`, the length of a block, a layout for scales
    /// that are not laid out so, MX of integers.
    pub fn check(&self) -> Result<(), Error> {
        let refuse = |rule| Err(Error::InvalidArgument { arg: "quant", rule });
        let QuantSpec { amax_floor, amax_ceiling, .. } = *self;
        if !(amax_floor.is_finite() && amax_floor >= 0.0) {
            return refuse(format!("the floor of amax is finite and not negative, got {amax_floor}"));
        }
        // Neither is a ceiling of NaN.
        if !(amax_ceiling >= amax_floor && amax_ceiling > 0.0) {
            return refuse(format!("the ceiling of amax is positive and no less than its floor, got {amax_ceiling}"));
        }
        if let ScaleKind::Block { cols, .. } = self.scale
            && !matches!(cols, 64 | 128)
        {
            return refuse(format!("a block has 64 or 128 columns, got {cols}"));
        }
        if self.folds_amax && self.scale != ScaleKind::Given {
            return refuse(format!("amax is there to fold into where the scale is given, got {:?}", self.scale));
        }
        if matches!(self.scale, ScaleKind::Mx { .. }) && self.codes == CodeType::Int8 {
            return refuse("MX has codes of floating point, got int8".to_owned());
        }
        if let Some(layout) = [self.layout, self.columnwise_layout].into_iter().find(|&layout| !self.can_lie(layout)) {
            return refuse(format!("there is no layout {layout:?} of scales by {:?}", self.scale));
        }
        Ok(())
    }

    const fn can_lie(&self, layout: ScaleLayout) -> bool {
        match layout {
            ScaleLayout::RowMajor => true,
            ScaleLayout::ColumnMajor { .. } => matches!(self.scale, ScaleKind::Block { .. }),
            ScaleLayout::PackedUe8m0 { .. } => {
                matches!(self.scale, ScaleKind::Block { is_power_of_two: true, .. } | ScaleKind::Mx { .. })
            }
            ScaleLayout::Swizzled128x4 => matches!(self.scale, ScaleKind::Mx { .. }),
        }
    }

    /// The scale of elements of which that is the largest magnitude; NaN of NaN. As f32 it is at least 2^-126, and 1 where
    /// all elements are 0 and no floor says otherwise.
    #[inline]
    pub fn scale(&self, amax: f32) -> f32 {
        if let Some(byte) = self.scale_byte(amax) {
            return e8m0_value(byte);
        }
        let amax = self.clamped(amax);
        if amax == 0.0 {
            return 1.0;
        }
        // `max` would drop a NaN.
        let ratio = amax / self.codes.largest();
        let ratio = if ratio < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { ratio };
        if matches!(self.scale, ScaleKind::Block { is_power_of_two: true, .. }) && ratio.is_finite() {
            e8m0_value(self.power_not_below(amax).max(1))
        } else {
            ratio
        }
    }

    /// The byte of [`scale`](Self::scale), where scales are bytes: 255 of NaN, 254 of an infinity, 0 of zeros.
    #[inline]
    pub fn scale_byte(&self, amax: f32) -> Option<u8> {
        if self.scale_type() != ScaleType::E8m0 {
            return None;
        }
        let amax = self.clamped(amax);
        if amax.is_nan() {
            return Some(u8::MAX);
        }
        if amax.is_infinite() {
            return Some(u8::MAX - 1);
        }
        Some(match self.scale {
            ScaleKind::Mx { rounding: ScaleRounding::Floor } => {
                let exponent = |value: f32| (value.abs().to_bits() >> EXPONENT_BITS) as u8;
                // Q's exponent, not its value. Of a subnormal amax it is too large by far to matter.
                exponent(amax).saturating_sub(exponent(self.codes.largest()) - 127)
            }
            ScaleKind::Mx { rounding: ScaleRounding::Up }
            | ScaleKind::Block { .. }
            | ScaleKind::Row
            | ScaleKind::Given
            | ScaleKind::Current => self.power_not_below(amax),
        })
    }

    /// The byte of the least power of two that is not below a finite `amax / Q`: the difference of their exponents, and one more
    /// where amax has the larger significand. A subnormal amax is far below the least of them.
    const fn power_not_below(&self, amax: f32) -> u8 {
        const SIGNIFICAND: u32 = (1 << EXPONENT_BITS) - 1;
        // Of a zero of either sign.
        let (bits, largest) = (amax.to_bits() & 0x7fff_ffff, self.codes.largest().to_bits());
        let is_larger = (bits & SIGNIFICAND > largest & SIGNIFICAND) as u32;
        let exponent = (bits >> EXPONENT_BITS) + is_larger + 127;
        let byte = exponent.saturating_sub(largest >> EXPONENT_BITS);
        if byte > 254 { 254 } else { byte as u8 }
    }

    /// (Q3). NaN stays NaN.
    fn clamped(&self, amax: f32) -> f32 {
        if amax.is_nan() { amax } else { amax.max(self.amax_floor).min(self.amax_ceiling) }
    }
}

/// The value of a scale that is a byte: 2^(byte - 127), NaN of 255.
#[inline]
pub const fn e8m0_value(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << (EXPONENT_BITS - 1)),
        u8::MAX => f32::NAN,
        byte => f32::from_bits((byte as u32) << EXPONENT_BITS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: ScaleKind = ScaleKind::Mx { rounding: ScaleRounding::Up };
    const FLOOR: ScaleKind = ScaleKind::Mx { rounding: ScaleRounding::Floor };
    const BLOCK: ScaleKind = ScaleKind::Block { cols: 128, is_power_of_two: false };
    const BLOCK_POWER: ScaleKind = ScaleKind::Block { cols: 64, is_power_of_two: true };

    /// Both rules at powers of two, at 448 2^k and beside them.
    #[test]
    fn powers_of_two_are_those_of_the_rules() {
        let (below, beyond) = (f32::from_bits(448f32.to_bits() - 1), f32::from_bits(448f32.to_bits() + 1));
        let bytes = |scale| {
            let spec = QuantSpec::new(CodeType::E4m3, scale);
            [1.0, 1.75, below, 448.0, beyond, 465.0, 500.0, 512.0, 896.0, 0.875, 0.0]
                .map(|amax| spec.scale_byte(amax).unwrap())
        };
        assert_eq!(bytes(UP), [119, 119, 127, 127, 128, 128, 128, 128, 128, 118, 0]);
        assert_eq!(bytes(FLOOR), [119, 119, 127, 127, 127, 127, 127, 128, 128, 118, 0]);
    }

    /// The rule itself, in f64: of every significand there is one power, whatever the exponent.
    #[test]
    fn the_least_power_that_holds_all_is_found() {
        for codes in [CodeType::E4m3, CodeType::E5m2] {
            let spec = QuantSpec::new(codes, UP);
            for exponent in [0, 2, 8, 15, 60, 127, 200, 254] {
                for significand in (0..1 << 23).step_by(4099).chain([1, (1 << 23) - 1, 0x0060_0000, 0x0060_0001]) {
                    let amax = f32::from_bits(exponent << 23 | significand);
                    let ratio = f64::from(amax) / f64::from(codes.largest());
                    let byte = spec.scale_byte(amax).unwrap();
                    let power = |byte: u8| 2f64.powi(i32::from(byte) - 127);
                    assert!(power(byte) >= ratio, "{amax:e} in {codes}: {byte}");
                    assert!(byte == 0 || power(byte - 1) < ratio, "{amax:e} in {codes}: {byte}");
                    assert_eq!(f64::from(spec.scale(amax)), power(byte), "{amax:e}");
                }
            }
        }
    }

    #[test]
    fn scales_are_quotients_with_a_least_one() {
        for codes in CodeType::ALL {
            let spec = QuantSpec::new(codes, ScaleKind::Row);
            assert_eq!(spec.scale(3.0), 3.0 / codes.largest());
            assert_eq!((spec.scale(0.0), spec.scale(-0.0)), (1.0, 1.0));
            assert_eq!(spec.scale(1e-40), f32::MIN_POSITIVE);
            assert!(spec.scale(f32::NAN).is_nan() && spec.scale(f32::INFINITY) == f32::INFINITY);
        }
        let spec = QuantSpec::new(CodeType::E4m3, BLOCK_POWER);
        assert_eq!([1.0, 448.0, 449.0].map(|amax| spec.scale(amax)), [2f32.powi(-8), 1.0, 2.0]);
        assert_eq!((spec.scale(0.0), spec.scale(1e-40)), (1.0, f32::MIN_POSITIVE));
        assert!(spec.scale(f32::NAN).is_nan() && spec.scale(f32::INFINITY) == f32::INFINITY);
        assert_eq!(
            (spec.scale_byte(1.0), QuantSpec::new(CodeType::Int8, ScaleKind::Row).scale_byte(1.0)),
            (None, None)
        );
        // The least beyond 127 2^k, of which the quotient is hardly more than a power of two.
        let int8 = QuantSpec::new(CodeType::Int8, BLOCK_POWER);
        assert_eq!([127.0, f32::from_bits(127f32.to_bits() + 1)].map(|amax| int8.scale(amax)), [1.0, 2.0]);
        let mx = QuantSpec::new(CodeType::E5m2, UP);
        let bytes =
            [f32::NAN, f32::INFINITY, 0.0, f32::from_bits(1), 1e-38, f32::MAX].map(|amax| mx.scale_byte(amax).unwrap());
        assert_eq!(bytes, [255, 254, 0, 0, 0, 240]);
        assert!(mx.scale(f32::NAN).is_nan());
        for zeros in [mx, QuantSpec::new(CodeType::E4m3, FLOOR), mx.amax_floor(-0.0)] {
            assert_eq!([0.0, -0.0].map(|amax| zeros.scale_byte(amax)), [Some(0); 2], "{zeros:?}");
        }
        assert_eq!((mx.scale(0.0), mx.scale(57344.0)), (2f32.powi(-127), 1.0));
    }

    #[test]
    fn floor_and_ceiling_limit_amax_and_not_the_scale() {
        let spec = QuantSpec::new(CodeType::E4m3, ScaleKind::Row).amax_floor(4.48).amax_ceiling(44.8);
        assert_eq!(
            [0.0, 1.0, 44.0, 1e6].map(|amax| spec.scale(amax)),
            [4.48 / 448.0, 4.48 / 448.0, 44.0 / 448.0, 44.8 / 448.0]
        );
        assert_eq!(spec.scale(f32::INFINITY), 44.8 / 448.0);
        assert!(spec.scale(f32::NAN).is_nan());
    }

    #[test]
    fn rows_have_as_many_scales_as_blocks() {
        let groups = |kind: ScaleKind| [1, 32, 33, 128, 129].map(|cols| kind.groups(cols));
        assert_eq!([groups(ScaleKind::Given), groups(ScaleKind::Current)], [[None; 5]; 2]);
        assert_eq!(groups(ScaleKind::Row), [Some(1); 5]);
        assert_eq!(groups(BLOCK), [1, 1, 1, 1, 2].map(Some));
        assert_eq!(groups(BLOCK_POWER), [1, 1, 1, 2, 3].map(Some));
        assert_eq!(groups(UP), [1, 1, 2, 4, 5].map(Some));
    }

    #[test]
    fn what_does_not_go_together_is_refused_with_its_rule() {
        let kinds = [ScaleKind::Given, ScaleKind::Current, ScaleKind::Row, BLOCK, BLOCK_POWER, UP, FLOOR];
        let layouts = [
            ScaleLayout::RowMajor,
            ScaleLayout::ColumnMajor { ld: 4 },
            ScaleLayout::PackedUe8m0 { ld: 4 },
            ScaleLayout::Swizzled128x4,
        ];
        let good =
            |kind: ScaleKind, codes| layouts.map(|layout| QuantSpec::new(codes, kind).layout(layout).check().is_ok());
        for codes in [CodeType::E4m3, CodeType::E5m2] {
            assert_eq!(
                [good(kinds[0], codes), good(kinds[1], codes), good(kinds[2], codes)],
                [[true, false, false, false]; 3]
            );
            assert_eq!(
                [good(BLOCK, codes), good(BLOCK_POWER, codes)],
                [[true, true, false, false], [true, true, true, false]]
            );
            assert_eq!([good(UP, codes), good(FLOOR, codes)], [[true, false, true, true]; 2]);
        }
        assert_eq!(
            [good(ScaleKind::Row, CodeType::Int8)[0], good(BLOCK, CodeType::Int8)[0], good(UP, CodeType::Int8)[0]],
            [true, true, false]
        );
        let row = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
        for (spec, text) in [
            (row.amax_floor(-1.0), "floor"),
            (row.amax_floor(f32::NAN), "floor"),
            (row.amax_floor(f32::INFINITY), "floor"),
            (row.amax_ceiling(0.0), "ceiling"),
            (row.amax_ceiling(f32::NAN), "ceiling"),
            (row.amax_floor(2.0).amax_ceiling(1.0), "ceiling"),
            (row.folds_amax(), "fold into where the scale is given"),
            (
                QuantSpec::new(CodeType::E4m3, ScaleKind::Block { cols: 32, is_power_of_two: false }),
                "64 or 128 columns",
            ),
        ] {
            let answer = spec.check();
            let is_told = matches!(&answer, Err(Error::InvalidArgument { arg: "quant", rule }) if rule.contains(text));
            assert!(is_told, "{spec:?}: {answer:?}");
        }
        assert!(row.amax_floor(1.0).amax_ceiling(1.0).check().is_ok());
        let types = [row, QuantSpec::new(CodeType::E4m3, UP), QuantSpec::new(CodeType::E4m3, BLOCK_POWER)];
        assert_eq!(types.map(|spec| spec.scale_type()), [ScaleType::F32, ScaleType::E8m0, ScaleType::F32]);
        assert_eq!(types[2].layout(ScaleLayout::PackedUe8m0 { ld: 1 }).scale_type(), ScaleType::E8m0);
        assert_eq!(row.source(QuantSource::Rounded).source, QuantSource::Rounded);
    }
}
