// Forward: math.md, equations (1) to (6), (13) and (14). A row stays in the registers of its
// threads. N counts norms: the next norm is the same code on the sum that replaces the row.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(work) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    @unroll(K) {
        var held_0_K = Held_0();
    }
    // All loads come before the first sum, because its rounding branches, and compilers do not move
    // loads across a branch.
    if (exists) {
        @unroll(K) {
            held_0_K = load_0(row, thread, K);
        }
    }
    // With few rows latency dominates, so weights are loaded together with x. With many rows this
    // would take registers from other rows.
    @unroll(K) {
        var weight_K = Kept_W();
        var bias_K = Kept_W();
        if (IS_EARLY) {
            weight_K = load_weight_0(thread, K);
            bias_K = load_bias_0(thread, K);
        }
    }
    @unroll(N) {
        @include(statistics_held)
        @unroll(K) {
            var held_N1_K = Held_N1();
        }
        if (exists) {
            // Loads come before stores, which compilers must assume to alias. They are loaded in
            // batches: registers for eight packs of weights and biases would cost an H200 a third
            // of its resident workgroups.
            @unroll(K of BATCH) {
                if (!IS_EARLY || N > 0) {
                    @unroll(K) {
                        weight_K = load_weight_N(thread, K);
                        bias_K = load_bias_N(thread, K);
                    }
                }
                @unroll(K) {
                    held_N_K = load_late_N(held_N_K, row, thread, K);
                }
                @unroll(K) {
                    held_N1_K = put_N(row, thread, K, held_N_K, h_N_K, statistics_N, weight_K, bias_K);
                }
            }
            store_statistics_N(row, thread, statistics_N);
        }
    }
}
