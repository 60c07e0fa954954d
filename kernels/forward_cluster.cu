// Forward for rows that the registers of a cluster hold: math.md, equations (1) to (6). A cluster has one row. Clusters come
// and go, so that the device's memory always has rows to load and rows to store.
//
// What would be waited for is begun early: the cluster meets once its row is on the way, and without a fence; blocks hand
// each other what they know of it once for each norm, by stores that a barrier in shared memory counts. With READS_EARLY the weights
// come while the row does; what is read late is read for BATCH packs together, by layer norm the first of them during the exchange.
// A residual that comes after the norm is read with the row, or, with READS_LATE, late.

static_assert(CLUSTER > 1 && GROUPS == 1 && UNROLL == 1, "a cluster has one row");

// What a warp knows of its part of a row. RMS norm: the sum of the squares. Layer norm: a center near the mean of the part,
// and the sums of the deviations from it and of their squares; math.md, section 8, has what they make together.
#if IS_LAYER
enum Moment { CENTER, DEVIATIONS, SQUARES, MOMENTS };
#else
enum Moment { SQUARES, MOMENTS };
#endif

// What all warps of a cluster know, handed to all of them, once.
struct Exchange {
    unsigned long long arrived;
    float sent[MOMENTS][SENDERS];

    // By one thread, before it goes to meet the others of the cluster.
    __device__ void init() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
            :: "r"(shared_address(&arrived)) : "memory");
    }

    // By all lanes of a warp. Layer norm's upper half has the deviations, the others the squares; all have the center.
    __device__ void send(float center, float own) {
        constexpr unsigned HALF = IS_LAYER ? 16 : 32;
        const unsigned lane = threadIdx.x % 32, barrier = shared_address(&arrived);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                :: "r"(barrier), "r"(int(sizeof(sent))) : "memory");
        }
        // Lane i of some writes to block i.
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

// The columns that sender i has of a row.
__device__ inline float columns_of(unsigned long long cols, int i) {
    constexpr int WARP_COLUMNS = 32 * PACK;
    const unsigned first = ((i / WARPS) * THREADS_PER_ROW + (i % WARPS) * 32) * PACK;
    const int last = columns_left(cols, first) - (PACKS - 1) * STEP;
    return float((PACKS - 1) * WARP_COLUMNS + max(0, min(last, WARP_COLUMNS)));
}

// Finds the center of a warp's part of a row, and the sum that the lane sends: of the squares or, in the upper half, the deviations.
template <class E>
__device__ inline void find_moments(const Pack<E> (&h)[PACKS], unsigned long long cols, int left, float& center, float& own) {
    const auto load = [&](int k) { return h[k]; };
    float squares, deviations;
    center = 0.0f;
#if IS_LAYER
    const float columns = columns_of(cols, cluster_rank() * WARPS + threadIdx.x / 32);
    // A warp without columns has zeros.
    center = reduce_lanes<32>(sum_packs<PACKS>(load)) / max(columns, 1.0f);
#endif
    sum_packs_about<PACKS>(load, center, left, squares, deviations);
#if IS_LAYER
    // An infinite center is what the mean becomes.
    own = reduce_lanes<32>(squares, is_finite(center) ? deviations : 0.0f);
#else
    own = reduce_lanes<32>(squares);
#endif
}

// Mean and rstd of a row, of what its warps know.
__device__ inline void find_statistics(const Params& p, const float (&sent)[MOMENTS][SENDERS], float& mean, float& rstd) {
    mean = 0.0f;
#if IS_LAYER
    mean = __fmul_rn(p.share, total_of([&](int i) { return columns_of(p.cols, i) * sent[CENTER][i] + sent[DEVIATIONS][i]; }));
    // About that mean, as if each warp had summed about it.
    const auto shift = [&](int i) { return sent[CENTER][i] - mean; };
    const float deviations = total_of([&](int i) { return sent[DEVIATIONS][i] + columns_of(p.cols, i) * shift(i); });
    float squares = total_of([&](int i) {
        const float own = sent[SQUARES][i], columns = columns_of(p.cols, i);
        const float moved = shift(i) * (2.0f * sent[DEVIATIONS][i] + columns * shift(i));
        // What is too large for f32 stays so, also where a warp has no columns.
        return is_finite(own) && columns > 0.0f ? own + moved : own;
    });
    correct_mean(p.share, deviations, mean, squares);
#else
    const float squares = total_of(sent[SQUARES]);
#endif
    rstd = reciprocal_root(squares * p.share + p.eps);
}

