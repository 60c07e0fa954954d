// Backward for rows that exceed the registers, first pass: math.md, equations (7) to (10). Writes
// mean_wdy_xhat and mean_wdy of every row.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(work) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    var sums = Sum();
    var rstd = 0.0;
    if (exists) {
        let statistics = load_statistics(row);
        rstd = statistics.rstd;
        let pairs = pairs_of(thread);
        var block = Sum();
        for (var k = 0u; k < pairs; k += 1u) {
            let weight = load_weight_0(thread, k);
            block += sums_of(terms_of(thread, k, load_0(row, thread, k), weight, statistics));
            if (ends_block(thread, k + 1u)) {
                sums += block;
                block = Sum();
            }
        }
    }
    let averages = averages_of(sum_threads(sums, lane), rstd);
    if (exists && thread == 0u) { workspace[(params.row_sums >> 1u) + ATROW] = averages; }
}
