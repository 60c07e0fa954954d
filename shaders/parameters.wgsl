// Applies weight and bias to a pair of values, if present.

fn weighted(values: Pair, kept: Kept_W) -> Pair {
    if (!HAS_WEIGHT) { return values; }
    let weight = pair_W(kept);
    if (!HAS_WEIGHT_OFFSET) { return Pair(values.lo * weight.lo, values.hi * weight.hi); }
    return Pair(values.lo * (weight.lo + params.weight_offset), values.hi * (weight.hi + params.weight_offset));
}

fn biased(values: Pair, kept: Kept_W) -> Pair {
    if (!HAS_BIAS) { return values; }
    let bias = pair_W(kept);
    return Pair(values.lo + bias.lo, values.hi + bias.hi);
}
