// Forward to codes for rows that exceed the registers: math.md, equations (1) to (6) and (Q1) to
// (Q5). A row is read once per sum, once for an amax that is needed first, and once more for the
// codes.

// A thread's part of a pack, or zeros without a row.
fn load_part(row: u32, exists: bool, thread: u32, k: u32) -> Kept_0 {
    var held = Held_0();
    if (exists) { held = load_0(row, thread, k); }
    return h_0(held);
}

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(work) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    let exists = row < params.rows;
    let turns = select(0u, (pairs_of(thread) + PACKS - 1u) / PACKS, exists);
    // The same number for every thread, since all meet at barriers and shuffles: the number of
    // thread 0, which has the most.
    let all_turns = (pairs_of(0u) + PACKS - 1u) / PACKS;
    clear_row_magnitude(lane);
    var of_row = given_scale();
    var visit_0 = Visit();
    @unroll(N) {
        @unroll(K) {
            var held_N_K = Held_N();
        }
        @include(statistics_streamed)
    }
    var magnitude = 0u;
    if (SCALE == FIND || SCALE == BY_ROW) {
        for (var turn = 0u; turn < all_turns; turn += 1u) {
            let first = turn * PACKS;
            @unroll(K) {
                let h_K = load_part(row, exists, thread, first + K);
                let weight_K = load_weight_0(thread, first + K);
                let bias_K = load_bias_0(thread, first + K);
            }
            @unroll(K) {
                magnitude = max(magnitude, largest_of_pair(thread, first + K, v_of(h_K, statistics_0, weight_K, bias_K)));
            }
        }
    }
    if (SCALE == BY_ROW) {
        of_row = scale_of(largest_of_row(magnitude, lane));
        if (exists && thread == 0u) { store_scales(row, 0u, of_row); }
    }
    if (SCALE != FIND) {
        // From the end: the columns read last are most likely in a cache.
        for (var left = all_turns; left > 0u; left -= 1u) {
            let first = (left - 1u) * PACKS;
            @unroll(K) {
                let h_K = load_part(row, exists, thread, first + K);
                let weight_K = load_weight_0(thread, first + K);
                let bias_K = load_bias_0(thread, first + K);
            }
            @unroll(K) {
                let v_K = v_of(h_K, statistics_0, weight_K, bias_K);
                if (FINDS_AMAX) { magnitude = max(magnitude, largest_of_pair(thread, first + K, v_K)); }
                let codes_K = codes_of(row, exists, lane, first + K, v_K, of_row);
            }
            if (exists) {
                @unroll(K) {
                    put_0(row, thread, first + K, h_K, v_K, codes_K);
                }
            }
        }
        if (exists) { store_statistics_0(row, thread, statistics_0); }
    }
    if (FINDS_AMAX) { fold_magnitude(select(0u, magnitude, exists), lane); }
}
