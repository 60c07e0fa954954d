// forward_streaming.wgsl, and then the next norm: math.md, equations (13) and (14). A thread sums what it has of residual_out as it
// stores it, and reads it back, which is its own, for what is left.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row still meet the others at the barriers of the sums.
    let exists = row < params.rows;
    let padded = pairs_of(thread) + (PACKS - 1u);
    let turns = select(0u, padded / PACKS, exists);
    @unroll(K) {
        var addends_K = Addends();
    }
    var mean = 0.0;
    var squares = 0.0;
    if (IS_VISITED_ONCE) {
        var moments = Moments();
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                addends_K = load_addends(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                moments = with_pair(moments, thread, turn * PACKS + K, pair_H(h_of(addends_K)));
            }
        }
        mean = sum_threads(sum_of_moments(moments), lane) * params.share;
        squares = squares_about(moments, mean);
    } else {
        if (IS_LAYER) {
            for (var turn = 0u; turn < turns; turn += 1u) {
                @unroll(K) {
                    addends_K = load_addends(row, thread, turn * PACKS + K);
                }
                @unroll(K) {
                    mean += sum_of(pair_H(h_of(addends_K)));
                }
            }
            mean = sum_threads(mean, lane) * params.share;
        }
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                addends_K = load_addends(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                squares += squares_of(thread, turn * PACKS + K, pair_H(h_of(addends_K)), mean);
            }
        }
    }
    let rstd = inverseSqrt(sum_threads(squares, lane) * params.share + params.eps);
    // From the start: sums are added up in the order of the columns, as where registers hold them.
    var next_moments = Moments();
    var next_mean = 0.0;
    var next_squares = 0.0;
    for (var turn = 0u; turn < turns; turn += 1u) {
        let first = turn * PACKS;
        @unroll(K) {
            addends_K = load_addends(row, thread, first + K);
            addends_K.residual = load_residual(row, thread, first + K);
            let weight_K = load_weight(0u, thread, first + K);
            let bias_K = load_bias(0u, thread, first + K);
        }
        @unroll(K) {
            let normed_K = y_of(h_of(addends_K), mean, rstd, weight_K, bias_K);
            let sum_K = sum_after(thread, first + K, addends_K.residual, normed_K);
            store_residual_out(row, thread, first + K, sum_K);
        }
        @unroll(K) {
            if (IS_VISITED_ONCE) {
                next_moments = with_pair(next_moments, thread, first + K, pair_R(sum_K));
            } else if (IS_LAYER) {
                next_mean += sum_of(pair_R(sum_K));
            } else {
                next_squares += squares_of(thread, first + K, pair_R(sum_K), 0.0);
            }
        }
    }
    if (exists) { write_statistics(row, thread, mean, rstd); }
    if (IS_VISITED_ONCE) {
        next_mean = sum_threads(sum_of_moments(next_moments), lane) * params.share;
        next_squares = squares_about(next_moments, next_mean);
    } else if (IS_LAYER) {
        next_mean = sum_threads(next_mean, lane) * params.share;
        for (var turn = 0u; turn < turns; turn += 1u) {
            @unroll(K) {
                let sum_K = load_residual_out(row, thread, turn * PACKS + K);
            }
            @unroll(K) {
                next_squares += squares_of(thread, turn * PACKS + K, pair_R(sum_K), next_mean);
            }
        }
    }
    let next_rstd = inverseSqrt(sum_threads(next_squares, lane) * params.share + params.eps);
    if (!exists) { return; }
    // From the end: what was stored last is the most likely to be in a cache.
    for (var left = turns; left > 0u; left -= 1u) {
        let first = (left - 1u) * PACKS;
        @unroll(K) {
            let sum_K = load_residual_out(row, thread, first + K);
            let weight_K = load_next_weight(0u, thread, first + K);
            let bias_K = load_next_bias(0u, thread, first + K);
        }
        @unroll(K) {
            write_next_y(row, thread, first + K, sum_K, next_mean, next_rstd, weight_K, bias_K);
        }
    }
    write_next_statistics(row, thread, next_mean, next_rstd);
}
