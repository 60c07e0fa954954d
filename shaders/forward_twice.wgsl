// forward.wgsl followed by the next norm: math.md, equations (13) and (14). The sums replace the
// row in registers. Threads without a row stay until the second sums are complete.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    let exists = row < params.rows;
    @unroll(K) {
        var addends_K = Addends();
    }
    if (exists) {
        @unroll(K) {
            addends_K = load_addends(row, thread, K);
        }
    }
    @unroll(K) {
        var weight_K = Kept_W();
        var bias_K = Kept_W();
        if (IS_EARLY) {
            weight_K = load_weight(0u, thread, K);
            bias_K = load_bias(0u, thread, K);
        }
    }
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
        var sum_K = Kept_R();
    }
    if (exists) {
        @unroll(K of BATCH) {
            if (!IS_EARLY) {
                @unroll(K) {
                    weight_K = load_weight(0u, thread, K);
                    bias_K = load_bias(0u, thread, K);
                }
            }
            if (!IS_RESIDUAL_EARLY) {
                @unroll(K) {
                    addends_K.residual = load_residual(row, thread, K);
                }
            }
            @unroll(K) {
                sum_K = sum_after(thread, K, addends_K.residual, y_of(h_K, statistics.mean, statistics.rstd, weight_K, bias_K));
                store_residual_out(row, thread, K, sum_K);
            }
        }
        write_statistics(row, thread, statistics);
    }
    var next_mean = 0.0;
    if (IS_LAYER) {
        @unroll(K) {
            next_mean += sum_of(pair_R(sum_K));
        }
        next_mean = first_mean(next_mean, lane);
    }
    var next_about = Sum();
    @unroll(K) {
        next_about += about_mean(thread, K, pair_R(sum_K), next_mean);
    }
    let next = statistics_of(next_mean, next_about, lane);
    if (!exists) { return; }
    @unroll(K of BATCH) {
        @unroll(K) {
            weight_K = load_next_weight(0u, thread, K);
            bias_K = load_next_bias(0u, thread, K);
        }
        @unroll(K) {
            write_next_y(row, thread, K, sum_K, next.mean, next.rstd, weight_K, bias_K);
        }
    }
    write_next_statistics(row, thread, next);
}
