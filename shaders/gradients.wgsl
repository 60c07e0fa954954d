// Shared by the backward programs: the terms of math.md, equations (7) to (12), for one pair. A Sum
// is sum(wdy * x_hat) and, for layer norm, sum(wdy).

struct Terms {
    x_hat: Pair,
    dy: Pair,
    wdy: Pair,
}

fn terms_of(thread: u32, k: u32, held: Held_0, weight: Kept_W, row: RowStatistics) -> Terms {
    let values = NORMALIZED;
    let dy = pull_after(held);
    if (!IS_LAYER) { return Terms(Pair(values.lo * row.rstd, values.hi * row.rstd), dy, pull_weight(dy, weight)); }
    // Past the end dy is 0, but x_hat may overflow.
    let lo = within(column(thread, k, 0u), (values.lo - row.mean) * row.rstd);
    let hi = within(column(thread, k, 1u), (values.hi - row.mean) * row.rstd);
    return Terms(Pair(lo, hi), dy, pull_weight(dy, weight));
}

// The thread's part of the row's sums.
fn sums_of(terms: Terms) -> Sum {
    let products = total(terms.wdy.lo * terms.x_hat.lo + terms.wdy.hi * terms.x_hat.hi);
    return sum_from(products, total(terms.wdy.lo + terms.wdy.hi));
}

// mean_wdy_xhat and mean_wdy.
fn averages_of(sums: Sum, rstd: f32) -> vec2<f32> { return unless_clamped(sum_parts(sums * params.share), rstd); }

fn dx_of(wdy: vec4<f32>, x_hat: vec4<f32>, rstd: f32, c: vec2<f32>) -> vec4<f32> {
    return rstd * ((wdy - c.y) - x_hat * c.x);
}

fn dx_pair_of(terms: Terms, rstd: f32, c: vec2<f32>) -> Pair {
    return Pair(dx_of(terms.wdy.lo, terms.x_hat.lo, rstd, c), dx_of(terms.wdy.hi, terms.x_hat.hi, rstd, c));
}

fn plus(a: Pair, b: Pair) -> Pair { return Pair(a.lo + b.lo, a.hi + b.hi); }

fn times(a: Pair, b: Pair) -> Pair { return Pair(a.lo * b.lo, a.hi * b.hi); }
