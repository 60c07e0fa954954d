// A residual that is added to x. The sum is rounded and stored; the gradient that arrives for it is
// added to dx: math.md, equations (1) and (10).

fn residual_put(x: Pair, residual: Kept_R) -> Pair {
    let values = pair_R(residual);
    return Pair(x.lo + values.lo, x.hi + values.hi);
}

fn residual_pull(dx: Pair, dresidual_out: Kept_R) -> Pair { return residual_put(dx, dresidual_out); }
