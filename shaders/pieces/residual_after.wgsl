// A residual to which the result is added: math.md, equation (13).

// residual_out as stored. Zeros past the end of the row.
fn residual_after_put(row: u32, thread: u32, k: u32, normed: Pair, residual: Kept_R) -> Kept_R {
    let values = pair_R(residual);
    let lo = within(column(thread, k, 0u), values.lo + normed.lo);
    let sum = settled_R(kept_R(Pair(lo, within(column(thread, k, 1u), values.hi + normed.hi))));
    store_residual_out(row, thread, k, sum);
    return sum;
}
