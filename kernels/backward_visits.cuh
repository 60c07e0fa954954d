// Backward for rows that are visited column by column. Shared by backward_streaming.cu and both
// phases of backward on a rank's columns.

// Every pack counts as pack 0 of a thread with one pack, its last (`may_pass_end`).
static_assert(PACKS == 1);

struct Statistics {
    float mean, rstd;

    __device__ Statistics(const Params& p, unsigned long long row)
        : mean(IS_LAYER ? p.mean[statistic(row)] : 0.0f), rstd(p.rstd[statistic(row)]) {}
};

// x_hat, and dy of the norm, without and with the weight, of the pack at a column; zeros past the
// end of the row. STORES: also stores the gradients of what follows the norm.
template <bool STORES>
__device__ inline void load_terms(
    const Params& p, unsigned long long row, unsigned long long col, Statistics statistics, const float (&weight)[PACK],
    float (&x_hat)[PACK], float (&dy)[PACK], float (&wdy)[PACK]
) {
    const int left = int(min(p.cols - col, (unsigned long long)PACK));
    const auto at = [&] { return At{p, row, col, left}; };
    const auto load = [&](const auto* from) { return load_pack<Hint::EvictFirst>(from, 0, left); };
    BeforePull::unpack_h(load(ROW(x, row) + col), BeforePull::values(at(), load), x_hat);
    unpack(load(ROW(dy, row) + col), dy);
    if constexpr (IS_WEIGHT_FIRST) weigh(x_hat, weight);
    AfterPull::Values values = AfterPull::values<STORES>(at(), load);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        // Past the end x and dy are zero, but an infinite x_hat would make the product NaN.
        x_hat[i] = IS_LAYER && i >= left ? 0.0f : (x_hat[i] - statistics.mean) * statistics.rstd;
        if constexpr (STORES) AfterPull::find(values, i, weighted(x_hat[i], weight[i]), dy[i]);
        dy[i] = AfterPull::pull(values, i, dy[i]);
        wdy[i] = weighted_gradient(dy[i], weight[i]);
    }
    if constexpr (STORES) AfterPull::store(at(), 0, values);
}

__device__ inline void load_weight(const Params& p, unsigned long long col, float (&weight)[PACK]) {
    const int left = int(min(p.cols - col, (unsigned long long)PACK));
    unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + group_column(p) + col, 0, left), p.weight_offset, weight);
}

// mean_wdy_xhat and mean_wdy of a row.
struct Averages {
    float wdy_xhat, wdy;
};

// dx, and the partial sums of dweight and dbias. `averages_of(row)` returns the averages of a row.
// A block has THREADS * PACK columns of the rows of a chunk.
template <class AveragesOf>
__device__ inline void write_columns(const Params& p, const AveragesOf& averages_of) {
    const unsigned long long tiles = (p.cols + STEP - 1) / STEP, works = tiles * p.chunks;
    for (unsigned long long work = blockIdx.x; work < works; work += gridDim.x) {
        const unsigned long long chunk = work / tiles, col = (work % tiles * THREADS + threadIdx.x) * PACK;
        const int left = col < p.cols ? int(min(p.cols - col, (unsigned long long)PACK)) : 0;
        Gradients gradients;
        gradients.clear();
        if (left > 0) {
            float weight[PACK];
            load_weight(p, col, weight);
            #pragma unroll 2
            for (unsigned long long row = chunk; row < p.rows; row += p.chunks) {
                const Statistics statistics(p, row);
                Averages averages = averages_of(row);
                averages.wdy_xhat = unless_clamped(p, statistics.rstd, averages.wdy_xhat);
                float x_hat[PACK], dy[PACK], wdy[PACK], dx[PACK];
                load_terms<true>(p, row, col, statistics, weight, x_hat, dy, wdy);
                #pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    dx[i] = statistics.rstd * ((wdy[i] - averages.wdy) - x_hat[i] * averages.wdy_xhat);
                    if (i < left) gradients.add(0, i, dy[i], x_hat[i]);
                }
                const auto at = [&] { return At{p, row, col, left}; };
                if constexpr (IS_WEIGHT_FIRST) {
                    float x[PACK];
                    unpack(load_pack<Hint::EvictFirst>(ROW(x, row) + col, 0, left), x);
                    gradients.pull_weight(0, x, weight, dx);
                }
                BeforePull::pull(at(), [&](const auto* from) { return load_pack<Hint::EvictFirst>(from, 0, left); }, dx);
                BeforePull::store(at(), 0, dx);
            }
        }
        if constexpr (GRADIENTS > 0) store_partials<false>(p, chunk, {work % tiles, tiles}, col, left, gradients);
    }
}
