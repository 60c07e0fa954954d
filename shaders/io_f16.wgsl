// f16 by integer arithmetic, two to a word: WGSL's own conversions may flush subnormals and round either way.

alias Kept_f16 = vec4<u32>;

fn lo_f16(kept: Kept_f16) -> vec2<u32> { return kept.xy; }
fn hi_f16(kept: Kept_f16) -> vec2<u32> { return kept.zw; }

fn quad_f16(words: vec2<u32>) -> vec4<f32> {
    let half = vec4(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
    let sign = (half & vec4(0x8000u)) << vec4(16u);
    let magnitude = half & vec4(0x7fffu);
    // Exponents 1 to 30 get f32's bias; 31, infinity and NaN, becomes 255.
    let rebias = select(vec4(0x38000000u), vec4(0x70000000u), magnitude >= vec4(0x7c00u));
    let normal = (magnitude << vec4(13u)) + rebias;
    // Exponent 0: the mantissa counts 2^-24, which is exact, and normal in f32.
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 5.9604644775390625e-8);
    return bitcast<vec4<f32>>(select(normal, subnormal, magnitude < vec4(0x400u)) | sign);
}

// To nearest even.
fn words_f16(values: vec4<f32>) -> vec2<u32> {
    let bits = bitcast<vec4<u32>>(values);
    let sign = (bits >> vec4(16u)) & vec4(0x8000u);
    let magnitude = bits & vec4(0x7fffffffu);
    // Normal results: f16's bias, rounded at bit 13. A carry past 65504 gives infinity by itself.
    let normal = (magnitude - vec4(0x38000000u) + vec4(0xfffu) + ((magnitude >> vec4(13u)) & vec4(1u))) >> vec4(13u);
    // Subnormal results: the mantissa with its leading bit, moved right by 126 - exponent.
    let shift = clamp(vec4(126u) - (magnitude >> vec4(23u)), vec4(1u), vec4(31u));
    let mantissa = (magnitude & vec4(0x7fffffu)) | vec4(0x800000u);
    let kept = mantissa >> shift;
    let rest = mantissa - (kept << shift);
    let tie = vec4(1u) << (shift - vec4(1u));
    let is_up = (rest > tie) | ((rest == tie) & ((kept & vec4(1u)) == vec4(1u)));
    var half = select(normal, kept + select(vec4(0u), vec4(1u), is_up), magnitude < vec4(0x38800000u));
    half = select(half, vec4(0x7c00u), magnitude >= vec4(0x47800000u));
    half = select(half, vec4(0x7e00u), magnitude > vec4(0x7f800000u)) | sign;
    return half.xz | (half.yw << vec2(16u));
}
