// Forward for rows that registers do not hold: docs/math.md, equations (1) to (6). A row is read once for each sum and
// once more for y, in the order of `forward.wgsl`. In place too: a thread reads only what it owns, and h before it
// writes y.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row still meet the others at the barriers of the sums.
    let exists = row < params.rows;
    let pairs = select(0u, pairs_of(thread), exists);
    var mean = 0.0;
    // if IS_LAYER
    for (var k = 0u; k < pairs; k += 1u) { mean += sum_of(pair_H(load_h(row, thread, k))); }
    mean = sum_threads(mean, lane) * params.share;
    // end
    var squares = 0.0;
    for (var k = 0u; k < pairs; k += 1u) { squares += squares_of(thread, k, pair_H(load_h(row, thread, k)), mean); }
    let rstd = inverseSqrt(sum_threads(squares, lane) * params.share + params.eps);
    if (!exists) { return; }
    for (var k = 0u; k < pairs; k += 1u) {
        let weight = load_weight_pair(thread, k);
        let bias = load_bias_pair(thread, k);
        write_y(row, thread, k, load_h(row, thread, k), mean, rstd, weight, bias);
    }
    write_statistics(row, thread, mean, rstd);
}
