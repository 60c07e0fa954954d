// Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A row stays in the registers of
// its threads.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in barriers and shuffles.
    let exists = row < params.rows;
    clear_row_magnitude(lane);
    @unroll(K) {
        var addends_K = Addends();
    }
    // All loads come before the first sum, as in `forward.wgsl`.
    if (exists) {
        @unroll(K) {
            addends_K = load_addends(row, thread, K);
        }
    }
    var of_row = given_scale();
    @unroll(K) {
        let h_K = h_of(addends_K);
    }
    var mean = 0.0;
    if (IS_LAYER) {
        @unroll(K) {
            mean += sum_of(pair_H(h_K));
        }
        mean = first_mean(mean, lane);
    }
    var about = Sum();
    @unroll(K) {
        about += about_mean(thread, K, pair_H(h_K), mean);
    }
    let statistics = statistics_of(mean, about, lane);
    @unroll(K) {
        var v_K = Pair();
    }
    var magnitude = 0u;
    if (SCALE == FIND || SCALE == BY_ROW) {
        @unroll(K) {
            v_K = v_of(h_K, statistics.mean, statistics.rstd, load_weight(0u, thread, K), load_bias(0u, thread, K));
        }
        @unroll(K) {
            magnitude = max(magnitude, largest_of_pair(thread, K, v_K));
        }
    }
    if (SCALE == BY_ROW) {
        of_row = scale_of(largest_of_row(magnitude, lane));
        if (exists && thread == 0u) { store_scales(row, 0u, of_row); }
    }
    if (SCALE != FIND) {
        // Loads come before stores, as in `forward.wgsl`. Codes take a quarter of the registers.
        @unroll(K of BATCH) {
            @unroll(K) {
                if (SCALE != BY_ROW) { v_K = v_of(h_K, statistics.mean, statistics.rstd, load_weight(0u, thread, K), load_bias(0u, thread, K)); }
                if (FINDS_AMAX) { magnitude = max(magnitude, largest_of_pair(thread, K, v_K)); }
                let codes_K = codes_of(row, exists, lane, K, v_K, of_row);
            }
            if (exists) {
                @unroll(K) {
                    write_pair(row, thread, K, h_K, v_K, codes_K);
                }
            }
        }
        if (exists) { write_statistics(row, thread, statistics); }
    }
    if (FINDS_AMAX) { fold_magnitude(select(0u, magnitude, exists), lane); }
}