#if !HAS_PARTS
// A thread's part of h. The hint is measured: 1024x131072 96 % of the copy, with none 95 %, with evict_first 92 %.
__device__ inline Pack<H> load_h(const Params& p, unsigned long long row, unsigned first, int k, int left) {
    const Pack<T> x = load_pack<Reuse::ByThread>(ROW(x, row) + first, k, left);
#if RESIDUAL_BEFORE
    return add_residual(x, load_pack<Reuse::ByThread>(ROW(residual, row) + first, k, left));
#else
    return x;
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_cluster(const __grid_constant__ Params p) {
    __shared__ Exchange exchange;
#if NORMS_TWICE
    __shared__ Exchange next_exchange;
#endif
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK;
    const int left = columns_left(p.cols, first);
    const unsigned long long row = blockIdx.x / CLUSTER;
    if (threadIdx.x == 0) {
        exchange.init();
#if NORMS_TWICE
        next_exchange.init();
#endif
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait_for_earlier_kernels();

    Pack<H> h[PACKS];
    Pack<W> weights[PACKS], biases[BATCH];
#if HAS_PARTS
    add_parts<Reuse::ByThread>(p, row, first, left, h);
#else
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) h[k] = load_h(p, row, first, k, left);
#endif
    #pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (READS_EARLY) weights[k] = load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
#if RESIDUAL_AFTER
    Pack<R> stream[PACKS];
    const auto load_residual = [&](int k) { stream[k] = load_pack<Reuse::ByThread>(ROW(residual, row) + first, k, left); };
    #pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (!READS_LATE) load_residual(k);
#elif HAS_RESIDUAL
    if (p.residual_out.data) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) store_pack(ROW(residual_out, row) + first, k, left, h[k]);
    }
#endif

    float center, own;
    find_moments(h, p.cols, left, center, own);
    // The other blocks must be there, with their barriers, before anything is sent.
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    exchange.send(center, own);

    const auto load_late = [&](int batch) {
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            if constexpr (!READS_EARLY) weights[k] = load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
            biases[k - batch] = load_parameter<HAS_BIAS>(p.bias + first, k, left);
#if RESIDUAL_AFTER
            if constexpr (READS_LATE) load_residual(k);
#endif
        }
    };
    if constexpr (IS_LAYER) load_late(0);
    exchange.receive();
    float mean, rstd;
    find_statistics(p, exchange.sent, mean, rstd);

    #pragma unroll
    for (int batch = 0; batch < PACKS; batch += BATCH) {
        if (!IS_LAYER || batch > 0) load_late(batch);
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(h[k], y);
            unpack_weight(weights[k], p.weight_offset, weight);
            unpack(biases[k - batch], bias);
            normalize(y, mean, rstd, weight, bias);
#if RESIDUAL_AFTER
            stream[k] = add_residual(y, stream[k], k, left);
            store_pack(ROW(residual_out, row) + first, k, left, stream[k]);
#else
            store_pack(ROW(y, row) + first, k, left, pack<T>(y));
#endif
        }
    }
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        if (IS_LAYER && p.mean) p.mean[row] = mean;
        if (p.rstd) p.rstd[row] = rstd;
    }
#if NORMS_TWICE
    find_moments(stream, p.cols, left, center, own);
    next_exchange.send(center, own);
    const auto load_next = [&](int batch) {
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            weights[k - batch] = load_parameter<HAS_NEXT_WEIGHT>(p.next_weight + first, k, left);
            biases[k - batch] = load_parameter<HAS_NEXT_BIAS>(p.next_bias + first, k, left);
        }
    };
    load_next(0);
    next_exchange.receive();
    find_statistics(p, next_exchange.sent, mean, rstd);
    #pragma unroll
    for (int batch = 0; batch < PACKS; batch += BATCH) {
        if (batch > 0) load_next(batch);
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(stream[k], y);
            unpack_weight<HAS_NEXT_WEIGHT>(weights[k - batch], p.weight_offset, weight);
            unpack(biases[k - batch], bias);
            normalize<HAS_NEXT_BIAS>(y, mean, rstd, weight, bias);
            store_pack(ROW(y, row) + first, k, left, pack<T>(y));
        }
    }
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        if (IS_LAYER && p.next_mean) p.next_mean[row] = mean;
        if (p.next_rstd) p.next_rstd[row] = rstd;
    }
#endif
}
