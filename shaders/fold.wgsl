// Sums of dweight and dbias over the rows of a workgroup: adds the sums of its row groups in a
// tree.

// One unused element if a workgroup has one row group.
var<workgroup> folded: array<vec4<f32>, FOLDED>;

// Every thread of the workgroup must call this. The first row group gets the total.
fn fold(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var sum = value;
    if (IS_FOLDED) {
        for (var half = WORKGROUP / THREADS_PER_ROW / 2u; half > 0u; half /= 2u) {
            folded[lane] = sum;
            workgroupBarrier();
            if (lane < half * THREADS_PER_ROW) { sum += folded[lane + half * THREADS_PER_ROW]; }
            workgroupBarrier();
        }
    }
    return sum;
}

// Stores the sums of a pair of a gradient: 0 is the first requested gradient.
fn hand_on_pair(gradient: u32, chunk: u32, k: u32, sum: Pair, lane: u32) {
    let lo = fold(sum.lo, lane);
    let hi = fold(sum.hi, lane);
    if (lane >= THREADS_PER_ROW) { return; }
    hand_on(gradient, chunk, column(lane, k, 0u), lo);
    hand_on(gradient, chunk, column(lane, k, 1u), hi);
}
