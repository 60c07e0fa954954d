// Forward for rows that registers do not hold: math.md, equations (1) to (6). A row is read once for each sum, or once for both, and
// once more for y, but for the packs of the last turn, which registers still have. In place too: a thread reads only what it owns, and
// h before it writes y.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row still meet the others at the barriers of the sums.
    let exists = row < params.rows;
    let turns = select(0u, (pairs_of(thread) + PACKS - 1u) / PACKS, exists);
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
    if (!exists) { return; }
    // From the end: what was read last is the most likely to be in a cache.
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
            write_y(row, thread, first + K, h_of(addends_K), addends_K.residual, mean, rstd, weight_K, bias_K);
        }
    }
    write_statistics(row, thread, mean, rstd);
}
