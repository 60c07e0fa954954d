// Forward for rows that fit the registers of a cluster: math.md, equations (1) to (6). A cluster
// has one row. Clusters start and end all the time, so the memory always has both loads and stores.
//
// Latencies are overlapped. The cluster barrier, without a fence, comes after the row's loads are
// issued. Blocks exchange their moments once per norm, with stores that an mbarrier in shared
// memory counts. With READS_EARLY the weights are loaded together with the row. Late loads are
// issued for BATCH packs together; in layer norm the first batch overlaps the exchange. A residual
// added after the norm is loaded with the row, or late with READS_LATE.

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
    mean = __fmul_rn(p.share, total_of([&](int i) { return columns_of(p.cols, i) * sent[CENTER][i] + sent[DEVIATIONS][i]; }));
    // Move the sums to that mean, as if each warp had used it.
    const auto shift = [&](int i) { return sent[CENTER][i] - mean; };
    const float deviations = total_of([&](int i) { return sent[DEVIATIONS][i] + columns_of(p.cols, i) * shift(i); });
    float squares = total_of([&](int i) {
        const float own = sent[SQUARES][i], columns = columns_of(p.cols, i);
        const float moved = shift(i) * (2.0f * sent[DEVIATIONS][i] + columns * shift(i));
        // A sum that overflowed stays infinite. A warp without columns adds nothing.
        return is_finite(own) && columns > 0.0f ? own + moved : own;
    });
    correct_mean(p.share, deviations, mean, squares);
#else
    const float squares = total_of(sent[SQUARES]);
#endif
    rstd = reciprocal_root(squares * p.share + p.eps);
}

#if !HAS_PARTS
// Loads a pack of h. The hint is measured: 1024x131072 reaches 96 % of copy speed, without a hint
// 95 %, with evict_first 92 %.
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
    // The other blocks and their mbarriers must exist before anything is sent.
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
