//! The elements that share a scale, and the scale of their largest magnitude: (Q3) and (Q4).

use std::hash::{Hash, Hasher};

use super::{CodeType, ScaleLayout};
use crate::Error;

/// The elements that share a scale, and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleKind {
    /// The whole tensor, with a scale that the caller passes: static, or delayed (from the history
    /// of `amax`).
    Given,
    /// The whole tensor, with the scale of its own largest magnitude.
    Current,
    /// One row, which is a token.
    Row,
    /// Adjacent columns of a row.
    Block {
        /// The number of columns: 128 or 64. The last block of a row has the rest.
        cols: usize,
        /// Whether the scale is rounded up to a power of two.
        is_power_of_two: bool,
    },
    /// 32 adjacent columns of a row, with a power of two as a byte: OCP's MXFP8.
    Mx {
        /// The rounding to a power of two.
        rounding: ScaleRounding,
    },
}

impl ScaleKind {
    /// Columns of an MX block.
    pub const MX_COLS: usize = 32;

    /// Adjacent columns that share a scale; the last ones of a row may be fewer. `None` for one
    /// scale of the whole tensor.
    pub const fn set_cols(self, cols: usize) -> Option<usize> {
        match self {
            ScaleKind::Given | ScaleKind::Current => None,
            ScaleKind::Row => Some(cols),
            ScaleKind::Block { cols, .. } => Some(cols),
            ScaleKind::Mx { .. } => Some(ScaleKind::MX_COLS),
        }
    }

    /// Scales of a row; `None` for one scale of the whole tensor, or without columns.
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
    /// The least power that is at least `amax / Q`: nothing saturates.
    #[default]
    Up,
    /// From the exponents alone, as in OCP's specification: values above `Q`, by up to a seventh,
    /// saturate.
    Floor,
}

/// The storage type of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// f32.
    F32,
    /// The byte `127 + exponent` of a power of two; 255 is NaN.
    E8m0,
}

/// The values that are quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QuantSource {
    /// `y` in f32.
    #[default]
    F32,
    /// `y` rounded to the dtype of the activations, as by a norm followed by a separate
    /// quantization kernel.
    Rounded,
}

/// The quantization of a result.
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
    /// The elements that share a scale.
    pub scale: ScaleKind,
    /// The values that are quantized.
    pub source: QuantSource,
    /// The layout of block scales.
    pub layout: ScaleLayout,
    /// The layout of `scales_columnwise`, as a (cols, rows) matrix: see
    /// [`columnwise`](Self::columnwise). Its `ld` is at least the number of columns.
    pub columnwise_layout: ScaleLayout,
    /// The floor of `amax`: smaller values count as this. Not negative, 0 by default.
    pub amax_floor: f32,
    /// The ceiling of `amax`: larger values count as this, and saturate. At least the floor,
    /// infinite by default.
    pub amax_ceiling: f32,
    /// Whether the tensor `amax` receives the larger of its old and new value, over several calls,
    /// instead of being overwritten.
    pub folds_amax: bool,
}

/// Compares bits, so that a spec can be a key.
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

/// The number of bits below the exponent field of an f32.
const EXPONENT_BITS: u32 = 23;

impl QuantSpec {
    /// Codes of that format with such scales: from `y` in f32, row-major, with neither floor nor
    /// ceiling.
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

    /// With this source.
    pub const fn source(self, source: QuantSource) -> Self {
        QuantSpec { source, ..self }
    }

    /// With this layout of block scales.
    pub const fn layout(self, layout: ScaleLayout) -> Self {
        QuantSpec { layout, ..self }
    }

    /// With this layout of `scales_columnwise`.
    pub const fn columnwise_layout(self, columnwise_layout: ScaleLayout) -> Self {
        QuantSpec { columnwise_layout, ..self }
    }

    /// The quantization of `codes_columnwise`: as a (cols, rows) matrix, the transpose, with the
    /// layout [`columnwise_layout`](Self::columnwise_layout).
    pub const fn columnwise(&self) -> QuantSpec {
        QuantSpec { layout: self.columnwise_layout, ..*self }
    }

    /// Whether a call can write `codes_columnwise`: with block scales. With one scale for the
    /// tensor, `codes_t` is the transpose; with a scale for each row, a matrix product over rows
    /// cannot use it.
    pub const fn has_columnwise(&self) -> bool {
        matches!(self.scale, ScaleKind::Block { .. } | ScaleKind::Mx { .. })
    }

    /// With this floor of `amax`.
    pub const fn amax_floor(self, amax_floor: f32) -> Self {
        QuantSpec { amax_floor, ..self }
    }

    /// With this ceiling of `amax`.
    pub const fn amax_ceiling(self, amax_ceiling: f32) -> Self {
        QuantSpec { amax_ceiling, ..self }
    }

