// Pairs of a dtype: as they wait in registers, and as values.

fn pair_DTYPE(kept: Kept_DTYPE) -> Pair {
    return Pair(quad_DTYPE(lo_DTYPE(kept)), quad_DTYPE(hi_DTYPE(kept)));
}

fn rounded_DTYPE(values: vec4<f32>) -> vec4<f32> { return quad_DTYPE(words_DTYPE(values)); }
