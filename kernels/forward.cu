// Forward: math.md, equations (1) to (6). A thread has the same columns in each of its rows.
//
// A row is loaded twice: once for the statistics and once, from the L1, to write y. The registers
// that it would occupy hold more rows at a time instead. Hints tell the caches which load is the
// last, so that they keep rows that are still needed. IS_HELD: the row stays in registers. This is
// used with a residual, which doubles the second load, and in calls so small that all rows are in
// flight at once.
//
// A residual added after the norm is loaded once, together with x, and stays in registers. The sum
// replaces it there, for the second norm.

static_assert(IS_HELD || !HAS_PARTS, "several parts are read once");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][UNROLL * ABOUT_MEAN][SENDERS];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<UNROLL * ABOUT_MEAN> sums(exchange, group, thread);
    wait_for_earlier_kernels();

    constexpr unsigned BLOCK_ROWS = GROUPS * UNROLL;
    const unsigned long long stride = (unsigned long long)(gridDim.x / CLUSTER) * BLOCK_ROWS;
    for (unsigned long long block = (unsigned long long)(blockIdx.x / CLUSTER) * BLOCK_ROWS; block < p.rows; block += stride) {
        // Row u of this group. If a block has one row, the loop condition implies that the row
        // exists.
        const auto row = [&](int u) { return block + u * GROUPS + group; };
        const auto exists = [&](int u) { return BLOCK_ROWS == 1 || row(u) < p.rows; };
        Parts h = {};
        const auto load_rows = [&](auto is_last) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (exists(u))
#if HAS_PARTS
                    add_parts<Reuse::ByThread>(p, row(u), first, left, h[u]);
#else
                    #pragma unroll
                    for (int k = 0; k < PACKS; ++k) h[u][k] = load_h<is_last.value>(p, row(u), first, k, left);
#endif
        };

        const auto find_statistics_of = [&](const auto& parts, float (&mean)[UNROLL], float (&rstd)[UNROLL]) {
            find_statistics<PACKS>(p, sums, [&](int u, int k) { return parts[u][k]; }, left, [] {}, mean, rstd);
        };
        const auto store_statistics = [&](float* means, float* rstds, const float (&mean)[UNROLL], const float (&rstd)[UNROLL]) {
            if (thread == 0 && cluster_rank() == 0) {
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (exists(u)) {
                        if (IS_LAYER && means) means[row(u)] = mean[u];
                        if (rstds) rstds[row(u)] = rstd[u];
                    }
                }
            }
        };

        float mean[UNROLL] = {}, rstd[UNROLL];
        load_rows(Bool<false>{});
#if RESIDUAL_AFTER
        Pack<R> stream[UNROLL][PACKS] = {};
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(u))
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) stream[u][k] = load_pack<Reuse::ByNone>(ROW(residual, row(u)) + first, k, left);
#endif
        find_statistics_of(h, mean, rstd);

        // READS_LATE: each pack is loaded just before it is used. Otherwise all loads are issued at
        // once.
        if constexpr (!READS_LATE && !IS_HELD) load_rows(Bool<true>{});
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float weight[PACK], bias[PACK];
            unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + first, k, left), p.weight_offset, weight);
            unpack(load_parameter<HAS_BIAS>(p.bias + first, k, left), bias);
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (exists(u)) {
                    if constexpr (IS_HELD) store_residual_out(p, row(u), first, k, left, h[u][k]);
                    else if constexpr (READS_LATE) h[u][k] = load_h<true>(p, row(u), first, k, left);
                    float y[PACK];
                    unpack(h[u][k], y);
                    normalize(y, mean[u], rstd[u], weight, bias);
#if RESIDUAL_AFTER
                    stream[u][k] = add_residual(y, stream[u][k], k, left);
                    store_pack(ROW(residual_out, row(u)) + first, k, left, stream[u][k]);
#else
                    store_pack(ROW(y, row(u)) + first, k, left, pack<T>(y));
#endif
                }
            }
        }
        store_statistics(p.mean, p.rstd, mean, rstd);
#if NORMS_TWICE
        float next_mean[UNROLL] = {}, next_rstd[UNROLL];
        find_statistics_of(stream, next_mean, next_rstd);
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float weight[PACK], bias[PACK];
            const Pack<W> raw = load_parameter<HAS_NEXT_WEIGHT>(p.next_weight + first, k, left);
            unpack_weight<HAS_NEXT_WEIGHT>(raw, p.weight_offset, weight);
            unpack(load_parameter<HAS_NEXT_BIAS>(p.next_bias + first, k, left), bias);
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (exists(u)) {
                    float y[PACK];
                    unpack(stream[u][k], y);
                    normalize<HAS_NEXT_BIAS>(y, next_mean[u], next_rstd[u], weight, bias);
                    store_pack(ROW(y, row(u)) + first, k, left, pack<T>(y));
                }
            }
        }
        store_statistics(p.next_mean, p.next_rstd, next_mean, next_rstd);
#endif
    }
}
