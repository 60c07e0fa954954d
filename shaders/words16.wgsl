// TENSOR: 16-bit, rows that begin and end on 4 bytes. One word in one access.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<u32>;

// if IS_LOADED
fn load_word_TENSOR(row: u32, col: u32) -> u32 {
    if (col >= params.cols) { return 0u; }
    return TENSOR[at_TENSOR(row, col) >> 1u];
}

fn load_quad_TENSOR(row: u32, col: u32) -> vec2<u32> {
    return vec2(load_word_TENSOR(row, col), load_word_TENSOR(row, col + 2u));
}
// end
// if IS_STORED
fn store_word_TENSOR(row: u32, col: u32, word: u32) {
    if (col < params.cols) { TENSOR[at_TENSOR(row, col) >> 1u] = word; }
}

fn store_quad_TENSOR(row: u32, col: u32, words: vec2<u32>) {
    store_word_TENSOR(row, col, words.x);
    store_word_TENSOR(row, col + 2u, words.y);
}
// end
