// Shared by the forward programs. The normalized tensor h is x, or the rounded sum of x and a
// residual that is added before the norm. Its dtype is H: R with such a sum (T without a residual),
// or T with RESIDUAL_AFTER: math.md, (13) and (14).

// The addends of h, as held in registers.
struct Addends {
    x: Kept_T,
    residual: Kept_R,
}

fn load_addends(row: u32, thread: u32, k: u32) -> Addends {
    // Otherwise the residual is loaded when needed.
    if (RESIDUAL_AFTER && !IS_RESIDUAL_EARLY) { return Addends(load_x(row, thread, k), Kept_R()); }
    return Addends(load_x(row, thread, k), load_residual(row, thread, k));
}

// h as stored.
fn h_of(addends: Addends) -> Kept_H {
    if (!HAS_RESIDUAL || RESIDUAL_AFTER) { return x_as_H(addends.x); }
    let x = pair_T(addends.x);
    let residual = pair_R(addends.residual);
    return settled_H(kept_H(Pair(x.lo + residual.lo, x.hi + residual.hi)));
}

fn x_hat_of(h: vec4<f32>, mean: f32, rstd: f32) -> vec4<f32> {
    var x_hat = h;
    if (IS_LAYER) { x_hat -= mean; }
    x_hat *= rstd;
    if (IS_CAST_BEFORE_WEIGHT) { return rounded_T(x_hat); }
    return x_hat;
}

fn y_of(h: Kept_H, mean: f32, rstd: f32, weight: Kept_W, bias: Kept_W) -> Pair {
    let values = pair_H(h);
    let x_hat = Pair(x_hat_of(values.lo, mean, rstd), x_hat_of(values.hi, mean, rstd));
    return biased(weighted(x_hat, weight), bias);
}

// residual_out as stored: the sum of a residual and a norm. Zeros past the end of the row.
fn sum_after(thread: u32, k: u32, residual: Kept_R, normed: Pair) -> Kept_R {
    let values = pair_R(residual);
    let lo = within(column(thread, k, 0u), values.lo + normed.lo);
    return settled_R(kept_R(Pair(lo, within(column(thread, k, 1u), values.hi + normed.hi))));
}

fn write_y(row: u32, thread: u32, k: u32, h: Kept_H, residual: Kept_R, mean: f32, rstd: f32, weight: Kept_W, bias: Kept_W) {
    if (RESIDUAL_AFTER) {
        store_residual_out(row, thread, k, sum_after(thread, k, residual, y_of(h, mean, rstd, weight, bias)));
    } else {
        store_residual_out(row, thread, k, h_as_R(h));
        store_y(row, thread, k, kept_T(y_of(h, mean, rstd, weight, bias)));
    }
}