    /// With an `amax` that keeps the largest of several calls, such as micro-batches.
    pub const fn folds_amax(self) -> Self {
        QuantSpec { folds_amax: true, ..self }
    }

    /// The number of scales that a call writes, padding included: 0 for a given scale, 1 for a
    /// tensor; `None` if it exceeds `usize`, or if `ld` is less than `rows`.
    pub fn scales_len(&self, rows: usize, cols: usize) -> Option<usize> {
        match (self.scale, self.scale.groups(cols)) {
            (ScaleKind::Given, _) => Some(0),
            (_, None) => Some(1),
            (_, Some(groups)) => self.layout.len(rows, groups),
        }
    }

    /// The storage type of scales.
    pub const fn scale_type(&self) -> ScaleType {
        match (self.scale, self.layout) {
            (ScaleKind::Mx { .. }, _) | (_, ScaleLayout::PackedUe8m0 { .. }) => ScaleType::E8m0,
            _ => ScaleType::F32,
        }
    }

    /// Checks that the fields are consistent.
    ///
    /// # Errors
    /// `InvalidArgument` with the rule that fails: the limits of `amax`, the length of a block, a
    /// layout that these scales do not have, or MX with int8.
    pub fn check(&self) -> Result<(), Error> {
        let refuse = |rule| Err(Error::InvalidArgument { arg: "quant", rule });
        let QuantSpec { amax_floor, amax_ceiling, .. } = *self;
        if !(amax_floor.is_finite() && amax_floor >= 0.0) {
            return refuse(format!("the floor of amax is finite and not negative, got {amax_floor}"));
        }
        // This refuses a ceiling of NaN, too.
        if !(amax_ceiling >= amax_floor && amax_ceiling > 0.0) {
            return refuse(format!("the ceiling of amax is positive and no less than its floor, got {amax_ceiling}"));
        }
        if let ScaleKind::Block { cols, .. } = self.scale
            && !matches!(cols, 64 | 128)
        {
            return refuse(format!("a block has 64 or 128 columns, got {cols}"));
        }
        if self.folds_amax && self.scale != ScaleKind::Given {
            return refuse(format!("folds_amax needs ScaleKind::Given, got {:?}", self.scale));
        }
        if matches!(self.scale, ScaleKind::Mx { .. }) && self.codes == CodeType::Int8 {
            return refuse("MX has codes of floating point, got int8".to_owned());
        }
        if let Some(layout) = [self.layout, self.columnwise_layout].into_iter().find(|&layout| !self.can_lie(layout)) {
            return refuse(format!("{:?} has no scales in the layout {layout:?}", self.scale));
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

    /// The scale of elements whose largest magnitude is `amax`; NaN for NaN. An f32 scale is at
    /// least 2^-126, and 1 if all elements are 0 and there is no floor.
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

    /// The byte of [`scale`](Self::scale), if scales are bytes: 255 for NaN, 254 for an infinity, 0
    /// for zeros.
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
                // Q's exponent, not its value. For a subnormal amax it is too large by far to
                // matter.
                exponent(amax).saturating_sub(exponent(self.codes.largest()) - 127)
            }
            ScaleKind::Mx { rounding: ScaleRounding::Up }
            | ScaleKind::Block { .. }
            | ScaleKind::Row
            | ScaleKind::Given
            | ScaleKind::Current => self.power_not_below(amax),
        })
    }

    /// The byte of the least power of two that is at least a finite `amax / Q`: the difference of
    /// their exponents, plus one if amax has the larger significand. A subnormal amax is far below
    /// the least power.
    const fn power_not_below(&self, amax: f32) -> u8 {
        const SIGNIFICAND: u32 = (1 << EXPONENT_BITS) - 1;
        // The mask also handles -0.
        let (bits, largest) = (amax.to_bits() & 0x7fff_ffff, self.codes.largest().to_bits());
        let is_larger = (bits & SIGNIFICAND > largest & SIGNIFICAND) as u32;
        let exponent = (bits >> EXPONENT_BITS) + is_larger + 127;
        let byte = exponent.saturating_sub(largest >> EXPONENT_BITS);
        if byte > 254 { 254 } else { byte as u8 }
    }

    /// (Q3); NaN stays NaN.
    fn clamped(&self, amax: f32) -> f32 {
        if amax.is_nan() { amax } else { amax.max(self.amax_floor).min(self.amax_ceiling) }
    }
}

/// The value of a byte scale: 2^(byte - 127), NaN for 255.
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

    /// Both rules at powers of two, at 448 2^k and at their neighbours.
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

    /// Compares with the least power of two that is at least amax / Q, computed in f64.
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
        // The least value above 127 2^k; its quotient is hardly more than a power of two.
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
            (row.folds_amax(), "folds_amax needs ScaleKind::Given"),
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
