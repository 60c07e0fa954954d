// Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A row stays in the registers of
// its threads.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(work) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in barriers and shuffles.
    let exists = row < params.rows;
    clear_row_magnitude(lane);
    @unroll(K) {
        var held_0_K = Held_0();
    }
    // All loads come before the first sum, as in `forward.wgsl`.
    if (exists) {
        @unroll(K) {
            held_0_K = load_0(row, thread, K);
        }
    }
    var of_row = given_scale();
    @unroll(N) {
        @include(statistics_held)
    }
    @unroll(K) {
        var v_K = Pair();
    }
    var magnitude = 0u;
    if (SCALE == FIND || SCALE == BY_ROW) {
        @unroll(K) {
            v_K = v_of(h_0_K, statistics_0, load_weight_0(thread, K), load_bias_0(thread, K));
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
                if (SCALE != BY_ROW) { v_K = v_of(h_0_K, statistics_0, load_weight_0(thread, K), load_bias_0(thread, K)); }
                if (FINDS_AMAX) { magnitude = max(magnitude, largest_of_pair(thread, K, v_K)); }
                let codes_K = codes_of(row, exists, lane, K, v_K, of_row);
            }
            if (exists) {
                @unroll(K) {
                    put_0(row, thread, K, h_0_K, v_K, codes_K);
                }
            }
        }
        if (exists) { store_statistics_0(row, thread, statistics_0); }
    }
    if (FINDS_AMAX) { fold_magnitude(select(0u, magnitude, exists), lane); }
}
