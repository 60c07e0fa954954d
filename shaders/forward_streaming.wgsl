// Forward for rows that exceed the registers: math.md, equations (1) to (6). A row is read once per
// sum, or once for both sums, and again for y, except for the packs of the last iteration, which
// are still in registers. Works in place: a thread reads only columns that it owns, and reads h
// before writing y.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    let turns = select(0u, (pairs_of(thread) + PACKS - 1u) / PACKS, exists);
    @unroll(K) {
        var addends_K = Addends();
    }
    var mean = 0.0;
    var about = Sum();
    if (IS_VISITED_ONCE) {
        var moments = Moments();
        var block = Moments();
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                addends_K = load_addends(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                block = with_pair(block, thread, turn * PACKS + K, pair_H(h_of(addends_K)));
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
                    addends_K = load_addends(row, thread, turn * PACKS + K);
                }
                @unroll(K) {
                    block += sum_of(pair_H(h_of(addends_K)));
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
                addends_K = load_addends(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                block += about_mean(thread, turn * PACKS + K, pair_H(h_of(addends_K)), mean);
            }
            if (ends_block(thread, (turn + 1u) * PACKS)) {
                about += block;
                block = Sum();
            }
        }
    }
    let statistics = statistics_of(mean, about, lane);
    if (!exists) { return; }
    // From the end: the columns read last are most likely in a cache.
    for (var left = turns; left > 0u; left -= 1u) {
        let first = (left - 1u) * PACKS;
        if (left < turns) {
            @unroll(K) {
                addends_K = load_addends(row, thread, first + K);
            }
        }
        @unroll(K) {
            let weight_K = load_weight(0u, thread, first + K);
            let bias_K = load_bias(0u, thread, first + K);
        }
        if (RESIDUAL_AFTER) {
            @unroll(K) {
                addends_K.residual = load_residual(row, thread, first + K);
            }
        }
        @unroll(K) {
            write_y(row, thread, first + K, h_of(addends_K), addends_K.residual, statistics.mean, statistics.rstd, weight_K, bias_K);
        }
    }
    write_statistics(row, thread, statistics);
}
