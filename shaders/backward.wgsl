// Backward: math.md, equations (7) to (12). A row stays in the registers of its threads between its
// two uses.
//
// A workgroup has a chunk of rows and processes some side by side. A thread owns the same columns
// in every row, so its sums of dweight and dbias stay in registers for the whole chunk. If
// registers cannot hold both these sums and a row, the row is loaded again for its second use
// (IS_READ_AGAIN).

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let thread = lane % THREADS_PER_ROW;
    let chunk = work_of(work);
    if (chunk >= params.chunks) { return; }
    // Chunks are interleaved, so that the whole device accesses neighbouring rows at the same time.
    let turn_rows = WORKGROUP / THREADS_PER_ROW * params.chunks;
    var row = lane / THREADS_PER_ROW * params.chunks + chunk;
    @unroll(K) {
        var dweight_K = Pair();
        var dbias_K = Pair();
    }
    // Equal for all threads of the workgroup, which meet at the barriers of the sums.
    let steps = (params.rows + ROWS_AT_ONCE * turn_rows - 1u) / (ROWS_AT_ONCE * turn_rows);
    for (var step = 0u; step < steps; step += 1u) {
        @unroll(J) {
            // A missing row is all zeros.
            let row_J = row + J * turn_rows;
            let exists_J = row_J < params.rows;
            var statistics_J = RowStatistics();
            @unroll(K) {
                var held_J_K = Held_0();
            }
            if (exists_J) {
                statistics_J = load_statistics(row_J);
                @unroll(K) {
                    held_J_K = load_0(row_J, thread, K);
                }
            }
            if (exists_J && !IS_READ_AGAIN) {
                @unroll(K) {
                    held_J_K = load_late_0(held_J_K, row_J, thread, K);
                }
            }
        }
        // `step * params.zero` is 0, but unknown to the compiler, which would otherwise hoist this
        // load and keep it in registers.
        @unroll(K) {
            var weight_K = load_weight_0(thread + step * params.zero, K);
        }
        @unroll(J) {
            var sums_J = Sum();
            @unroll(K) {
                let terms_J_K = terms_of(thread, K, held_J_K, weight_K, statistics_J);
                sums_J += sums_of(terms_J_K);
                if (!IS_READ_AGAIN && HAS_DWEIGHT && !IS_WEIGHT_FIRST) {
                    dweight_K = plus(dweight_K, times(terms_J_K.dy, terms_J_K.x_hat));
                }
                if (!IS_READ_AGAIN && HAS_DBIAS) { dbias_K = plus(dbias_K, terms_J_K.dy); }
            }
        }
        @unroll(J) {
            let averages_J = averages_of(sum_threads(sums_J, lane), statistics_J.rstd);
        }
        @unroll(J) {
            if (exists_J) {
                @unroll(K) {
                    if (IS_READ_AGAIN) {
                        let place = thread + params.zero;
                        held_J_K = load_0(row_J, place, K);
                        weight_K = load_weight_0(place, K);
                        held_J_K = load_late_0(held_J_K, row_J, thread, K);
                    }
                    let again_K = terms_of(thread, K, held_J_K, weight_K, statistics_J);
                    if (IS_READ_AGAIN && HAS_DWEIGHT && !IS_WEIGHT_FIRST) {
                        dweight_K = plus(dweight_K, times(again_K.dy, again_K.x_hat));
                    }
                    if (IS_READ_AGAIN && HAS_DBIAS) { dbias_K = plus(dbias_K, again_K.dy); }
                    @unroll(AFTER) {
                        store_after(row_J, thread, K, held_J_K, again_K, weight_K);
                    }
                    let dh_K = dx_pair_of(again_K, statistics_J.rstd, averages_J);
                    if (HAS_DWEIGHT && IS_WEIGHT_FIRST) {
                        dweight_K = plus(dweight_K, terms_before(thread, K, held_J_K, dh_K));
                    }
                    pull_before(row_J, thread, K, held_J_K, weight_K, dh_K);
                }
            }
        }
        row += ROWS_AT_ONCE * turn_rows;
    }
    if (HAS_DWEIGHT) {
        @unroll(K) {
            hand_on_pair(0u, chunk, K, dweight_K, lane);
        }
    }
    if (HAS_DBIAS) {
        @unroll(K) {
            hand_on_pair(DBIAS, chunk, K, dbias_K, lane);
        }
    }
}
