//! Scales of a quantized result, and the conversion to quantized values: math.md, (Q2) to (Q5).

use rmsnorm_spec::DType;
use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleRounding, ScaleType, e8m0_value};

use super::call::Call;
use crate::run::memory::round;
use crate::selftest::planted::Bug;

/// The quantization of a call, with its bug.
pub(super) struct Quantizer<'c> {
    pub(super) call: &'c Call,
    pub(super) quant: QuantSpec,
    /// Rows and columns of the matrix to quantize; transposed for the columnwise copy.
    pub(super) shape: (usize, usize),
}

/// A row before it is quantized.
#[derive(Default)]
pub(super) struct Normalized {
    /// (cols)
    pub(super) y: Vec<f32>,
    /// (cols); y without the bias
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

    /// The values to quantize.
    pub(super) fn v(&self, row: &Normalized) -> Vec<f32> {
        row.y.iter().map(|&y| self.source(y, Bug::CodesOfRounded, Bug::CodesOfF32)).collect()
    }

    /// The magnitudes for amax.
    pub(super) fn magnitudes(&self, row: &Normalized) -> Vec<f32> {
        let values = match self.call.bug {
            Some(Bug::AmaxOfXHat) => &row.x_hat,
            Some(Bug::AmaxBeforeBias) => &row.unbiased,
            Some(_) | None => &row.y,
        };
        let magnitude = |&y: &f32| {
            let v = self.source(y, Bug::AmaxOfRounded, Bug::AmaxOfF32);
            if self.has(Bug::AmaxWithoutAbs) { v.max(0.0) } else { v.abs() }
        };
        values.iter().map(magnitude).collect()
    }

    /// (Q2): the largest magnitude of a set. It compares bits, so NaN is above infinity.
    pub(super) fn amax(&self, set: &[f32]) -> f32 {
        let len = set.len();
        let counted = match self.call.bug {
            Some(Bug::AmaxDropsLastCol) => len - usize::from(len > 1),
            Some(Bug::AmaxDropsTail8) => len - len % 8,
            Some(Bug::AmaxDropsChunk) if len > 32 => len - 32,
            Some(Bug::AmaxOfHalfBlock) => len.div_ceil(2),
            Some(_) | None => len,
        };
        let is_counted = |value: &&f32| !(self.has(Bug::AmaxDropsNan) && value.is_nan());
        let magnitudes = set[..counted].iter().filter(is_counted).map(|value| value.to_bits() & 0x7fff_ffff);
        f32::from_bits(magnitudes.max().unwrap_or(0))
    }

    /// (Q3) and (Q4): the scale to store, and the scale to quantize with.
    pub(super) fn scale(&self, amax: f32) -> (f32, f32) {
        let mut quant = self.quant;
        match self.call.bug {
            Some(Bug::FloorIgnored) => quant.amax_floor = 0.0,
            Some(Bug::CeilingIgnored) => quant.amax_ceiling = f32::INFINITY,
            Some(Bug::CeilingOfScale) if quant.amax_ceiling.is_finite() => {
                let ceiling = quant.amax_ceiling;
                quant.amax_ceiling = f32::INFINITY;
                let scale = quant.scale(amax).min(ceiling);
                return (scale, scale);
            }
            Some(_) | None => {}
        }
        let largest = quant.codes.largest();
        let is_power = matches!(quant.scale, ScaleKind::Mx { .. } | ScaleKind::Block { is_power_of_two: true, .. });
        let amax = match self.call.bug {
            Some(Bug::ScaleThroughBf16) => round(amax, DType::Bf16),
            Some(Bug::PowerLowBits) if is_power => f32::from_bits(amax.to_bits() & !7),
            Some(Bug::Largest240) => amax * (largest / 240.0),
            Some(Bug::Largest256) => amax * (largest / 256.0),
            Some(_) | None => amax,
        };
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
        if self.has(Bug::CodesByUnroundedScale) { (stored, amax / largest) } else { (stored, stored) }
    }

