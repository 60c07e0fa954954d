// forward_streaming.wgsl followed by the next norm: math.md, equations (13) and (14). A thread sums
// its part of residual_out while storing it, and reads it back for the other steps.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    let padded = pairs_of(thread) + (PACKS - 1u);
    let turns = select(0u, padded / PACKS, exists);
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
    // From the start: sums are added in the order of the columns, as in programs that hold the row
    // in registers.
    var next_moments = Moments();
    var next_mean = 0.0;
    var next_about = Sum();
    var moments_of_block = Moments();
    var sum_of_block = 0.0;
    var about_of_block = Sum();
    for (var turn = 0u; turn < turns; turn += 1u) {
        let first = turn * PACKS;
        @unroll(K) {
            addends_K = load_addends(row, thread, first + K);
            addends_K.residual = load_residual(row, thread, first + K);
            let weight_K = load_weight(0u, thread, first + K);
            let bias_K = load_bias(0u, thread, first + K);
        }
        @unroll(K) {
            let normed_K = y_of(h_of(addends_K), statistics.mean, statistics.rstd, weight_K, bias_K);
            let sum_K = sum_after(thread, first + K, addends_K.residual, normed_K);
            store_residual_out(row, thread, first + K, sum_K);
        }
        @unroll(K) {
            if (IS_VISITED_ONCE) {
                moments_of_block = with_pair(moments_of_block, thread, first + K, pair_R(sum_K));
            } else if (IS_LAYER) {
                sum_of_block += sum_of(pair_R(sum_K));
            } else {
                about_of_block += about_mean(thread, first + K, pair_R(sum_K), 0.0);
            }
        }
        if (ends_block(thread, (turn + 1u) * PACKS)) {
            next_moments = merged(next_moments, moments_of_block);
            next_mean += sum_of_block;
            next_about += about_of_block;
            moments_of_block = Moments();
            sum_of_block = 0.0;
            about_of_block = Sum();
        }
    }
    if (exists) { write_statistics(row, thread, statistics); }
    if (IS_VISITED_ONCE) {
        next_mean = first_mean(sum_of_moments(next_moments), lane);
        next_about = moments_about(next_mean, next_moments);
    } else if (IS_LAYER) {
        next_mean = first_mean(next_mean, lane);
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                let sum_K = load_residual_out(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                about_of_block += about_mean(thread, turn * PACKS + K, pair_R(sum_K), next_mean);
            }
            if (ends_block(thread, (turn + 1u) * PACKS)) {
                next_about += about_of_block;
                about_of_block = Sum();
            }
        }
    }
    let next = statistics_of(next_mean, next_about, lane);
    if (!exists) { return; }
    // From the end: the columns stored last are most likely in a cache.
    for (var left = turns; left > 0u; left -= 1u) {
        let first = (left - 1u) * PACKS;
        @unroll(K) {
            let sum_K = load_residual_out(row, thread, first + K);
            let weight_K = load_next_weight(0u, thread, first + K);
            let bias_K = load_next_bias(0u, thread, first + K);
        }
        @unroll(K) {
            write_next_y(row, thread, first + K, sum_K, next.mean, next.rstd, weight_K, bias_K);
        }
    }
    write_next_statistics(row, thread, next);
}
