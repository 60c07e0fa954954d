// Forward: math.md, equations (1) to (6), (13) and (14), for rows that stay on chip.
//
// When: rows of one block. Longer ones: forward_cluster.cu, forward_long.cu, forward_streaming.cu.
// Who: a group of THREADS_PER_ROW threads has UNROLL rows at a time, a thread the same columns in
// each.
// Where: a row is loaded for its statistics and loaded again, from the L1, to write y: `h` needs no
// registers while the last sums are exchanged. Hints tell the caches which load is the last.
// LOADS_AT_USE: the second load is pack by pack; without it, all packs are loaded together.
// KEEPS_ROW: the row is loaded once and stays in `h`. A tile decides: most have it with a residual
// before the norm, which doubles the second load, with few packs, and in calls so small that all rows
// are in flight at once.
// A residual after the norm is loaded once, with the row, and waits in `waiting`; the sum takes its
// place there, and the next norm reads it. Before, After, Norm, NextNorm and Store are in pieces/.

static_assert(KEEPS_ROW || !Before::IS_READ_ONCE, "several parts are read once");
static_assert(CLUSTER == 1, "forward_cluster.cu has rows of several blocks");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][UNROLL * SUMS_ABOUT_MEAN][SENDERS];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = thread * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<UNROLL * SUMS_ABOUT_MEAN> sums(exchange, group, thread);
    wait_for_earlier_kernels();

    constexpr unsigned BLOCK_ROWS = GROUPS * UNROLL;
    const unsigned long long stride = (unsigned long long)gridDim.x * BLOCK_ROWS;
    for (unsigned long long block = (unsigned long long)blockIdx.x * BLOCK_ROWS; block < p.rows; block += stride) {
        // Row u of this group. For BLOCK_ROWS == 1 the loop condition implies that the row exists.
        const auto row = [&](int u) { return block + u * GROUPS + group; };
        const auto exists = [&](int u) { return BLOCK_ROWS == 1 || row(u) < p.rows; };
        const auto at = [&](int u) { return At{p, row(u), first, left}; };

        Pack<H> h[UNROLL][PACKS] = {};
        After::Waiting waiting[UNROLL][PACKS] = {};
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(u)) Before::load_row<Hint::Keep>(at(u), h[u]);
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(u))
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) waiting[u][k] = After::load<Hint::EvictFirst>(at(u), k);
        const auto load_last = [&](const At& place, int k) {
            const Pack<H> last = Before::load<Hint::EvictFirst>(place, k);
            Before::store_h(place, k, last);
            return last;
        };

        // Normalizes `packs`; `put` gets the values of each.
        const auto run = [&](auto norm, auto& packs, const auto& put) {
            using N = decltype(norm);
            float mean[UNROLL] = {}, rstd[UNROLL];
            find_statistics<PACKS>(p, sums, [&](int u, int k) { return packs[u][k]; }, left, [] {}, mean, rstd);

            // LOADS_AT_USE: each pack is loaded just before it is used. Otherwise all loads are
            // issued at once.
            if constexpr (N::IS_FIRST && !LOADS_AT_USE && !KEEPS_ROW) {
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    if (exists(u))
                        #pragma unroll
                        for (int k = 0; k < PACKS; ++k) packs[u][k] = load_last(at(u), k);
            }
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                float weight[PACK], bias[PACK];
                const unsigned long long column = row_column(p, row(0)) + first; // of all rows of the thread
                unpack_weight<N::SCALES>(load_parameter<N::SCALES>(N::weight(p) + column, k, left), p.weight_offset, weight);
                unpack(load_parameter<N::SHIFTS>(N::bias(p) + column, k, left), bias);
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (exists(u)) {
                        if constexpr (N::IS_FIRST && KEEPS_ROW) Before::store_h(at(u), k, packs[u][k]);
                        else if constexpr (N::IS_FIRST && LOADS_AT_USE) packs[u][k] = load_last(at(u), k);
                        float y[PACK];
                        unpack(packs[u][k], y);
                        normalize<N::SHIFTS>(y, mean[u], rstd[u], weight, bias);
                        put(u, k, y);
                    }
                }
            }
            store_statistics(thread == 0, N::means(p), N::rstds(p), exists, at, mean, rstd);
        };
        // `put` stores, and returns what the next norm, if there is one, normalizes.
        run(Norm{}, h, [&](int u, int k, const float (&y)[PACK]) { waiting[u][k] = After::put(at(u), k, y, waiting[u][k]); });
        After::then(waiting, [&](auto next, auto& sum) {
            run(next, sum, [&](int u, int k, const float (&y)[PACK]) { Store::put(at(u), k, y, {}); });
        });
    }
}
