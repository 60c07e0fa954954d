// What the forward programs share. H is the dtype of what is normalized: x, or the rounded sum with the residual.

alias Sum = f32;

// if IS_IN_PLACE
fn load_x(row: u32, thread: u32, k: u32) -> Kept_T { return load_y(row, thread, k); }
// if HAS_RESIDUAL
fn load_residual(row: u32, thread: u32, k: u32) -> Kept_R { return load_residual_out(row, thread, k); }
// end
// end

// What h is made of, as it waits in registers, and h as it is stored.
// if HAS_RESIDUAL
struct Addends {
    x: Kept_T,
    residual: Kept_R,
}
fn load_addends(row: u32, thread: u32, k: u32) -> Addends {
    return Addends(load_x(row, thread, k), load_residual(row, thread, k));
}
fn h_of(addends: Addends) -> Kept_R {
    let x = pair_T(addends.x);
    let residual = pair_R(addends.residual);
    return kept_R(Pair(x.lo + residual.lo, x.hi + residual.hi));
}
// else
alias Addends = Kept_T;
fn load_addends(row: u32, thread: u32, k: u32) -> Addends { return load_x(row, thread, k); }
fn h_of(x: Kept_T) -> Kept_T { return x; }
// end

// The thread's part of sum(h).
fn sum_of(h: Pair) -> f32 { return total(h.lo + h.hi); }

// The thread's part of sum((h - mean)^2).
fn squares_of(thread: u32, k: u32, h: Pair, mean: f32) -> f32 {
    // if IS_LAYER
    // Past the end h is 0, which is not 0 once centred.
    let lo = within(column(thread, k, 0u), h.lo - mean);
    let hi = within(column(thread, k, 1u), h.hi - mean);
    return total(lo * lo + hi * hi);
    // else
    return total(h.lo * h.lo + h.hi * h.hi);
    // end
}

fn x_hat_of(h: vec4<f32>, mean: f32, rstd: f32) -> vec4<f32> {
    // if IS_LAYER
    let x_hat = (h - mean) * rstd;
    // else
    let x_hat = h * rstd;
    // end
    // if IS_CAST_BEFORE_WEIGHT
    return rounded_T(x_hat);
    // else
    return x_hat;
    // end
}

fn write_y(row: u32, thread: u32, k: u32, h: Kept_H, mean: f32, rstd: f32, weight: Weight, bias: Bias) {
    let values = pair_H(h);
    let x_hat = Pair(x_hat_of(values.lo, mean, rstd), x_hat_of(values.hi, mean, rstd));
    // if HAS_RESIDUAL_OUT
    store_residual_out(row, thread, k, h);
    // end
    store_y(row, thread, k, kept_T(biased(weighted(x_hat, weight), bias)));
}

fn write_statistics(row: u32, thread: u32, mean: f32, rstd: f32) {
    if (thread > 0u) { return; }
    // if HAS_MEAN
    store_mean(row, mean);
    // end
    // if HAS_RSTD
    store_rstd(row, rstd);
    // end
}
