// Backward for rows that exceed the registers, second pass: math.md, equations (10) to (12). A
// thread of a workgroup owns one pair of columns; some rows of a chunk are processed side by side.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let tiles = (params.cols + PAIR * THREADS_PER_ROW - 1u) / (PAIR * THREADS_PER_ROW);
    let chunk = work_of(work) / tiles;
    let k = work_of(work) % tiles;
    if (chunk >= params.chunks) { return; }
    let rows_of_step = WORKGROUP / THREADS_PER_ROW * params.chunks;
    let weight = load_weight_0(thread, k);
    var dweight = Pair();
    var dbias = Pair();
    for (var row = lane / THREADS_PER_ROW * params.chunks + chunk; row < params.rows; row += rows_of_step) {
        let statistics = load_statistics(row);
        let averages = load_row_sums(row);
        let held = load_0(row, thread, k);
        let terms = terms_of(thread, k, held, weight, statistics);
        let dx = dx_pair_of(terms, statistics.rstd, averages);
        @unroll(AFTER) {
            store_after(row, thread, k, held, terms, weight);
        }
        pull_before(row, thread, k, load_late_0(held, row, thread, k), weight, dx);
        if (HAS_DWEIGHT && !IS_WEIGHT_FIRST) { dweight = plus(dweight, times(terms.dy, terms.x_hat)); }
        if (HAS_DWEIGHT && IS_WEIGHT_FIRST) { dweight = plus(dweight, terms_before(thread, k, held, dx)); }
        if (HAS_DBIAS) { dbias = plus(dbias, terms.dy); }
    }
    if (HAS_DWEIGHT) { hand_on_pair(0u, chunk, k, dweight, lane); }
    if (HAS_DBIAS) { hand_on_pair(DBIAS, chunk, k, dbias, lane); }
}
