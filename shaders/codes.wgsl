// Converts f32 to 8-bit codes, four per word, the first in the lowest byte. math.md, equation (Q5).
//
// Uses integer arithmetic, because WGSL may round a sum of floats in either direction.

// The codes of a pair.
alias Kept_codes = vec2<u32>;

fn lo_codes(kept: Kept_codes) -> u32 { return kept.x; }
fn hi_codes(kept: Kept_codes) -> u32 { return kept.y; }

// The highest bytes of four words.
fn highest_bytes(words: vec4<u32>) -> u32 {
    return (words.x >> 24u) | ((words.y >> 16u) & 0xff00u) | ((words.z >> 8u) & 0xff0000u) | (words.w & 0xff000000u);
}

// Rounds to nearest even, in [-128, 127]. NaN, which has no code, becomes 0.
fn quad_int8(values: vec4<f32>) -> u32 {
    let is_nan = (bitcast<vec4<u32>>(values) & vec4(0x7fffffffu)) > vec4(0x7f800000u);
    let inside = clamp(select(values, vec4(0.0), is_nan), vec4(-128.0), vec4(127.0));
    return highest_bytes(bitcast<vec4<u32>>(vec4<i32>(round(inside))) << vec4(24u));
}

// Values rounded at the last bit of a code, minus the smallest normal code, as the halves of two
// words: values 0 and 2, and values 1 and 3. A half has the sign, zeros, and the code if it is a
// normal code. Smaller or larger values reach into the zeros.
fn halves_of(values: vec4<f32>) -> vec2<u32> {
    const HALF_LESS_NORMAL = (1u << (CODE_SHIFT - 1u)) - 1u - (CODE_MIN_EXPONENT << 23u);
    let bits = bitcast<vec4<u32>>(values);
    let rounded = bits + (vec4(HALF_LESS_NORMAL) + ((bits >> vec4(CODE_SHIFT)) & vec4(1u)));
    return (rounded.xy >> vec2(16u)) | (rounded.zw & vec2(0xffff0000u));
}

// Sets the highest bit of a half that is not a normal code or exceeds the largest code.
fn beyond_normal(halves: vec2<u32>) -> vec2<u32> {
    const MOST = (((LARGEST_CODE_BITS >> CODE_SHIFT) - ((CODE_MIN_EXPONENT << 23u) >> CODE_SHIFT) + 1u) << (CODE_SHIFT - 16u)) - 1u;
    return (halves & vec2(0x7fff7fffu)) + vec2((0x7fffu - MOST) * 0x10001u);
}

// Halves of normal codes as four bytes.
fn quad_normal(halves: vec2<u32>) -> u32 {
    const LEAST_NORMAL = 1u << (23u - CODE_SHIFT);
    let signed = (halves << vec2(24u - CODE_SHIFT)) | (halves & vec2(0x80008000u));
    return (((signed.x >> 8u) & 0x00ff00ffu) | (signed.y & 0xff00ff00u)) + LEAST_NORMAL * 0x01010101u;
}

// Any value. Below the normal codes, a code is its number of steps, which `round` computes exactly.
fn quad_any(values: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(values);
    let inside = min(bits & vec4(0x7fffffffu), vec4(LARGEST_CODE_BITS));
    let steps = vec4<u32>(round(bitcast<vec4<f32>>(inside) * CODE_STEPS));
    let rounded = inside + (vec4((1u << (CODE_SHIFT - 1u)) - 1u) + ((inside >> vec4(CODE_SHIFT)) & vec4(1u)));
    let normal = (rounded >> vec4(CODE_SHIFT)) - vec4(CODE_BIAS);
    var code = select(normal, steps, inside < vec4(CODE_MIN_EXPONENT << 23u));
    code = select(code, vec4(0x7fu), (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u));
    return highest_bytes((code << vec4(24u)) | (bits & vec4(0x80000000u)));
}

// One test for all four values, then six instructions or so for each: arithmetic limits the speed
// here, not memory.
fn quad_codes(values: vec4<f32>) -> u32 {
    if (IS_INT8) { return quad_int8(values); }
    let halves = halves_of(values);
    let beyond = beyond_normal(halves);
    if (((beyond.x | beyond.y) & 0x80008000u) != 0u) { return quad_any(values); }
    return quad_normal(halves);
}

fn kept_codes(pair: Pair) -> Kept_codes { return Kept_codes(quad_codes(pair.lo), quad_codes(pair.hi)); }
