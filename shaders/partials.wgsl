// The first phase's sums of dweight and dbias over rows: the sums of a chunk are partial rows,
// first of the first gradient, then of the second.

fn hand_on(gradient: u32, chunk: u32, col: u32, sum: vec4<f32>) {
    let row = gradient * params.partial_rows + params.first_chunk + chunk;
    if (col >= params.cols) { return; }
    let at = (PARTIALS + row * partial_stride() + col) >> 2u;
    if (params.accumulates == 0u) {
        workspace[at] = sum;
    } else {
        workspace[at] += sum;
    }
}
