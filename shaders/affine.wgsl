// Normalized values, and the weight and bias of a pair.

struct RowStatistics {
    mean: f32,
    rstd: f32,
}

fn x_hat_of(h: vec4<f32>, statistics: RowStatistics) -> vec4<f32> {
    var x_hat = h;
    if (IS_LAYER) { x_hat -= statistics.mean; }
    if (IS_RSTD_CAST) { x_hat *= rounded_T(vec4(statistics.rstd)); } else { x_hat *= statistics.rstd; }
    if (IS_CAST_BEFORE_WEIGHT) { return rounded_T(x_hat); }
    return x_hat;
}

fn normalized(h: Pair, statistics: RowStatistics) -> Pair {
    return Pair(x_hat_of(h.lo, statistics), x_hat_of(h.hi, statistics));
}

fn weighted(values: Pair, kept: Kept_W) -> Pair {
    let weight = pair_W(kept);
    if (!HAS_WEIGHT_OFFSET) { return Pair(values.lo * weight.lo, values.hi * weight.hi); }
    return Pair(values.lo * (weight.lo + params.weight_offset), values.hi * (weight.hi + params.weight_offset));
}

fn biased(values: Pair, kept: Kept_W) -> Pair {
    let bias = pair_W(kept);
    return Pair(values.lo + bias.lo, values.hi + bias.hi);
}
