// Forward for rows that fit the registers of a cluster: math.md, equations (1) to (6), (13) and
// (14).
//
// When: long rows, on devices with clusters, that a table of tiles of clusters has.
// Who: a cluster has one row. Clusters start and end all the time, so the memory always has both
// loads and stores. Where: the row is loaded once and stays in registers. Latencies are overlapped.
// The cluster barrier, without a fence, comes after the row's loads are issued. Blocks exchange
// their moments once per norm, with stores that an mbarrier in shared memory counts. With
// PREFETCHES_WEIGHT the weights are loaded together with the row. Late loads are issued for BATCH
// packs together. What the norm is added to is loaded with the row, or late with LOADS_AT_USE.

static_assert(CLUSTER > 1 && GROUPS == 1 && UNROLL == 1, "a cluster has one row");

// Moments of a warp's columns of a row. RMS norm: the sum of squares. Layer norm: a center near the
// mean of these columns, and the sums of the deviations from it and of their squares. math.md,
// section 8, combines them.
#if IS_LAYER
enum Moment { CENTER, DEVIATIONS, SQUARES, MOMENTS };
#else
enum Moment { SQUARES, MOMENTS };
#endif

// The moments of all warps of a cluster, sent to every block once.
struct Exchange {
    unsigned long long arrived;
    float sent[MOMENTS][SENDERS];

    // Called by one thread, before the cluster barrier.
    __device__ void init() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
            :: "r"(shared_address(&arrived)) : "memory");
    }

    // Called by all lanes of a warp. In layer norm `own` is the deviations in the upper half of the
    // warp and the squares in the lower half. All lanes have the center.
    __device__ void send(float center, float own) {
        constexpr unsigned HALF = IS_LAYER ? 16 : 32;
        const unsigned lane = threadIdx.x % 32, barrier = shared_address(&arrived);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                :: "r"(barrier), "r"(int(sizeof(sent))) : "memory");
        }
        // Lane i (modulo HALF) writes to block i.
        const auto store = [&](int moment, float value, unsigned to) {
            float& at = sent[moment][cluster_rank() * WARPS + threadIdx.x / 32];
            if (to < CLUSTER) {
                asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                    :: "r"(of_block(shared_address(&at), to)), "f"(value), "r"(of_block(barrier, to)) : "memory");
            }
        };
        if constexpr (IS_LAYER) store(0, center, lane);
        store(SQUARES - lane / HALF, own, lane % HALF);
    }

    // Waits until `sent` is complete.
    __device__ void receive() {
        unsigned is_complete = 0;
        while (!is_complete) {
            asm volatile("{\n.reg .pred complete;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n"
                "selp.u32 %0, 1, 0, complete;\n}" : "=r"(is_complete) : "r"(shared_address(&arrived)) : "memory");
        }
    }

private:
    __device__ static unsigned shared_address(const void* object) { return unsigned(__cvta_generic_to_shared(object)); }
};

// The number of columns of sender i in a row.
__device__ inline float columns_of(unsigned long long cols, int i) {
    constexpr int WARP_COLUMNS = 32 * PACK;
    const unsigned first = ((i / WARPS) * THREADS_PER_ROW + (i % WARPS) * 32) * PACK;
    const int last = columns_left(cols, first) - (PACKS - 1) * STEP;
    return float((PACKS - 1) * WARP_COLUMNS + max(0, min(last, WARP_COLUMNS)));
}

// Computes the center of a warp's columns, and the sum that the lane sends: the squares or, in the
// upper half, the deviations.
template <class E>
__device__ inline void find_moments(const Pack<E> (&h)[PACKS], unsigned long long cols, int left, float& center, float& own) {
    const auto load = [&](int k) { return h[k]; };
    float squares, deviations;
    center = 0.0f;
#if IS_LAYER
    const float columns = columns_of(cols, cluster_rank() * WARPS + threadIdx.x / 32);
    // A warp without columns has center 0.
    center = reduce_lanes<32>(sum_packs<PACKS>(load)) / max(columns, 1.0f);
#endif
    sum_packs_about<PACKS>(load, center, left, squares, deviations);
#if IS_LAYER
    // An infinite center must reach the mean unchanged.
    own = reduce_lanes<32>(squares, is_finite(center) ? deviations : 0.0f);
#else
    own = reduce_lanes<32>(squares);
#endif
}

