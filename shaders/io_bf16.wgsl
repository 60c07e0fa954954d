// bf16: the upper half of an f32, two per word.

alias Kept_bf16 = vec4<u32>;

fn lo_bf16(kept: Kept_bf16) -> vec2<u32> { return kept.xy; }
fn hi_bf16(kept: Kept_bf16) -> vec2<u32> { return kept.zw; }

fn quad_bf16(words: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
}

// Rounds to nearest even. NaN is tested by its bits, because compilers may assume that `x != x` is
// false.
fn words_bf16(values: vec4<f32>) -> vec2<u32> {
    let bits = bitcast<vec4<u32>>(values);
    let rounded = rounded_bits_bf16(bits);
    return upper_bf16(select(rounded, vec4(0x7fff0000u), (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u)));
}

fn rounded_bits_bf16(bits: vec4<u32>) -> vec4<u32> {
    return bits + (vec4(0x7fffu) + ((bits >> vec4(16u)) & vec4(1u)));
}

// The upper halves, two per word.
fn upper_bf16(bits: vec4<u32>) -> vec2<u32> {
    return (bits.xz >> vec2(16u)) | (bits.yw & vec2(0xffff0000u));
}

// As `words_bf16`, with one NaN test for all eight values: their sum is NaN if one of them is, or
// if opposite infinities meet. Arithmetic limits the speed of 16-bit norms, not memory: a test per
// value made backward a tenth slower on an H200.
fn kept_bf16(pair: Pair) -> Kept_bf16 {
    if ((bitcast<u32>(total(pair.lo + pair.hi)) & 0x7fffffffu) > 0x7f800000u) {
        return Kept_bf16(words_bf16(pair.lo), words_bf16(pair.hi));
    }
    let lo = rounded_bits_bf16(bitcast<vec4<u32>>(pair.lo));
    let hi = rounded_bits_bf16(bitcast<vec4<u32>>(pair.hi));
    return Kept_bf16(upper_bf16(lo), upper_bf16(hi));
}

fn pair_bf16(kept: Kept_bf16) -> Pair { return Pair(quad_bf16(lo_bf16(kept)), quad_bf16(hi_bf16(kept))); }

fn settled_bf16(kept: Kept_bf16) -> Kept_bf16 { return kept; }

fn rounded_bf16(values: vec4<f32>) -> vec4<f32> { return quad_bf16(words_bf16(values)); }
