// A chunk's sums are partial rows: those of the first gradient, then those of the second.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<vec4<f32>>;

// if HAS_GRADIENTS
fn hand_on(gradient: u32, chunk: u32, col: u32, sum: vec4<f32>) {
    let row = gradient * params.partial_rows + params.first_chunk + chunk;
    if (col >= params.cols) { return; }
    let at = (params.TENSOR + row * partial_stride() + col) >> 2u;
    if (params.accumulates == 0u) {
        TENSOR[at] = sum;
    } else {
        TENSOR[at] += sum;
    }
}
// end
// if HAS_ROW_SUMS
// mean_wdy_xhat and mean_wdy of a row.
fn averages_at(row: u32) -> vec2<f32> {
    let at = params.row_sums + 2u * row;
    let quad = TENSOR[at >> 2u];
    return select(quad.xy, quad.zw, (at & 2u) == 2u);
}
// end
