// Backward: docs/math.md, equations (7) to (12). A row stays in the registers of its threads between its two uses.
//
// A workgroup has a chunk of rows, some side by side. A thread owns the same columns in every row: the weights, and the
// sums of dweight and dbias, stay in its registers for the whole chunk.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let chunk = work_of(me);
    if (chunk >= params.chunks) { return; }
    // Chunks take turns with the rows, so that all of the device reads and writes in one place at a time.
    let rows_of_step = WORKGROUP / THREADS_PER_ROW * params.chunks;
    var row = lane / THREADS_PER_ROW * params.chunks + chunk;
    var statistics = Statistics();
    // unroll K
    let weight_K = load_weight_pair(thread, K);
    var x_K = Kept_R();
    var dy_K = Kept_T();
    // if HAS_DWEIGHT
    var dweight_K = Pair();
    // end
    // if HAS_DBIAS
    var dbias_K = Pair();
    // end
    // end
    // if IS_AHEAD
    if (row < params.rows) {
        statistics = load_statistics(row);
        // unroll K
        x_K = load_x(row, thread, K);
        dy_K = load_dy(row, thread, K);
        // end
    }
    // end
    // The same for all threads of the workgroup, which meet at the barriers of the sums.
    let steps = (params.rows + rows_of_step - 1u) / rows_of_step;
    for (var step = 0u; step < steps; step += 1u) {
        // A row that does not exist is all zeros.
        let exists = row < params.rows;
        let next_row = row + rows_of_step;
        // if IS_AHEAD
        // The next row is on its way while this one's sums are exchanged.
        var next_statistics = Statistics();
        // unroll K
        var next_x_K = Kept_R();
        var next_dy_K = Kept_T();
        // end
        if (next_row < params.rows) {
            next_statistics = load_statistics(next_row);
            // unroll K
            next_x_K = load_x(next_row, thread, K);
            next_dy_K = load_dy(next_row, thread, K);
            // end
        }
        // else
        statistics = Statistics();
        // unroll K
        x_K = Kept_R();
        dy_K = Kept_T();
        // end
        if (exists) {
            statistics = load_statistics(row);
            // unroll K
            x_K = load_x(row, thread, K);
            dy_K = load_dy(row, thread, K);
            // end
        }
        // end
        // if HAS_DRESIDUAL_OUT
        // unroll K
        var dresidual_out_K = Kept_R();
        // end
        if (exists) {
            // unroll K
            dresidual_out_K = load_dresidual_out(row, thread, K);
            // end
        }
        // end
        var sums = Sum();
        // unroll K
        {
            let terms = terms_of(thread, K, x_K, dy_K, weight_K, statistics);
            sums += sums_of(terms);
            // if HAS_DWEIGHT
            dweight_K = plus(dweight_K, times(terms.dy, terms.x_hat));
            // end
            // if HAS_DBIAS
            dbias_K = plus(dbias_K, terms.dy);
            // end
        }
        // end
        let averages = averages_of(sum_threads(sums, lane));
        if (exists) {
            // unroll K
            {
                let terms = terms_of(thread, K, x_K, dy_K, weight_K, statistics);
                var dx = dx_pair_of(terms, statistics.rstd, averages);
                // if HAS_DRESIDUAL_OUT
                dx = plus(dx, pair_R(dresidual_out_K));
                // end
                store_dx(row, thread, K, kept_T(dx));
            }
            // end
        }
        row = next_row;
        // if IS_AHEAD
        statistics = next_statistics;
        // unroll K
        x_K = next_x_K;
        dy_K = next_dy_K;
        // end
        // end
    }
    // if HAS_DWEIGHT
    // unroll K
    hand_on_pair(0u, chunk, K, dweight_K, lane);
    // end
    // end
    // if HAS_DBIAS
    // unroll K
    hand_on_pair(GRADIENTS - 1u, chunk, K, dbias_K, lane);
    // end
    // end
}
