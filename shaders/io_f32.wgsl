// f32: the bits unchanged.

struct Kept_f32 {
    lo: vec4<u32>,
    hi: vec4<u32>,
}

fn lo_f32(kept: Kept_f32) -> vec4<u32> { return kept.lo; }
fn hi_f32(kept: Kept_f32) -> vec4<u32> { return kept.hi; }
fn quad_f32(words: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(words); }
fn words_f32(values: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(values); }

fn kept_f32(pair: Pair) -> Kept_f32 {
    return Kept_f32(words_f32(pair.lo), words_f32(pair.hi));
}

fn pair_f32(kept: Kept_f32) -> Pair { return Pair(quad_f32(lo_f32(kept)), quad_f32(hi_f32(kept))); }

fn settled_f32(kept: Kept_f32) -> Kept_f32 { return kept; }

fn rounded_f32(values: vec4<f32>) -> vec4<f32> { return quad_f32(words_f32(values)); }
