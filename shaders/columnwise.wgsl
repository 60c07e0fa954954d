// The columnwise copy: math.md, equations (Q1) to (Q5) of the transposed matrix, computed from x
// with the statistics that forward has stored. A workgroup has a tile of TILE_ROWS rows and
// TILE_COLS columns and reads it twice: for the amax, and for the codes.
//
// `magnitudes` holds the amax of each set of values that share a scale, then the reciprocal of the
// scale.

const TILE_ROWS = 128u;
const TILE_COLS = 64u;
const SETS = TILE_ROWS / SET;

// v of four rows.
struct Rows {
    a: Pair,
    b: Pair,
    c: Pair,
    d: Pair,
}

fn at_scales_columnwise(col: u32, group: u32) -> u32 {
    return params.scales_columnwise + index_of_scale(ATCOL, group, params.scales_columnwise_stride);
}

// Zeros for a missing row.
fn v_at(row: u32, thread: u32, k: u32, weight: Kept_W, bias: Kept_W) -> Pair {
    if (row >= params.rows) { return Pair(); }
    return v_of(h_0(load_0(row, thread, k)), load_statistics(row), weight, bias);
}

fn v_of_rows(row: u32, thread: u32, k: u32, weight: Kept_W, bias: Kept_W) -> Rows {
    return Rows(
        v_at(row, thread, k, weight, bias), v_at(row + 1u, thread, k, weight, bias),
        v_at(row + 2u, thread, k, weight, bias), v_at(row + 3u, thread, k, weight, bias),
    );
}

// For four columns, each in four rows.
fn fold_columns(at: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) {
    const MAGNITUDE = vec4(0x7fffffffu);
    let ab = max(bitcast<vec4<u32>>(a) & MAGNITUDE, bitcast<vec4<u32>>(b) & MAGNITUDE);
    let cd = max(bitcast<vec4<u32>>(c) & MAGNITUDE, bitcast<vec4<u32>>(d) & MAGNITUDE);
    let largest = max(ab, cd);
    atomicMax(&magnitudes[at], largest.x);
    atomicMax(&magnitudes[at + 1u], largest.y);
    atomicMax(&magnitudes[at + 2u], largest.z);
    atomicMax(&magnitudes[at + 3u], largest.w);
}

fn write_column(row: u32, col: u32, at: u32, values: vec4<f32>) {
    if (col >= params.cols) { return; }
    store_codes_columnwise(row, col, quad_codes(values * bitcast<f32>(atomicLoad(&magnitudes[at]))));
}

fn write_columns(row: u32, col: u32, at: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) {
    write_column(row, col, at, vec4(a.x, b.x, c.x, d.x));
    write_column(row, col + 1u, at + 1u, vec4(a.y, b.y, c.y, d.y));
    write_column(row, col + 2u, at + 2u, vec4(a.z, b.z, c.z, d.z));
    write_column(row, col + 3u, at + 3u, vec4(a.w, b.w, c.w, d.w));
}

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let across = (params.cols + TILE_COLS - 1u) / TILE_COLS;
    let first_row = work_of(work) / across * TILE_ROWS;
    let k = work_of(work) % across;
    for (var i = lane; i < TILE_COLS * SETS; i += WORKGROUP) { atomicStore(&magnitudes[i], 0u); }
    workgroupBarrier();
    let weight = load_weight_0(thread, k);
    let bias = load_bias_0(thread, k);
    // Columns within the tile.
    let lo = column(thread, 0u, 0u);
    let hi = column(thread, 0u, 1u);
    for (var r = lane / THREADS_PER_ROW * 4u; r < TILE_ROWS; r += WORKGROUP / THREADS_PER_ROW * 4u) {
        if (first_row + r >= params.rows) { break; }
        let v = v_of_rows(first_row + r, thread, k, weight, bias);
        let of_set = r / SET * TILE_COLS;
        fold_columns(of_set + lo, v.a.lo, v.b.lo, v.c.lo, v.d.lo);
        fold_columns(of_set + hi, v.a.hi, v.b.hi, v.c.hi, v.d.hi);
    }
    workgroupBarrier();
    for (var i = lane; i < TILE_COLS * SETS; i += WORKGROUP) {
        let col = k * TILE_COLS + i % TILE_COLS;
        let row = first_row + i / TILE_COLS * SET;
        let scale = scale_of(atomicLoad(&magnitudes[i]));
        atomicStore(&magnitudes[i], bitcast<u32>(scale.reciprocal));
        if (col < params.cols && row < params.rows) { store_scales_columnwise(col, (params.first_row + row) / SET, scale); }
    }
    workgroupBarrier();
    for (var r = lane / THREADS_PER_ROW * 4u; r < TILE_ROWS; r += WORKGROUP / THREADS_PER_ROW * 4u) {
        let row = first_row + r;
        if (row >= params.rows) { break; }
        let v = v_of_rows(row, thread, k, weight, bias);
        let of_set = r / SET * TILE_COLS;
        let col = k * TILE_COLS;
        write_columns(row, col + lo, of_set + lo, v.a.lo, v.b.lo, v.c.lo, v.d.lo);
        write_columns(row, col + hi, of_set + hi, v.a.hi, v.b.hi, v.c.hi, v.d.hi);
    }
}
