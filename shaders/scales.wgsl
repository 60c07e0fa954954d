// Scales from the amax of the values that share one: math.md, equations (Q3) and (Q4).

struct Scale {
    value: f32,
    power: f32, // elements are multiplied with power, then with reciprocal
    reciprocal: f32,
    byte: u32, // set for BYTE_UP and BYTE_FLOOR
}

// The byte of the smallest power of two that is at least amax / Q, for finite amax: the difference
// of their exponents, plus one if amax has the larger significand.
fn power_not_below(amax: u32) -> u32 {
    let is_larger = (amax & 0x007fffffu) > (LARGEST_CODE_BITS & 0x007fffffu);
    let exponent = (amax >> 23u) + 127u + select(0u, 1u, is_larger);
    return max(exponent, LARGEST_CODE_BITS >> 23u) - (LARGEST_CODE_BITS >> 23u);
}

// (Q3) and (Q4).
fn scale_of(magnitude: u32) -> Scale {
    var amax = magnitude;
    if (amax <= 0x7f800000u) { amax = clamp(amax, params.amax_floor, params.amax_ceiling); }
    let is_finite = amax < 0x7f800000u;
    var scale = Scale(1.0, 1.0, 1.0, 0u);
    if (SCALE_FORM == QUOTIENT) {
        if (amax > 0u) { scale.value = max(bitcast<f32>(amax) * (1.0 / LARGEST_CODE), LEAST_SCALE); }
        if (!is_finite) { scale.value = bitcast<f32>(amax); }
        scale.reciprocal = 1.0 / scale.value;
        return scale;
    }
    var byte = power_not_below(amax);
    if (SCALE_FORM == BYTE_FLOOR) {
        let exponent = (LARGEST_CODE_BITS >> 23u) - 127u;
        byte = max(amax >> 23u, exponent) - exponent;
    }
    if (SCALE_FORM == POWER) {
        byte = select(max(byte, 1u), 127u, amax == 0u);
        scale.value = bitcast<f32>(select(amax, byte << 23u, is_finite));
    } else if (!is_finite) {
        byte = select(255u, 254u, amax == 0x7f800000u);
    }
    scale.byte = byte;
    // Exact. If the byte means infinity or NaN, codes are unspecified: the reciprocal is not a
    // normal number.
    scale.reciprocal = bitcast<f32>((254u - min(byte, 254u)) << 23u);
    return scale;
}
