// A matrix whose activation is multiplied with x before the norm, or with the norm's result: math.md,
// equations (19) to (21).

// sigmoid(z) and sigmoid(-z), which is 1 - sigmoid(z) without its cancellation.
struct Sigmoids { plus: vec4<f32>, minus: vec4<f32> }

// By exp(-|z|), which is at most 1: nothing overflows, and a small result has all its digits.
fn sigmoids(z: vec4<f32>) -> Sigmoids {
    let e = exp(-abs(z));
    let larger = 1.0 / (1.0 + e);
    let smaller = e * larger;
    let is_positive = z >= vec4(0.0);
    return Sigmoids(select(smaller, larger, is_positive), select(larger, smaller, is_positive));
}

fn activated(z: vec4<f32>) -> vec4<f32> {
    let sigmoid = sigmoids(z);
    if (IS_SILU) { return z * sigmoid.plus; }
    return sigmoid.plus;
}

fn slope_of(z: vec4<f32>) -> vec4<f32> {
    let sigmoid = sigmoids(z);
    if (IS_SILU) { return sigmoid.plus * (1.0 + z * sigmoid.minus); }
    return sigmoid.plus * sigmoid.minus;
}

// The gated values; from the gradient of these, the gradient of the values.
fn gate_put(values: Pair, gate: Kept_T) -> Pair {
    let z = pair_T(gate);
    return Pair(values.lo * activated(z.lo), values.hi * activated(z.hi));
}

// The norm's result is rounded as a chain of operations stores it.
fn gate_after_put(values: Pair, gate: Kept_T) -> Pair {
    if (!IS_CAST_BEFORE_WEIGHT) { return gate_put(values, gate); }
    return gate_put(Pair(rounded_W(values.lo), rounded_W(values.hi)), gate);
}

// The gradient of the gate, from the gradient of the gated values.
fn gate_pull(gradient: Pair, values: Pair, gate: Kept_T) -> Pair {
    let z = pair_T(gate);
    return Pair(gradient.lo * values.lo * slope_of(z.lo), gradient.hi * values.hi * slope_of(z.hi));
}
