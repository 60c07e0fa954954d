// f16, two per word. Uses the device's conversions if `check_f16.wgsl` found them correct,
// otherwise integer arithmetic, because WGSL's conversions may flush subnormals and round in either
// direction. Shorter code handles a quad without subnormals, and a pair with normal numbers only.

alias Kept_f16 = vec4<u32>;

fn lo_f16(kept: Kept_f16) -> vec2<u32> { return kept.xy; }
fn hi_f16(kept: Kept_f16) -> vec2<u32> { return kept.zw; }

fn quad_f16(words: vec2<u32>) -> vec4<f32> {
    if (CONVERTS_F16) { return unpack_f16(words); }
    if (HAS_UNPACK) {
        // Adding 0x7fff to a half's magnitude sets bit 15 for magnitudes from 1 on; adding 0x7c00
        // sets it from the first normal number on.
        let magnitudes = words & vec2(0x7fff7fffu);
        let is_subnormal = (magnitudes + vec2(0x7fff7fffu)) & ~(magnitudes + vec2(0x7c007c00u)) & vec2(0x80008000u);
        if ((is_subnormal.x | is_subnormal.y) == 0u) { return unpack_f16(words); }
    }
    let half = vec4(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
    let sign = (half & vec4(0x8000u)) << vec4(16u);
    let magnitude = half & vec4(0x7fffu);
    // Exponents 1 to 30 get f32's bias; 31 (infinity, NaN) becomes 255.
    let rebias = select(vec4(0x38000000u), vec4(0x70000000u), magnitude >= vec4(0x7c00u));
    let normal = (magnitude << vec4(13u)) + rebias;
    // Exponent 0: the mantissa counts steps of 2^-24, which are exact and normal in f32.
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 5.9604644775390625e-8);
    return bitcast<vec4<f32>>(select(normal, subnormal, magnitude < vec4(0x400u)) | sign);
}

// Rounds to nearest even.
fn words_f16(values: vec4<f32>) -> vec2<u32> {
    if (CONVERTS_F16) { return pack_f16(values); }
    let bits = bitcast<vec4<u32>>(values);
    let magnitude = bits & vec4(0x7fffffffu);
    // Subnormal results: the mantissa with its leading bit, shifted right by 126 - exponent.
    let shift = clamp(vec4(126u) - (magnitude >> vec4(23u)), vec4(1u), vec4(31u));
    let mantissa = (magnitude & vec4(0x7fffffu)) | vec4(0x800000u);
    let kept = mantissa >> shift;
    let rest = mantissa - (kept << shift);
    let tie = vec4(1u) << (shift - vec4(1u));
    let is_up = (rest > tie) | ((rest == tie) & ((kept & vec4(1u)) == vec4(1u)));
    let subnormal = kept + select(vec4(0u), vec4(1u), is_up);
    var half = select(normal_f16(magnitude), subnormal, magnitude < vec4(0x38800000u));
    half = select(half, vec4(0x7c00u), magnitude >= vec4(0x47800000u));
    half = select(half, vec4(0x7e00u), magnitude > vec4(0x7f800000u));
    return signed_f16(half, bits);
}

// Normal results: f16's bias, rounded at bit 13. A carry past 65504 yields infinity.
fn normal_f16(magnitude: vec4<u32>) -> vec4<u32> {
    return (magnitude - vec4(0x38000000u) + vec4(0xfffu) + ((magnitude >> vec4(13u)) & vec4(1u))) >> vec4(13u);
}

// Adds the signs of the f32 values; two halves per word.
fn signed_f16(half: vec4<u32>, bits: vec4<u32>) -> vec2<u32> {
    let signs = ((bits.xz >> vec2(16u)) & vec2(0x8000u)) | (bits.yw & vec2(0x80000000u));
    return half.xz | (half.yw << vec2(16u)) | signs;
}

fn kept_f16(pair: Pair) -> Kept_f16 {
    if (CONVERTS_F16) { return Kept_f16(pack_f16(pair.lo), pack_f16(pair.hi)); }
    let lo = bitcast<vec4<u32>>(pair.lo);
    let hi = bitcast<vec4<u32>>(pair.hi);
    let lo_magnitude = lo & vec4(0x7fffffffu);
    let hi_magnitude = hi & vec4(0x7fffffffu);
    // From 2^-14 to below 65536: smaller magnitudes wrap to large values.
    let above = max(lo_magnitude - vec4(0x38800000u), hi_magnitude - vec4(0x38800000u));
    if (max(max(above.x, above.y), max(above.z, above.w)) >= 0x0f000000u) {
        return Kept_f16(words_f16(pair.lo), words_f16(pair.hi));
    }
    return Kept_f16(signed_f16(normal_f16(lo_magnitude), lo), signed_f16(normal_f16(hi_magnitude), hi));
}

fn pair_f16(kept: Kept_f16) -> Pair { return Pair(quad_f16(lo_f16(kept)), quad_f16(hi_f16(kept))); }

// Prevents the compiler from optimizing away a conversion to f16 and back, which rounds: it cannot
// know that the words are unchanged.
fn settled_f16(kept: Kept_f16) -> Kept_f16 {
    if (CONVERTS_F16) { return kept | vec4(unknown_zero()); }
    return kept;
}

fn rounded_f16(values: vec4<f32>) -> vec4<f32> {
    return quad_f16(lo_f16(settled_f16(Kept_f16(words_f16(values), vec2(0u)))));
}
