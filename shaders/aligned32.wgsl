// TENSOR: f32, rows that begin and end on 16 bytes. A quad in one access.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<vec4<u32>>;

// if IS_LOADED
fn load_quad_TENSOR(row: u32, col: u32) -> vec4<u32> {
    // if IS_WHOLE
    // else
    if (col >= params.cols) { return vec4<u32>(); }
    // end
    return TENSOR[at_TENSOR(row, col) >> 2u];
}
// end
// if IS_STORED
fn store_quad_TENSOR(row: u32, col: u32, words: vec4<u32>) {
    // if IS_WHOLE
    TENSOR[at_TENSOR(row, col) >> 2u] = words;
    // else
    if (col < params.cols) { TENSOR[at_TENSOR(row, col) >> 2u] = words; }
    // end
}
// end
