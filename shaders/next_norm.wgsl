// The next norm, of the rounded sum of a residual and a norm: math.md, equation (14).

// As in parameters.wgsl, with the weight and bias of the next norm.
fn next_weighted(values: Pair, kept: Kept_W) -> Pair {
    if (!HAS_NEXT_WEIGHT) { return values; }
    let weight = pair_W(kept);
    if (!HAS_WEIGHT_OFFSET) { return Pair(values.lo * weight.lo, values.hi * weight.hi); }
    return Pair(values.lo * (weight.lo + params.weight_offset), values.hi * (weight.hi + params.weight_offset));
}

fn next_biased(values: Pair, kept: Kept_W) -> Pair {
    if (!HAS_NEXT_BIAS) { return values; }
    let bias = pair_W(kept);
    return Pair(values.lo + bias.lo, values.hi + bias.hi);
}

fn write_next_y(row: u32, thread: u32, k: u32, sum: Kept_R, mean: f32, rstd: f32, weight: Kept_W, bias: Kept_W) {
    let values = pair_R(sum);
    let x_hat = Pair(x_hat_of(values.lo, mean, rstd), x_hat_of(values.hi, mean, rstd));
    store_y(row, thread, k, kept_T(next_biased(next_weighted(x_hat, weight), bias)));
}

fn write_next_statistics(row: u32, thread: u32, statistics: RowStatistics) {
    if (thread > 0u) { return; }
    store_next_mean(row, statistics.mean);
    store_next_rstd(row, statistics.rstd);
}
