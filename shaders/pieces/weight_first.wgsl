// The weight before the norm: math.md, equations (24) and (25).

// h, rounded to the dtype of x.
fn weight_first_put(x: Pair, weight: Kept_W) -> Pair {
    let h = weighted(x, weight);
    return Pair(rounded_T(h.lo), rounded_T(h.hi));
}

// A row's terms of dweight, from the gradient of h. Zeros past the end of the row.
fn weight_first_terms(thread: u32, k: u32, dh: Pair, x: Pair) -> Pair {
    return Pair(within(column(thread, k, 0u), dh.lo * x.lo), within(column(thread, k, 1u), dh.hi * x.hi));
}
