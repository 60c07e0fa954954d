// Sums of dweight and dbias over rows with atomics: all chunks add to one row of each gradient, in
// the order of arrival.

// This loop ends: a failed exchange means that another thread succeeded, or is spurious and
// retried.
fn add(at: u32, value: f32) {
    var seen = atomicLoad(&workspace[at]);
    loop {
        let result = atomicCompareExchangeWeak(&workspace[at], seen, bitcast<u32>(bitcast<f32>(seen) + value));
        if (result.exchanged) { break; }
        seen = result.old_value;
    }
}

fn hand_on(gradient: u32, chunk: u32, col: u32, sum: vec4<f32>) {
    let at = PARTIALS + gradient * partial_stride() + col;
    if (col < params.cols) { add(at, sum.x); }
    if (col + 1u < params.cols) { add(at + 1u, sum.y); }
    if (col + 2u < params.cols) { add(at + 2u, sum.z); }
    if (col + 3u < params.cols) { add(at + 3u, sum.w); }
}
