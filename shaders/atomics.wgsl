// Chunks add their sums to one row of each gradient, in the order in which they come.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<atomic<u32>>;

// Ends: the exchange fails spuriously, or because that of another thread has not.
fn add(at: u32, value: f32) {
    var seen = atomicLoad(&TENSOR[at]);
    loop {
        let result = atomicCompareExchangeWeak(&TENSOR[at], seen, bitcast<u32>(bitcast<f32>(seen) + value));
        if (result.exchanged) { break; }
        seen = result.old_value;
    }
}

fn hand_on(gradient: u32, chunk: u32, col: u32, sum: vec4<f32>) {
    let at = params.TENSOR + gradient * partial_stride() + col;
    if (col < params.cols) { add(at, sum.x); }
    if (col + 1u < params.cols) { add(at + 1u, sum.y); }
    if (col + 2u < params.cols) { add(at + 2u, sum.z); }
    if (col + 3u < params.cols) { add(at + 3u, sum.w); }
}
// if HAS_ROW_SUMS

// mean_wdy_xhat and mean_wdy of a row.
fn averages_at(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * row;
    return vec2(bitcast<f32>(atomicLoad(&TENSOR[at])), bitcast<f32>(atomicLoad(&TENSOR[at + 1u])));
}
// end
