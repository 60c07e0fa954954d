// Mean and rstd of a row, from the sums of its threads: math.md, equations (2) to (4).

// The thread's part of sum(h).
fn sum_of(h: Pair) -> f32 { return total(h.lo + h.hi); }

// The thread's part of sum((h - mean)^2) and, for layer norm, of sum(h - mean), which corrects the
// mean.
fn about_mean(thread: u32, k: u32, h: Pair, mean: f32) -> Sum {
    if (!IS_LAYER) { return sum_from(total(h.lo * h.lo + h.hi * h.hi), 0.0); }
    // Past the end h is 0, but h - mean is not.
    let lo = within(column(thread, k, 0u), h.lo - mean);
    let hi = within(column(thread, k, 1u), h.hi - mean);
    return sum_from(total(lo * lo + hi * hi), total(lo + hi));
}

// A first mean, from the threads' parts of sum(h). It must be one value in all its uses and in all
// threads of the row. A compiler may contract a product into one use and not into another, so each
// part is multiplied before the sum, and the product goes through an integer sum: `params.zero` is 0,
// but the compiler cannot know that, and sees no product in what follows.
fn first_mean(part: f32, lane: u32) -> f32 {
    let share_of_part = bitcast<f32>(bitcast<u32>(part * params.share) + params.zero);
    return sum_parts(sum_threads(sum_from(share_of_part, 0.0), lane)).x;
}

// Mean and rstd, from the threads' sums about a first mean: math.md, 5.1.
fn statistics_of(mean: f32, about: Sum, lane: u32) -> RowStatistics {
    let sums = sum_parts(sum_threads(about, lane));
    if (IS_CLAMPED) { return RowStatistics(0.0, inverseSqrt(max(sums.x, params.eps))); }
    if (!IS_LAYER) { return RowStatistics(0.0, inverseSqrt(sums.x * params.share + params.eps)); }
    let missed = sums.y * params.share;
    // Rounding may make it negative.
    let squares = max(sums.x - sums.y * missed, 0.0);
    return RowStatistics(mean + missed, inverseSqrt(squares * params.share + params.eps));
}

// Moments of a thread's values so far, about a center near their mean: their count, the sum of
// differences from the center, and the sum of their squares. math.md, section 9.
struct Moments {
    count: f32,
    center: f32,
    rest: f32,
    squares: f32,
}

// The same moments about another center.
fn moved_to(center: f32, moments: Moments) -> Moments {
    let step = moments.center - center;
    let squares = moments.squares + step * (2.0 * moments.rest + moments.count * step);
    return Moments(moments.count, center, moments.rest + moments.count * step, squares);
}

// Adds a pair and moves the center to the new mean. No correction exceeds half of the squares that
// it is subtracted from, so nothing cancels. `rest` holds the difference between mean and center.
fn with_pair(moments: Moments, thread: u32, k: u32, h: Pair) -> Moments {
    let added = f32(columns_of(thread, k));
    if (added == 0.0) { return moments; }
    var center = moments.center;
    if (moments.count == 0.0) { center = sum_of(h) / added; }
    let lo = within(column(thread, k, 0u), h.lo - center);
    let hi = within(column(thread, k, 1u), h.hi - center);
    let count = moments.count + added;
    let rest = moments.rest + total(lo + hi);
    return moved_to(center + rest / count, Moments(count, center, rest, moments.squares + total(lo * lo + hi * hi)));
}

// The moments of both sets of values.
fn merged(one: Moments, other: Moments) -> Moments {
    if (one.count == 0.0) { return other; }
    if (other.count == 0.0) { return one; }
    let count = one.count + other.count;
    let center = one.center + (other.center - one.center) * (other.count / count);
    let a = moved_to(center, one);
    let b = moved_to(center, other);
    return Moments(count, center, a.rest + b.rest, a.squares + b.squares);
}

// The thread's part of sum(h).
fn sum_of_moments(moments: Moments) -> f32 { return moments.count * moments.center + moments.rest; }

// The thread's part of the sums about a mean.
fn moments_about(mean: f32, moments: Moments) -> Sum {
    let moved = moved_to(mean, moments);
    return sum_from(max(moved.squares, 0.0), moved.rest);
}

// A thread's sums of a first visit to its part of a row that streams, from which the mean follows:
// moments if it is the only visit, else the values, or the squares of RMS norm.
struct Visit {
    moments: Moments,
    sum: f32,
    about: Sum,
}

fn visited(visit: Visit, thread: u32, k: u32, h: Pair) -> Visit {
    if (IS_VISITED_ONCE) { return Visit(with_pair(visit.moments, thread, k, h), 0.0, Sum()); }
    if (IS_LAYER) { return Visit(Moments(), visit.sum + sum_of(h), Sum()); }
    return Visit(Moments(), 0.0, visit.about + about_mean(thread, k, h, 0.0));
}

fn joined(one: Visit, other: Visit) -> Visit {
    if (IS_VISITED_ONCE) { return Visit(merged(one.moments, other.moments), 0.0, Sum()); }
    return Visit(Moments(), one.sum + other.sum, one.about + other.about);
}

fn mean_of(visit: Visit, lane: u32) -> f32 {
    if (IS_VISITED_ONCE) { return first_mean(sum_of_moments(visit.moments), lane); }
    if (IS_LAYER) { return first_mean(visit.sum, lane); }
    return 0.0;
}

fn about_of(visit: Visit, mean: f32) -> Sum {
    if (IS_VISITED_ONCE) { return moments_about(mean, visit.moments); }
    return visit.about;
}
