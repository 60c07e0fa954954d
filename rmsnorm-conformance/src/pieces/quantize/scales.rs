//! Scales of a quantized result, and the conversion to quantized values: math.md, (Q2) to (Q5).

use rmsnorm_spec::DType;
use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleRounding, ScaleType, e8m0_value};

use crate::pieces::math::{Call, bugs, round};

bugs! {
    /// The bugs of a quantized result.
    QuantizeBug:
    // The largest magnitude.
    AmaxWithoutAbs "amax_without_abs" BOTH CODES "the largest value is taken, not the largest magnitude";
    AmaxOfXHat "amax_of_x_hat" BOTH CODES "the largest magnitude is taken before the weight";
    AmaxBeforeBias "amax_before_bias" BOTH CODES "the largest magnitude is taken before the bias";
    AmaxDropsLastCol "amax_drops_last_col" BOTH CODES "the largest magnitude misses the last column";
    AmaxDropsTail8 "amax_drops_tail8" BOTH CODES "the largest magnitude misses the tail mod 8";
    AmaxDropsChunk "amax_drops_chunk" BOTH CODES "the largest magnitude misses 32 columns";
    AmaxDropsLastRow "amax_drops_last_row" BOTH CODES "the tensor's largest magnitude misses the last row";
    AmaxOfHalfBlock "amax_of_half_block" BOTH CODES "only half of the elements that share a scale count for it";
    AmaxNotCleared "amax_not_cleared" BOTH CODES "amax keeps its old value, or loses it if the call must fold into it";
    AmaxOfQuotient "amax_of_quotient" BOTH CODES "amax is that of the results divided by their scale";
    AmaxOfClamped "amax_of_clamped" BOTH CODES "amax is that of the saturated results";
    AmaxDropsNan "amax_drops_nan" BOTH CODES "the largest magnitude ignores NaN";
    AmaxOfRounded "amax_of_rounded" BOTH CODES "the largest magnitude is taken from results rounded to 16 bits";
    AmaxOfF32 "amax_of_f32" BOTH CODES "the largest magnitude is taken before the requested rounding";

    // Scales.
    ScaleInverted "scale_inverted" BOTH CODES "the stored scale is the reciprocal";
    Largest240 "largest_240" BOTH CODES "scales are made for a largest code of 240";
    Largest256 "largest_256" BOTH CODES "scales are made for a largest code of 256";
    ScaleZero "scale_zero" BOTH CODES "the scale of zeros is 0";
    ScaleOfOtherRow "scale_of_other_row" BOTH CODES "the last row is quantized with the scale of the previous row";
    ScalesShifted "scales_shifted" BOTH CODES "scales are stored one place off";
    ScalesTransposed "scales_transposed" BOTH CODES "scales are stored column by column in a row-major buffer";
    ScaleOfEightRows "scale_of_eight_rows" BOTH CODES "eight rows share the scale of the first";
    FloorIgnored "floor_ignored" BOTH CODES "the floor of amax is ignored";
    CeilingIgnored "ceiling_ignored" BOTH CODES "the ceiling of amax is ignored";
    CeilingOfScale "ceiling_of_scale" BOTH CODES "the ceiling is applied to the scale";
    CodesByUnroundedScale "codes_by_unrounded_scale" BOTH CODES "results are quantized with the scale before its rounding";
    CodesByOtherBlock "codes_by_other_block" BOTH CODES "results are quantized with the neighbouring block's scale";
    PowerDown "power_down" BOTH CODES "the power of two is rounded down";
    PowerNearest "power_nearest" BOTH CODES "the power of two is rounded to nearest";
    PowerOneUp "power_one_up" BOTH CODES "the power of two is one too large";
    PowerOneDown "power_one_down" BOTH CODES "the power of two is one too small";
    FloorForUp "floor_for_up" BOTH CODES "the power is the difference of exponents, not rounded up";
    UpForFloor "up_for_floor" BOTH CODES "the power is rounded up, not the difference of exponents";
    OcpCeil "ocp_ceil" BOTH CODES "the power is amax rounded up to a power of two, less the exponent of the largest code";
    PowerUpAlways "power_up_always" BOTH CODES "the power is one too large if amax / Q is a power of two";
    PowerLowBits "power_low_bits" RMS CODES "the power of two ignores the lowest bits of amax";
    ScaleThroughBf16 "scale_through_bf16" BOTH CODES "amax is rounded to bf16";
    BlockBoundaryLate "block_boundary_late" BOTH CODES "a block's first column counts for the block before";
    PartialBlockByOther "partial_block_by_other" BOTH CODES "the last, partial block has the scale of the previous block";
    BlocksAlongRows "blocks_along_rows" BOTH CODES "blocks extend over rows instead of columns";
    PaddingNotZeroed "padding_not_zeroed" BOTH CODES "the padding between scales is not written";
    SwizzleExchanged "swizzle_exchanged" BOTH CODES "rows and groups are exchanged within a tile";
    PackedReversed "packed_reversed" BOTH CODES "the four scales of a word are in reverse order";

    // Codes.
    TimesScale "times_scale" BOTH CODES "results are multiplied with the scale";
    Reciprocal12 "reciprocal12" BOTH CODES "the reciprocal of the scale has 12 bits";
    CodesTruncated "codes_truncated" BOTH CODES "codes are truncated";
    TiesAway "ties_away" BOTH CODES "ties round away from zero";
    TiesAwayF32 "ties_away_f32" RMS CODES "ties of f32 results that are not rounded first round away from zero";
    TiesToZero "ties_to_zero" BOTH CODES "ties round to zero";
    QuotientThroughBf16 "quotient_through_bf16" BOTH CODES "the quotient is rounded to bf16";
    QuotientThroughF16 "quotient_through_f16" BOTH CODES "the quotient is rounded to f16";
    CodesOfRounded "codes_of_rounded" BOTH CODES "results are rounded to 16 bits before they are quantized";
    CodesOfF32 "codes_of_f32" BOTH CODES "results are quantized without the requested rounding";
    Fnuz "fnuz" BOTH CODES "codes have the bias of another format";
    OverflowToNan "overflow_to_nan" BOTH CODES "values that must saturate become NaN";
    OverflowToInfinity "overflow_to_infinity" BOTH CODES "values that must saturate become infinite";
    E5m2At448 "e5m2_at_448" BOTH CODES "E5M2 saturates where E4M3 does";
    NanToLargest "nan_to_largest" BOTH CODES "NaN becomes the largest code";
    SubnormalCodesFlushed "subnormal_codes_flushed" BOTH CODES "subnormal codes are zero";
    SignLost "sign_lost" BOTH CODES "codes have no sign";
    Int8Wraps "int8_wraps" BOTH CODES "integers wrap";
    Int8Truncates "int8_truncates" BOTH CODES "integers are truncated";
    PairsSwapped "pairs_swapped" BOTH CODES "two neighbouring codes are exchanged";
    CodesLastRowMissing "codes_last_row_missing" BOTH CODES "the last row of codes is never written";
    CodesLastColMissing "codes_last_col_missing" BOTH CODES "the last column of codes is never written";
    TransposedReshaped "transposed_reshaped" BOTH CODES "codes_t is reshaped, not transposed";
    TransposedStrideIgnored "transposed_stride_ignored" BOTH CODES "the row stride of codes_t is ignored";
    TransposedTileMissing "transposed_tile_missing" BOTH CODES "the last tile of codes_t is never written";
    TransposedRoundedAgain "transposed_rounded_again" BOTH CODES "codes_t is quantized separately, with another rounding";
    TransposedRowsSwapped "transposed_rows_swapped" BOTH CODES "two rows are exchanged in codes_t";
    ColumnwiseOfCodes "columnwise_of_codes" BOTH CODES "the columnwise copy is made from the quantized values";
    ColumnwiseRounded "columnwise_rounded" BOTH CODES "the columnwise copy is made from results rounded to 16 bits";
    ColumnwiseByFirstBlock "columnwise_by_first_block" BOTH CODES "a column's second block has the scale of its first";
    ColumnwiseReshaped "columnwise_reshaped" BOTH CODES "the columnwise copy is reshaped, not transposed";
    ColumnwiseStrideIgnored "columnwise_stride_ignored" BOTH CODES "the row stride of the columnwise copy is ignored";
    ColumnwiseTailMissing "columnwise_tail_missing" BOTH CODES "the columnwise copy misses the last, partial block of rows";
}

