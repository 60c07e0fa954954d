// TENSOR: f32, anywhere. One element in one access.
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<u32>;

// if IS_LOADED
fn load_word_TENSOR(row: u32, col: u32) -> u32 {
    if (col >= params.cols) { return 0u; }
    return TENSOR[at_TENSOR(row, col)];
}

fn load_quad_TENSOR(row: u32, col: u32) -> vec4<u32> {
    return vec4(
        load_word_TENSOR(row, col), load_word_TENSOR(row, col + 1u),
        load_word_TENSOR(row, col + 2u), load_word_TENSOR(row, col + 3u),
    );
}
// end
// if IS_STORED
fn store_word_TENSOR(row: u32, col: u32, word: u32) {
    if (col < params.cols) { TENSOR[at_TENSOR(row, col)] = word; }
}

fn store_quad_TENSOR(row: u32, col: u32, words: vec4<u32>) {
    store_word_TENSOR(row, col, words.x);
    store_word_TENSOR(row, col + 1u, words.y);
    store_word_TENSOR(row, col + 2u, words.z);
    store_word_TENSOR(row, col + 3u, words.w);
}
// end