    /// The power of two; a wrong one with a bug.
    fn power(&self, amax: f32, right: f32) -> f32 {
        let largest = self.quant.codes.largest();
        let exponent = |value: f32| (value.to_bits() >> 23) as i32 - 127;
        let power = |exponent: i32| e8m0_value((exponent.clamp(-126, 127) + 127) as u8);
        let ratio = amax / largest;
        let is_up = !matches!(self.quant.scale, ScaleKind::Mx { rounding: ScaleRounding::Floor });
        let is_between = |value: f32| i32::from(value.to_bits() & 0x007f_ffff != 0);
        match self.call.bug {
            Some(Bug::PowerDown) if is_up => power(exponent(ratio)),
            Some(Bug::PowerNearest) if is_up => power(exponent(f32::from_bits(ratio.to_bits() + 0x0040_0000))),
            Some(Bug::PowerOneUp) => right * 2.0,
            Some(Bug::PowerOneDown) => right / 2.0,
            Some(Bug::FloorForUp) if is_up => power(exponent(amax) - exponent(largest)),
            Some(Bug::UpForFloor) if !is_up => power(exponent(ratio) + is_between(ratio)),
            Some(Bug::OcpCeil) if is_up => power(exponent(amax) + is_between(amax) - exponent(largest)),
            Some(Bug::PowerUpAlways) if is_up => power(exponent(ratio) + 1),
            Some(_) | None => right,
        }
    }

    fn is_unrounded_f32(&self) -> bool {
        self.quant.source == QuantSource::F32 && self.activation() == DType::F32
    }

    /// (Q5) before the conversion.
    pub(super) fn quotient(&self, v: f32, scale: f32) -> f32 {
        match self.call.bug {
            Some(Bug::TimesScale) => v * scale,
            Some(Bug::Reciprocal12) => v * f32::from_bits((1.0 / scale).to_bits() & !0xfff),
            Some(Bug::QuotientThroughBf16) => round(v / scale, DType::Bf16),
            Some(Bug::QuotientThroughF16) => round(v / scale, DType::F16),
            Some(_) | None => v / scale,
        }
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
        let has_gone_up = value.abs() > quotient.abs();
        // For float formats only.
        let toward_zero = if has_gone_up { nearest.wrapping_sub(1) } else { nearest };
        let is_tie = is_fp8 && is_tie(codes, quotient);
        let above = |code: u8| if is_tie && !has_gone_up { code + 1 } else { code };
        match (self.call.bug, codes) {
            (Some(Bug::CodesTruncated), _) if is_fp8 => toward_zero,
            (Some(Bug::TiesAway), _) if is_fp8 => above(nearest),
            (Some(Bug::TiesAwayF32), _) if is_fp8 && self.is_unrounded_f32() => above(nearest),
            (Some(Bug::TiesToZero), _) if is_tie => toward_zero,
            (Some(Bug::SubnormalCodesFlushed), _) if is_fp8 && is_subnormal(codes, nearest) => nearest & 0x80,
            (Some(Bug::Fnuz), CodeType::E4m3) => nearest.wrapping_add(if nearest & 0x7f == 0 { 0 } else { 8 }),
            (Some(Bug::OverflowToNan), CodeType::E4m3) if overflows => nearest | 0x7f,
            (Some(Bug::OverflowToInfinity), CodeType::E5m2) if overflows => nearest + 1,
            (Some(Bug::E5m2At448), CodeType::E5m2) => codes.encode(quotient.clamp(-448.0, 448.0)),
            (Some(Bug::Int8Wraps), CodeType::Int8) => (quotient.round_ties_even() as i32) as u8,
            (Some(Bug::Int8Truncates), CodeType::Int8) => (quotient as i8).cast_unsigned(),
            (Some(_) | None, CodeType::E4m3 | CodeType::E5m2 | CodeType::Int8) => nearest,
        }
    }
}

fn is_subnormal(codes: CodeType, code: u8) -> bool {
    let mantissa_bits = if codes == CodeType::E4m3 { 3 } else { 2 };
    code & 0x7f < 1 << mantissa_bits
}

/// Whether a value is half way between two values of a format.
fn is_tie(codes: CodeType, value: f32) -> bool {
    let nearest = codes.encode(value) & 0x7f;
    let distance = |code: u8| (codes.decode(code) - value.abs()).abs();
    let others = [nearest.saturating_sub(1), nearest + 1];
    value.abs() < codes.largest()
        && others.into_iter().any(|code| code != nearest && distance(code) == distance(nearest))
}
