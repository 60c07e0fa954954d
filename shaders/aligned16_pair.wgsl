// TENSOR: 16-bit, rows that begin and end on 16 bytes. Both quads of a pair in one access.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<vec4<u32>>;

// if IS_LOADED
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE {
    let col = column(thread, k, 0u);
    // if IS_WHOLE
    // else
    if (col >= params.cols) { return Kept_DTYPE(); }
    // end
    return TENSOR[at_TENSOR(row, col) >> 3u];
}
// end
// if IS_STORED
fn store_TENSOR(row: u32, thread: u32, k: u32, kept: Kept_DTYPE) {
    let col = column(thread, k, 0u);
    // if IS_WHOLE
    TENSOR[at_TENSOR(row, col) >> 3u] = kept;
    // else
    if (col < params.cols) { TENSOR[at_TENSOR(row, col) >> 3u] = kept; }
    // end
}
// end
