// TENSOR: 16-bit, anywhere. A row may begin and end in the middle of a word whose other half is another thread's.
// if IS_ATOMIC
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<atomic<u32>>;
// else
@group(0) @binding(BINDING) var<storage, ACCESS> TENSOR: array<u32>;
// end

// if IS_LOADED
fn load_half_TENSOR(row: u32, col: u32) -> u32 {
    if (col >= params.cols) { return 0u; }
    let at = at_TENSOR(row, col);
    // if IS_ATOMIC
    // The other half may be in flux: it is dropped.
    let word = atomicLoad(&TENSOR[at >> 1u]);
    // else
    let word = TENSOR[at >> 1u];
    // end
    return (word >> (16u * (at & 1u))) & 0xffffu;
}

fn load_quad_TENSOR(row: u32, col: u32) -> vec2<u32> {
    return vec2(
        load_half_TENSOR(row, col) | (load_half_TENSOR(row, col + 1u) << 16u),
        load_half_TENSOR(row, col + 2u) | (load_half_TENSOR(row, col + 3u) << 16u),
    );
}
// end
// if IS_STORED
// Every bit has one owner: a half is replaced without a look at the other, whoever writes that one meanwhile.
fn store_half_TENSOR(row: u32, col: u32, half: u32) {
    if (col >= params.cols) { return; }
    let at = at_TENSOR(row, col);
    let shift = 16u * (at & 1u);
    atomicAnd(&TENSOR[at >> 1u], ~(0xffffu << shift));
    atomicOr(&TENSOR[at >> 1u], half << shift);
}

fn store_quad_TENSOR(row: u32, col: u32, words: vec2<u32>) {
    store_half_TENSOR(row, col, words.x & 0xffffu);
    store_half_TENSOR(row, col + 1u, words.x >> 16u);
    store_half_TENSOR(row, col + 2u, words.y & 0xffffu);
    store_half_TENSOR(row, col + 3u, words.y >> 16u);
}
// end
