// How the threads of a workgroup share its rows, and which columns each of them owns.
//
// A thread owns pairs of quads: eight columns. The quads of a pair lie side by side where all matrices are 16-bit, so
// that one access moves both, and THREADS_PER_ROW quads apart where one of them is f32, so that neighbouring threads
// access neighbouring words.

struct Pair {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

// The workgroup's number: more workgroups than one dimension holds are folded into two.
fn work_of(me: Me) -> u32 { return me.group.y * me.grid.x + me.group.x; }

fn column(thread: u32, k: u32, quad: u32) -> u32 {
    if (IS_SPLIT) { return ((2u * k + quad) * THREADS_PER_ROW + thread) * 4u; }
    return (k * THREADS_PER_ROW + thread) * PAIR + quad * 4u;
}

// The pairs of a thread of which at least a column exists.
fn pairs_of(thread: u32) -> u32 {
    let first = column(thread, 0u, 0u);
    let step = THREADS_PER_ROW * PAIR;
    return select(0u, (params.cols - first + step - 1u) / step, first < params.cols);
}

// Columns of a pair that exist.
fn columns_of(thread: u32, k: u32) -> u32 {
    if (IS_WHOLE) { return PAIR; }
    return min(4u, params.cols - min(params.cols, column(thread, k, 0u))) + min(4u, params.cols - min(params.cols, column(thread, k, 1u)));
}

// The values of the columns from `col` on that exist; zeros past the end of the row.
fn within(col: u32, values: vec4<f32>) -> vec4<f32> {
    if (IS_WHOLE) { return values; }
    if (IS_ALIGNED) { return select(vec4(0.0), values, col < params.cols); }
    return select(vec4(0.0), values, vec4(col) + vec4(0u, 1u, 2u, 3u) < vec4(params.cols));
}

// Whether so many pairs of a thread end a block, or are all that it has. Long sums are sums of blocks: a chain of additions is as long as
// the pairs of a block and the blocks. A block has a power of two of pairs near the root of all, and no less than registers hold: where
// these may hold a row, it is one block.
fn ends_block(thread: u32, pairs: u32) -> bool {
    let block = max(MOST_PACKS, 1u << ((firstLeadingBit(pairs_of(0u)) + 1u) / 2u));
    return pairs % block == 0u || pairs >= pairs_of(thread);
}

fn total(values: vec4<f32>) -> f32 {
    let halves = values.xy + values.zw;
    return halves.x + halves.y;
}
