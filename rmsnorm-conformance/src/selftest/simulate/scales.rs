//! Scales of a quantized result, and the conversion to codes: math.md, (Q2) to (Q5).

use rmsnorm_spec::DType;
use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleRounding, ScaleType, e8m0_value};

use super::call::Call;
use super::matrix::round;
use crate::selftest::planted::Bug;

/// How a call quantizes, with its bug.
pub(super) struct Quantizer<'c> {
    pub(super) call: &'c Call,
    pub(super) quant: QuantSpec,
    /// Rows and columns of what is quantized, which is transposed for the copy along columns.
    pub(super) shape: (usize, usize),
}

/// A row before it is quantized.
#[derive(Default)]
pub(super) struct Normalized {
    /// (cols)
    pub(super) y: Vec<f32>,
    /// Without what the bias adds. (cols)
    pub(super) unbiased: Vec<f32>,
    /// (cols)
    pub(super) x_hat: Vec<f32>,
}

impl Quantizer<'_> {
    pub(super) fn has(&self, bug: Bug) -> bool {
        self.call.has(bug)
    }

    fn activation(&self) -> DType {
        self.call.problem.dtypes.activation
    }

    fn source(&self, y: f32, rounded_with: Bug, unrounded_with: Bug) -> f32 {
        match self.quant.source {
            QuantSource::F32 if self.has(rounded_with) => round(y, self.activation()),
            QuantSource::Rounded if self.has(unrounded_with) => y,
            QuantSource::F32 => y,
            QuantSource::Rounded => round(y, self.activation()),
        }
    }

    /// What becomes codes.
    pub(super) fn v(&self, row: &Normalized) -> Vec<f32> {
        row.y.iter().map(|&y| self.source(y, Bug::CodesOfRounded, Bug::CodesOfF32)).collect()
    }

    /// What the largest magnitude is taken of.
    pub(super) fn magnitudes(&self, row: &Normalized) -> Vec<f32> {
        let values = if self.has(Bug::AmaxOfXHat) {
            &row.x_hat
        } else if self.has(Bug::AmaxBeforeBias) {
            &row.unbiased
        } else {
            &row.y
        };
        let magnitude = |&y: &f32| {
            let v = self.source(y, Bug::AmaxOfRounded, Bug::AmaxOfF32);
            if self.has(Bug::AmaxWithoutAbs) { v.max(0.0) } else { v.abs() }
        };
        values.iter().map(magnitude).collect()
    }

    /// (Q2), of the magnitudes of a set. A maximum of bits: NaN is above infinity.
    pub(super) fn amax(&self, set: &[f32]) -> f32 {
        let len = set.len();
        let counted = if self.has(Bug::AmaxDropsLastCol) {
            &set[..len - usize::from(len > 1)]
        } else if self.has(Bug::AmaxDropsTail8) {
            &set[..len - len % 8]
        } else if self.has(Bug::AmaxDropsChunk) {
            &set[..if len > 32 { len - 32 } else { len }]
        } else if self.has(Bug::AmaxOfHalfBlock) {
            &set[..len.div_ceil(2)]
        } else {
            set
        };
        let is_counted = |value: &&f32| !(self.has(Bug::AmaxDropsNan) && value.is_nan());
        f32::from_bits(counted.iter().filter(is_counted).map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
    }

    /// (Q3) and (Q4): what is stored, and what codes are made with.
    pub(super) fn scale(&self, amax: f32) -> (f32, f32) {
        let mut quant = self.quant;
        if self.has(Bug::FloorIgnored) {
            quant.amax_floor = 0.0;
        }
        if self.has(Bug::CeilingIgnored) {
            quant.amax_ceiling = f32::INFINITY;
        }
        let largest = quant.codes.largest();
        if self.has(Bug::CeilingOfScale) && quant.amax_ceiling.is_finite() {
            let ceiling = quant.amax_ceiling;
            quant.amax_ceiling = f32::INFINITY;
            let scale = quant.scale(amax).min(ceiling);
            return (scale, scale);
        }
        let mut amax = if self.has(Bug::ScaleThroughBf16) { round(amax, DType::Bf16) } else { amax };
        let is_power = matches!(quant.scale, ScaleKind::Mx { .. } | ScaleKind::Block { is_power_of_two: true, .. });
        if self.has(Bug::PowerLowBits) && is_power {
            amax = f32::from_bits(amax.to_bits() & !7);
        }
        let wrong = [(Bug::Largest240, 240.0), (Bug::Largest256, 256.0)];
        if let Some((_, wrong)) = wrong.into_iter().find(|(bug, _)| self.has(*bug)) {
            amax *= largest / wrong;
        }
        let right = quant.scale(amax);
        if self.has(Bug::ScaleZero) && amax == 0.0 && quant.scale_type() == ScaleType::F32 {
            return (0.0, right);
        }
        if self.has(Bug::ScaleInverted) && quant.scale_type() == ScaleType::F32 {
            return (1.0 / right, right);
        }
        if !is_power || !amax.is_normal() {
            return (right, right);
        }
        let stored = self.power(amax, right);
        // Of both the rounding comes first.
        if self.has(Bug::CodesByUnroundedScale) { (stored, amax / largest) } else { (stored, stored) }
    }

    /// Another power of two than the right one, with a bug.
    fn power(&self, amax: f32, right: f32) -> f32 {
        let largest = self.quant.codes.largest();
        let exponent = |value: f32| (value.to_bits() >> 23) as i32 - 127;
        let power = |exponent: i32| e8m0_value((exponent.clamp(-126, 127) + 127) as u8);
        let ratio = amax / largest;
        let is_up = !matches!(self.quant.scale, ScaleKind::Mx { rounding: ScaleRounding::Floor });
        let is_between = |value: f32| i32::from(value.to_bits() & 0x007f_ffff != 0);
        if self.has(Bug::PowerDown) && is_up {
            power(exponent(ratio))
        } else if self.has(Bug::PowerNearest) && is_up {
            power(exponent(f32::from_bits(ratio.to_bits() + 0x0040_0000)))
        } else if self.has(Bug::PowerOneUp) {
            right * 2.0
        } else if self.has(Bug::PowerOneDown) {
            right / 2.0
        } else if self.has(Bug::FloorForUp) && is_up {
            power(exponent(amax) - exponent(largest))
        } else if self.has(Bug::UpForFloor) && !is_up {
            power(exponent(ratio) + is_between(ratio))
        } else if self.has(Bug::OcpCeil) && is_up {
            power(exponent(amax) + is_between(amax) - exponent(largest))
        } else if self.has(Bug::PowerUpAlways) && is_up {
            power(exponent(ratio) + 1)
        } else {
            right
        }
    }

    fn is_unrounded_f32(&self) -> bool {
        self.quant.source == QuantSource::F32 && self.activation() == DType::F32
    }

    /// (Q5), without the conversion.
    pub(super) fn quotient(&self, v: f32, scale: f32) -> f32 {
        let quotient = if self.has(Bug::TimesScale) {
            v * scale
        } else if self.has(Bug::Reciprocal12) {
            v * f32::from_bits((1.0 / scale).to_bits() & !0xfff)
        } else {
            v / scale
        };
        let quotient = if self.has(Bug::QuotientThroughBf16) { round(quotient, DType::Bf16) } else { quotient };
        if self.has(Bug::QuotientThroughF16) { round(quotient, DType::F16) } else { quotient }
    }

    /// (Q5): the conversion.
    pub(super) fn code(&self, quotient: f32) -> u8 {
        let (codes, nearest) = (self.quant.codes, self.quant.codes.encode(quotient));
        let value = codes.decode(nearest);
        let is_fp8 = codes != CodeType::Int8;
        let overflows = quotient.abs() > codes.largest();
        if self.has(Bug::NanToLargest) && quotient.is_nan() {
            return codes.encode(codes.largest());
        }
        if self.has(Bug::SignLost) && is_fp8 {
            return nearest & 0x7f;
        }
        if quotient.is_nan() {
            return nearest;
        }
        // The neighbour of less magnitude, if the nearest is beyond the value.
        let below =
            if is_fp8 { nearest.wrapping_sub(1) } else { nearest.wrapping_sub((value.signum() as i8).cast_unsigned()) };
        let has_gone_up = value.abs() > quotient.abs();
        let toward_zero = if has_gone_up { below } else { nearest };
        let is_tie = is_fp8 && is_tie(codes, quotient);
        let above = |code: u8| if is_tie && !has_gone_up { code + 1 } else { code };
        match codes {
            _ if self.has(Bug::CodesTruncated) && is_fp8 => toward_zero,
            _ if self.has(Bug::TiesAway) && is_fp8 => above(nearest),
            _ if self.has(Bug::TiesAwayF32) && is_fp8 && self.is_unrounded_f32() => above(nearest),
            _ if self.has(Bug::TiesToZero) && is_tie => toward_zero,
            _ if self.has(Bug::SubnormalCodesFlushed) && is_fp8 && is_subnormal(codes, nearest) => nearest & 0x80,
            CodeType::E4m3 if self.has(Bug::Fnuz) => nearest.wrapping_add(if nearest & 0x7f == 0 { 0 } else { 8 }),
            CodeType::E4m3 if self.has(Bug::OverflowToNan) && overflows => nearest | 0x7f,
            CodeType::E5m2 if self.has(Bug::OverflowToInfinity) && overflows => nearest + 1,
            CodeType::E5m2 if self.has(Bug::E5m2At448) => codes.encode(quotient.clamp(-448.0, 448.0)),
            CodeType::Int8 if self.has(Bug::Int8Wraps) => (quotient.round_ties_even() as i32) as u8,
            CodeType::Int8 if self.has(Bug::Int8Truncates) => (quotient as i8).cast_unsigned(),
            CodeType::E4m3 | CodeType::E5m2 | CodeType::Int8 => nearest,
        }
    }
}

fn is_subnormal(codes: CodeType, code: u8) -> bool {
    let mantissa_bits = if codes == CodeType::E4m3 { 3 } else { 2 };
    code & 0x7f < 1 << mantissa_bits
}

/// Whether a value lies half way between two codes.
fn is_tie(codes: CodeType, value: f32) -> bool {
    let nearest = codes.encode(value) & 0x7f;
    let distance = |code: u8| (codes.decode(code) - value.abs()).abs();
    let others = [nearest.saturating_sub(1), nearest + 1];
    value.abs() < codes.largest()
        && others.into_iter().any(|code| code != nearest && distance(code) == distance(nearest))
}
