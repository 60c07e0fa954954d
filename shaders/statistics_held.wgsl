        // The statistics of a row in registers.
        @unroll(K) {
            let h_N_K = h_N(held_N_K);
        }
        var mean_N = 0.0;
        if (IS_LAYER) {
            @unroll(K) {
                mean_N += sum_of(pair_N(h_N_K));
            }
            mean_N = first_mean(mean_N, lane);
        }
        var about_N = Sum();
        @unroll(K) {
            about_N += about_mean(thread, K, pair_N(h_N_K), mean_N);
        }
        let statistics_N = statistics_of(mean_N, about_N, lane);
