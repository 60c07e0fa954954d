        // The statistics of a row that is read once per sum, or once for both sums.
        // `turns` of PACKS pairs are this thread's part. The sums of a first visit to the next
        // norm's row are made while it is stored.
        if (N == 0) {
            var block = Visit();
            for (var turn = 0u; turn < turns; turn += 1u) {
                @unroll(K) {
                    held_N_K = load_N(row, thread, turn * PACKS + K);
                }
                @unroll(K) {
                    block = visited(block, thread, turn * PACKS + K, pair_N(h_N(held_N_K)));
                }
                if (ends_block(thread, (turn + 1u) * PACKS)) {
                    visit_N = joined(visit_N, block);
                    block = Visit();
                }
            }
        }
        let mean_N = mean_of(visit_N, lane);
        var about_N = about_of(visit_N, mean_N);
        if (IS_LAYER && !IS_VISITED_ONCE) {
            var block = Sum();
            for (var turn = 0u; turn < turns; turn += 1u) {
                @unroll(K) {
                    held_N_K = load_N(row, thread, turn * PACKS + K);
                }
                @unroll(K) {
                    block += about_mean(thread, turn * PACKS + K, pair_N(h_N(held_N_K)), mean_N);
                }
                if (ends_block(thread, (turn + 1u) * PACKS)) {
                    about_N += block;
                    block = Sum();
                }
            }
        }
        let statistics_N = statistics_of(mean_N, about_N, lane);
