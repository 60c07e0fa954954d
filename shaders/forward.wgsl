// Forward: math.md, equations (1) to (6). A row stays in the registers of its threads.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(me) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    @unroll(K) {
        var addends_K = Addends();
    }
    // All loads come before the first sum, because its rounding branches, and compilers do not move
    // loads across a branch.
    if (exists) {
        @unroll(K) {
            addends_K = load_addends(row, thread, K);
        }
    }
    // With few rows latency dominates, so weights are loaded together with x. With many rows this
    // would take registers from other rows.
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
    if (!exists) { return; }
    // Loads come before stores, which compilers must assume to alias. They are loaded in batches:
    // registers for eight packs of weights and biases would cost an H200 a third of its resident
    // workgroups.
    @unroll(K of BATCH) {
        if (!IS_EARLY) {
            @unroll(K) {
                weight_K = load_weight(0u, thread, K);
                bias_K = load_bias(0u, thread, K);
            }
        }
        if (RESIDUAL_AFTER && !IS_RESIDUAL_EARLY) {
            @unroll(K) {
                addends_K.residual = load_residual(row, thread, K);
            }
        }
        @unroll(K) {
            write_y(row, thread, K, h_K, addends_K.residual, statistics.mean, statistics.rstd, weight_K, bias_K);
        }
    }
    write_statistics(row, thread, statistics);
}