/// The quantization of a call, with its bug.
pub(super) struct Quantizer<'c> {
    pub(super) call: &'c Call,
    pub(super) quant: QuantSpec,
    /// Rows and columns of the matrix to quantize; transposed for the columnwise copy.
    pub(super) shape: (usize, usize),
}

/// A row before it is quantized: of each element y, y without the bias, and x_hat.
pub(super) type Unquantized = Vec<[f32; 3]>;

impl Quantizer<'_> {
    pub(super) fn has(&self, bug: QuantizeBug) -> bool {
        self.call.has(bug)
    }

    fn activation(&self) -> DType {
        self.call.problem.dtypes.activation
    }

    fn source(&self, y: f32, rounded_with: QuantizeBug, unrounded_with: QuantizeBug) -> f32 {
        match self.quant.source {
            QuantSource::F32 if self.has(rounded_with) => round(y, self.activation()),
            QuantSource::Rounded if self.has(unrounded_with) => y,
            QuantSource::F32 => y,
            QuantSource::Rounded => round(y, self.activation()),
        }
    }

    /// The values to quantize.
    pub(super) fn v(&self, row: &Unquantized) -> Vec<f32> {
        row.iter().map(|[y, ..]| self.source(*y, QuantizeBug::CodesOfRounded, QuantizeBug::CodesOfF32)).collect()
    }

    /// The magnitudes for amax.
    pub(super) fn magnitudes(&self, row: &Unquantized) -> Vec<f32> {
        let which = match self.call.bug() {
            Some(QuantizeBug::AmaxOfXHat) => 2,
            Some(QuantizeBug::AmaxBeforeBias) => 1,
            Some(_) | None => 0,
        };
        let magnitude = |of: &[f32; 3]| {
            let v = self.source(of[which], QuantizeBug::AmaxOfRounded, QuantizeBug::AmaxOfF32);
            if self.has(QuantizeBug::AmaxWithoutAbs) { v.max(0.0) } else { v.abs() }
        };
        row.iter().map(magnitude).collect()
    }

    /// (Q2): the largest magnitude of a set. It compares bits, so NaN is above infinity.
    pub(super) fn amax(&self, set: &[f32]) -> f32 {
        let len = set.len();
        let counted = match self.call.bug() {
            Some(QuantizeBug::AmaxDropsLastCol) => len - usize::from(len > 1),
            Some(QuantizeBug::AmaxDropsTail8) => len - len % 8,
            Some(QuantizeBug::AmaxDropsChunk) if len > 32 => len - 32,
            Some(QuantizeBug::AmaxOfHalfBlock) => len.div_ceil(2),
            Some(_) | None => len,
        };
        let is_counted = |value: &&f32| !(self.has(QuantizeBug::AmaxDropsNan) && value.is_nan());
        let magnitudes = set[..counted].iter().filter(is_counted).map(|value| value.to_bits() & 0x7fff_ffff);
        f32::from_bits(magnitudes.max().unwrap_or(0))
    }

    /// (Q3) and (Q4): the scale to store, and the scale to quantize with.
    pub(super) fn scale(&self, amax: f32) -> (f32, f32) {
        let mut quant = self.quant;
        match self.call.bug() {
            Some(QuantizeBug::FloorIgnored) => quant.amax_floor = 0.0,
            Some(QuantizeBug::CeilingIgnored) => quant.amax_ceiling = f32::INFINITY,
            Some(QuantizeBug::CeilingOfScale) if quant.amax_ceiling.is_finite() => {
                let ceiling = quant.amax_ceiling;
                quant.amax_ceiling = f32::INFINITY;
                let scale = quant.scale(amax).min(ceiling);
                return (scale, scale);
            }
            Some(_) | None => {}
        }
        let largest = quant.codes.largest();
        let is_power = matches!(quant.scale, ScaleKind::Mx { .. } | ScaleKind::Block { is_power_of_two: true, .. });
        let amax = match self.call.bug() {
            Some(QuantizeBug::ScaleThroughBf16) => round(amax, DType::Bf16),
            Some(QuantizeBug::PowerLowBits) if is_power => f32::from_bits(amax.to_bits() & !7),
            Some(QuantizeBug::Largest240) => amax * (largest / 240.0),
            Some(QuantizeBug::Largest256) => amax * (largest / 256.0),
            Some(_) | None => amax,
        };
        let right = quant.scale(amax);
        if self.has(QuantizeBug::ScaleZero) && amax == 0.0 && quant.scale_type() == ScaleType::F32 {
            return (0.0, right);
        }
        if self.has(QuantizeBug::ScaleInverted) && quant.scale_type() == ScaleType::F32 {
            return (1.0 / right, right);
        }
        if !is_power || !amax.is_normal() {
            return (right, right);
        }
        let stored = self.power(amax, right);
        if self.has(QuantizeBug::CodesByUnroundedScale) { (stored, amax / largest) } else { (stored, stored) }
    }

    /// The power of two; a wrong one with a bug.
    fn power(&self, amax: f32, right: f32) -> f32 {
        let largest = self.quant.codes.largest();
        let exponent = |value: f32| (value.to_bits() >> 23) as i32 - 127;
        let power = |exponent: i32| e8m0_value((exponent.clamp(-126, 127) + 127) as u8);
        let ratio = amax / largest;
        let is_up = !matches!(self.quant.scale, ScaleKind::Mx { rounding: ScaleRounding::Floor });
        let is_between = |value: f32| i32::from(value.to_bits() & 0x007f_ffff != 0);
        match self.call.bug() {
            Some(QuantizeBug::PowerDown) if is_up => power(exponent(ratio)),
            Some(QuantizeBug::PowerNearest) if is_up => power(exponent(f32::from_bits(ratio.to_bits() + 0x0040_0000))),
            Some(QuantizeBug::PowerOneUp) => right * 2.0,
            Some(QuantizeBug::PowerOneDown) => right / 2.0,
            Some(QuantizeBug::FloorForUp) if is_up => power(exponent(amax) - exponent(largest)),
            Some(QuantizeBug::UpForFloor) if !is_up => power(exponent(ratio) + is_between(ratio)),
            Some(QuantizeBug::OcpCeil) if is_up => power(exponent(amax) + is_between(amax) - exponent(largest)),
            Some(QuantizeBug::PowerUpAlways) if is_up => power(exponent(ratio) + 1),
            Some(_) | None => right,
        }
    }

    fn is_unrounded_f32(&self) -> bool {
        self.quant.source == QuantSource::F32 && self.activation() == DType::F32
    }

    /// (Q5) before the conversion.
    pub(super) fn quotient(&self, v: f32, scale: f32) -> f32 {
        match self.call.bug() {
            Some(QuantizeBug::TimesScale) => v * scale,
            Some(QuantizeBug::Reciprocal12) => v * f32::from_bits((1.0 / scale).to_bits() & !0xfff),
            Some(QuantizeBug::QuotientThroughBf16) => round(v / scale, DType::Bf16),
            Some(QuantizeBug::QuotientThroughF16) => round(v / scale, DType::F16),
            Some(_) | None => v / scale,
        }
    }

    /// (Q5): the conversion.
    pub(super) fn code(&self, quotient: f32) -> u8 {
        let (codes, nearest) = (self.quant.codes, self.quant.codes.encode(quotient));
        let value = codes.decode(nearest);
        let is_fp8 = codes != CodeType::Int8;
        let overflows = quotient.abs() > codes.largest();
        if self.has(QuantizeBug::NanToLargest) && quotient.is_nan() {
            return codes.encode(codes.largest());
        }
        if self.has(QuantizeBug::SignLost) && is_fp8 {
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
        match (self.call.bug(), codes) {
            (Some(QuantizeBug::CodesTruncated), _) if is_fp8 => toward_zero,
            (Some(QuantizeBug::TiesAway), _) if is_fp8 => above(nearest),
            (Some(QuantizeBug::TiesAwayF32), _) if is_fp8 && self.is_unrounded_f32() => above(nearest),
            (Some(QuantizeBug::TiesToZero), _) if is_tie => toward_zero,
            (Some(QuantizeBug::SubnormalCodesFlushed), _) if is_fp8 && is_subnormal(codes, nearest) => nearest & 0x80,
            (Some(QuantizeBug::Fnuz), CodeType::E4m3) => nearest.wrapping_add(if nearest & 0x7f == 0 { 0 } else { 8 }),
            (Some(QuantizeBug::OverflowToNan), CodeType::E4m3) if overflows => nearest | 0x7f,
            (Some(QuantizeBug::OverflowToInfinity), CodeType::E5m2) if overflows => nearest + 1,
            (Some(QuantizeBug::E5m2At448), CodeType::E5m2) => codes.encode(quotient.clamp(-448.0, 448.0)),
            (Some(QuantizeBug::Int8Wraps), CodeType::Int8) => (quotient.round_ties_even() as i32) as u8,
            (Some(QuantizeBug::Int8Truncates), CodeType::Int8) => (quotient as i8).cast_unsigned(),
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
