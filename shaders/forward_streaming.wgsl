// Forward for rows that exceed the registers: math.md, equations (1) to (6), (13) and (14). A row is
// read for its statistics, and again for y, except for the packs of the last iteration, which are
// still in registers. Works in place: a thread reads only columns that it owns, and reads h before
// writing y. N counts norms, as in forward.wgsl.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let row = work_of(work) * (WORKGROUP / THREADS_PER_ROW) + lane / THREADS_PER_ROW;
    // Threads without a row also take part in the barriers of the sums.
    let exists = row < params.rows;
    let turns = select(0u, (pairs_of(thread) + PACKS - 1u) / PACKS, exists);
    var visit_0 = Visit();
    @unroll(N) {
        @unroll(K) {
            var held_N_K = Held_N();
        }
        @include(statistics_streamed)
        var visit_N1 = Visit();
        var block_N1 = Visit();
        for (var left = turns; left > 0u; left -= 1u) {
            // From the end: the columns read last are most likely in a cache. Before a next norm
            // from the start: its sums have the order of programs that hold a row in registers.
            let turn = select(left - 1u, turns - left, N1 < NORMS);
            let first = turn * PACKS;
            if (left < turns || NORMS > 1u) {
                @unroll(K) {
                    held_N_K = load_N(row, thread, first + K);
                }
            }
            @unroll(K) {
                let weight_K = load_weight_N(thread, first + K);
                let bias_K = load_bias_N(thread, first + K);
            }
            @unroll(K) {
                held_N_K = load_late_N(held_N_K, row, thread, first + K);
            }
            @unroll(K) {
                let h_N_K = h_N(held_N_K);
                let next_K = put_N(row, thread, first + K, held_N_K, h_N_K, statistics_N, weight_K, bias_K);
            }
            if (N1 < NORMS) {
                @unroll(K) {
                    block_N1 = visited(block_N1, thread, first + K, pair_N1(next_K));
                }
                if (ends_block(thread, (turn + 1u) * PACKS)) {
                    visit_N1 = joined(visit_N1, block_N1);
                    block_N1 = Visit();
                }
            }
        }
        if (exists) { store_statistics_N(row, thread, statistics_N); }
    }
}