// Mean and rstd of a row from the moments of its warps.
__device__ inline void find_statistics(const Params& p, const float (&sent)[MOMENTS][SENDERS], float& mean, float& rstd) {
    mean = 0.0f;
#if IS_LAYER
    mean = __fmul_rn(p.inv_cols, total_of([&](int i) { return columns_of(p.cols, i) * sent[CENTER][i] + sent[DEVIATIONS][i]; }));
    // Move the sums to that mean, as if each warp had used it.
    const auto shift = [&](int i) { return sent[CENTER][i] - mean; };
    const float deviations = total_of([&](int i) { return sent[DEVIATIONS][i] + columns_of(p.cols, i) * shift(i); });
    float squares = total_of([&](int i) {
        const float own = sent[SQUARES][i], columns = columns_of(p.cols, i);
        const float moved = shift(i) * (2.0f * sent[DEVIATIONS][i] + columns * shift(i));
        // A sum that overflowed stays infinite. A warp without columns adds nothing.
        return is_finite(own) && columns > 0.0f ? own + moved : own;
    });
    correct_mean(p.inv_cols, deviations, mean, squares);
#else
    const float squares = total_of(sent[SQUARES]);
#endif
    rstd = rstd_of(p, squares);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_cluster(const __grid_constant__ Params p) {
    __shared__ Exchange exchange, next_exchange;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK;
    const int left = columns_left(p.cols, first);
    const unsigned long long row = blockIdx.x / CLUSTER;
    const auto at = [&] { return At{p, row, first, left}; };
    if (threadIdx.x == 0) {
        exchange.init();
        if constexpr (After::GOES_ON) next_exchange.init();
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait_for_earlier_kernels();

    Pack<H> h[PACKS];
    Pack<W> weights[PACKS], biases[BATCH];
    After::Waiting waiting[PACKS];
    // The hint is measured: 1024x131072 reaches 96 % of copy speed, without a hint 95 %, with
    // evict_first 92 %.
    Before::load_row<Hint::Keep>(at(), h);
    #pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (PREFETCHES_WEIGHT) weights[k] = load_parameter<Norm::SCALES>(Norm::weight(p) + first, k, left);
    #pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (!LOADS_AT_USE) waiting[k] = After::load<Hint::Keep>(at(), k);
    Before::store_h_row(at(), h);

    // Normalizes `packs`; `put` gets the values of each.
    const auto run = [&](auto norm, const auto& packs, Exchange& exchange, const auto& put) {
        using N = decltype(norm);
        float center, own, mean, rstd;
        find_moments(packs, p.cols, left, center, own);
        // The other blocks and their mbarriers must exist before anything is sent.
        if constexpr (N::IS_FIRST) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        exchange.send(center, own);

        const auto load_late = [&](int batch) {
            #pragma unroll
            for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
                if constexpr (!PREFETCHES_WEIGHT || !N::IS_FIRST) weights[k] = load_parameter<N::SCALES>(N::weight(p) + first, k, left);
                biases[k - batch] = load_parameter<N::SHIFTS>(N::bias(p) + first, k, left);
                if constexpr (LOADS_AT_USE && N::IS_FIRST) waiting[k] = After::load<Hint::Keep>(at(), k);
            }
        };
        // Layer norm's first batch overlaps the exchange, and so does every next norm's.
        constexpr bool OVERLAPS = IS_LAYER || !N::IS_FIRST;
        if constexpr (OVERLAPS) load_late(0);
        exchange.receive();
        find_statistics(p, exchange.sent, mean, rstd);
        #pragma unroll
        for (int batch = 0; batch < PACKS; batch += BATCH) {
            if (!OVERLAPS || batch > 0) load_late(batch);
            #pragma unroll
            for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
                float y[PACK], weight[PACK], bias[PACK];
                unpack(packs[k], y);
                unpack_weight<N::SCALES>(weights[k], p.weight_offset, weight);
                unpack(biases[k - batch], bias);
                normalize<N::SHIFTS>(y, mean, rstd, weight, bias);
                put(k, y);
            }
        }
        store_statistics<N>(p, row, mean, rstd);
    };
    run(Norm{}, h, exchange, [&](int k, const float (&y)[PACK]) { waiting[k] = After::put(at(), k, y, waiting[k]); });
    After::then(waiting, [&](auto next, auto& sum) {
        run(next, sum, next_exchange, [&](int k, const float (&y)[PACK]) { Store::put(at(), k, y, {}); });
    });
}
