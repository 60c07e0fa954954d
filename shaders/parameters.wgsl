// Weight and bias of a pair: as they wait in registers, and what they do. Nothing where there is none.

// if HAS_WEIGHT
alias Weight = Kept_W;
fn load_weight_pair(thread: u32, k: u32) -> Weight { return load_weight(0u, thread, k); }
// else
alias Weight = bool;
fn load_weight_pair(thread: u32, k: u32) -> Weight { return false; }
// end

fn weighted(values: Pair, kept: Weight) -> Pair {
    // if HAS_WEIGHT
    let weight = pair_W(kept);
    // if HAS_WEIGHT_OFFSET
    return Pair(values.lo * (weight.lo + params.weight_offset), values.hi * (weight.hi + params.weight_offset));
    // else
    return Pair(values.lo * weight.lo, values.hi * weight.hi);
    // end
    // else
    return values;
    // end
}

// if HAS_BIAS
alias Bias = Kept_W;
fn load_bias_pair(thread: u32, k: u32) -> Bias { return load_bias(0u, thread, k); }
// else
alias Bias = bool;
fn load_bias_pair(thread: u32, k: u32) -> Bias { return false; }
// end

fn biased(values: Pair, kept: Bias) -> Pair {
    // if HAS_BIAS
    let bias = pair_W(kept);
    return Pair(values.lo + bias.lo, values.hi + bias.hi);
    // else
    return values;
    // end
}
