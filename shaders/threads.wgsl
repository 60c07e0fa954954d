// The division of rows among threads of a workgroup, and of columns among the threads of a row.
//
// A thread owns pairs of quads: eight columns. If all matrices are 16-bit, the quads of a pair are
// adjacent, and one access moves both. If one matrix is f32, they are THREADS_PER_ROW quads apart,
// so that neighbouring threads access neighbouring words.

struct Pair {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

// The position of a workgroup. It is a struct of its own: if one member of a struct may differ between
// threads, Tint (Chromium's compiler) assumes that all members may.
struct Work {
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
}

// The index of the workgroup: two dimensions, because one cannot hold all workgroups.
fn work_of(work: Work) -> u32 { return work.group.y * work.grid.x + work.group.x; }

fn column(thread: u32, k: u32, quad: u32) -> u32 {
    if (IS_SPLIT) { return ((2u * k + quad) * THREADS_PER_ROW + thread) * 4u; }
    return (k * THREADS_PER_ROW + thread) * PAIR + quad * 4u;
}

// Pairs of a thread with at least one existing column.
fn pairs_of(thread: u32) -> u32 {
    let first = column(thread, 0u, 0u);
    let step = THREADS_PER_ROW * PAIR;
    return select(0u, (params.cols - first + step - 1u) / step, first < params.cols);
}

// Existing columns of a pair.
fn columns_of(thread: u32, k: u32) -> u32 {
    if (IS_WHOLE) { return PAIR; }
    return min(4u, params.cols - min(params.cols, column(thread, k, 0u))) + min(4u, params.cols - min(params.cols, column(thread, k, 1u)));
}

// The values of the existing columns from `col` on; zeros past the end of the row.
fn within(col: u32, values: vec4<f32>) -> vec4<f32> {
    if (IS_WHOLE) { return values; }
    if (IS_ALIGNED) { return select(vec4(0.0), values, col < params.cols); }
    return select(vec4(0.0), values, vec4(col) + vec4(0u, 1u, 2u, 3u) < vec4(params.cols));
}

// Whether a thread's first `pairs` pairs end a block, or are all its pairs. A long sum is a sum of
// block sums, so its chain of additions is the pairs of a block plus the blocks. The pairs of a
// block are a power of two near the square root of all pairs, and at least MOST_PACKS: a row that
// registers may hold is one block.
fn ends_block(thread: u32, pairs: u32) -> bool {
    let block = max(MOST_PACKS, 1u << ((firstLeadingBit(pairs_of(0u)) + 1u) / 2u));
    return pairs % block == 0u || pairs >= pairs_of(thread);
}

fn total(values: vec4<f32>) -> f32 {
    let halves = values.xy + values.zw;
    return halves.x + halves.y;
}

// Elements between partial rows of dweight or dbias.
fn partial_stride() -> u32 { return (params.cols + (PADDING - 1u)) / PADDING * SECTIONS; }
