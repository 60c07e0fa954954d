// Forward to codes for rows that exceed the registers: math.md, equations (1) to (6) and (Q1) to
// (Q5). A row is read once per sum, once for an amax that is needed first, and once more for the
// codes.

// A thread's part of a pack, or zeros without a row.
fn load_part(row: u32, exists: bool, thread: u32, k: u32) -> Kept_H {
    var addends = Addends();
    if (exists) { addends = load_addends(row, thread, k); }
    return h_of(addends);
}

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    let exists = row < params.rows;
    // The same number for every thread, since all meet at barriers and shuffles: the number of
    // thread 0, which has the most.
    let turns = (pairs_of(0u) + PACKS - 1u) / PACKS;
    clear_row_magnitude(lane);
    var of_row = given_scale();
    var mean = 0.0;
    var about = Sum();
    if (IS_VISITED_ONCE) {
        var moments = Moments();
        var block = Moments();
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                let h_K = load_part(row, exists, thread, turn * PACKS + K);
            }
            @unroll(K) {
                block = with_pair(block, thread, turn * PACKS + K, pair_H(h_K));
            }
            if (ends_block(thread, (turn + 1u) * PACKS)) {
                moments = merged(moments, block);
                block = Moments();
            }
        }
        mean = first_mean(sum_of_moments(moments), lane);
        about = moments_about(mean, moments);
    } else {
        if (IS_LAYER) {
            var block = 0.0;
            for (var turn = 0u; turn < turns; turn += 1u) {
                @unroll(K) {
                    let h_K = load_part(row, exists, thread, turn * PACKS + K);
                }
                @unroll(K) {
                    block += sum_of(pair_H(h_K));
                }
                if (ends_block(thread, (turn + 1u) * PACKS)) {
                    mean += block;
                    block = 0.0;
                }
            }
            mean = first_mean(mean, lane);
        }
        var block = Sum();
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                let h_K = load_part(row, exists, thread, turn * PACKS + K);
            }
            @unroll(K) {
                block += about_mean(thread, turn * PACKS + K, pair_H(h_K), mean);
            }
            if (ends_block(thread, (turn + 1u) * PACKS)) {
                about += block;
                block = Sum();
            }
        }
    }
    let statistics = statistics_of(mean, about, lane);
    var magnitude = 0u;
    if (SCALE == FIND || SCALE == BY_ROW) {
        for (var turn = 0u; turn < turns; turn += 1u) {
            let first = turn * PACKS;
            @unroll(K) {
                let h_K = load_part(row, exists, thread, first + K);
                let weight_K = load_weight(0u, thread, first + K);
                let bias_K = load_bias(0u, thread, first + K);
            }
            @unroll(K) {
                magnitude = max(magnitude, largest_of_pair(thread, first + K, v_of(h_K, statistics.mean, statistics.rstd, weight_K, bias_K)));
            }
        }
    }
    if (SCALE == BY_ROW) {
        of_row = scale_of(largest_of_row(magnitude, lane));
        if (exists && thread == 0u) { store_scales(row, 0u, of_row); }
    }
    if (SCALE != FIND) {
        // From the end: the columns read last are most likely in a cache.
        for (var left = turns; left > 0u; left -= 1u) {
            let first = (left - 1u) * PACKS;
            @unroll(K) {
                let h_K = load_part(row, exists, thread, first + K);
                let weight_K = load_weight(0u, thread, first + K);
                let bias_K = load_bias(0u, thread, first + K);
            }
            @unroll(K) {
                let v_K = v_of(h_K, statistics.mean, statistics.rstd, weight_K, bias_K);
                if (FINDS_AMAX) { magnitude = max(magnitude, largest_of_pair(thread, first + K, v_K)); }
                let codes_K = codes_of(row, exists, lane, first + K, v_K, of_row);
            }
            if (exists) {
                @unroll(K) {
                    write_pair(row, thread, first + K, h_K, v_K, codes_K);
                }
            }
        }
        if (exists) { write_statistics(row, thread, statistics); }
    }
    if (FINDS_AMAX) { fold_magnitude(select(0u, magnitude, exists), lane); }
}
