// Pairs of TENSOR, quad by quad.

// if IS_LOADED
fn load_TENSOR(row: u32, thread: u32, k: u32) -> Kept_DTYPE {
    return Kept_DTYPE(
        load_quad_TENSOR(row, column(thread, k, 0u)),
        load_quad_TENSOR(row, column(thread, k, 1u)),
    );
}
// end
// if IS_STORED
fn store_TENSOR(row: u32, thread: u32, k: u32, kept: Kept_DTYPE) {
    store_quad_TENSOR(row, column(thread, k, 0u), lo_DTYPE(kept));
    store_quad_TENSOR(row, column(thread, k, 1u), hi_DTYPE(kept));
}
// end
