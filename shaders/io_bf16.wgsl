// bf16: the upper half of an f32, two to a word.

alias Kept_bf16 = vec4<u32>;

fn lo_bf16(kept: Kept_bf16) -> vec2<u32> { return kept.xy; }
fn hi_bf16(kept: Kept_bf16) -> vec2<u32> { return kept.zw; }

fn quad_bf16(words: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
}

// To nearest even. NaN stays NaN, which only its bits can tell: compilers take `x != x` to be false.
fn words_bf16(values: vec4<f32>) -> vec2<u32> {
    let bits = bitcast<vec4<u32>>(values);
    let rounded = bits + vec4(0x7fffu) + ((bits >> vec4(16u)) & vec4(1u));
    let is_nan = (bits & vec4(0x7fffffffu)) > vec4(0x7f800000u);
    let half = select(rounded, vec4(0x7fff0000u), is_nan) >> vec4(16u);
    return half.xz | (half.yw << vec2(16u));
}
