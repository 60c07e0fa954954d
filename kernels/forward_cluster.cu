// Forward of RMS norm for rows that the registers of a cluster hold: math.md, equations (1) to (6). A cluster has
// one row. Clusters come and go, so that the device's memory always has rows to load and rows to store.
//
// What would be waited for is begun early: the cluster meets once its row is on the way, and without a fence; blocks
// hand each other their sums by stores that a barrier in shared memory counts. With READS_EARLY the weights come while the
// row does; what is read late is read for BATCH packs together.

static_assert(CLUSTER > 1 && GROUPS == 1 && UNROLL == 1, "a cluster has one row");
static_assert(!IS_LAYER, "the mean would be a second exchange, which plans leave to forward_long");

// A sum over the threads of a cluster, for use once.
struct ClusterSum {
    unsigned long long arrived;
    float sent[SENDERS];

    // By one thread, before it goes to meet the others of the cluster.
    __device__ void init() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
            :: "r"(shared_address(&arrived)) : "memory");
    }

    // The value, summed over the threads of the cluster; every thread gets the sum.
    __device__ float sum(float value) {
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, barrier = shared_address(&arrived);
        value = reduce_lanes<32>(value);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                :: "r"(barrier), "r"(int(sizeof(sent))) : "memory");
        }
        // Lane i writes to block i.
        if (lane < CLUSTER) {
            const unsigned to = of_block(shared_address(&sent[cluster_rank() * WARPS + warp]), lane);
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                :: "r"(to), "f"(value), "r"(of_block(barrier, lane)) : "memory");
        }
        unsigned is_complete = 0;
        while (!is_complete) {
            asm volatile("{\n.reg .pred complete;\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n"
                "selp.u32 %0, 1, 0, complete;\n}" : "=r"(is_complete) : "r"(barrier) : "memory");
        }
        return total_of(sent);
    }

private:
    __device__ static unsigned shared_address(const void* object) { return unsigned(__cvta_generic_to_shared(object)); }
};

// A thread's part of h. The hint is measured: 1024x131072 96 % of the copy, with none 95 %, with evict_first 92 %.
__device__ inline Pack<H> load_h(const Params& p, unsigned long long row, unsigned first, int k, int left) {
    const Pack<T> x = load_pack<Reuse::ByThread>(ROW(x, row) + first, k, left);
#if HAS_RESIDUAL
    return add_residual(x, load_pack<Reuse::ByThread>(ROW(residual, row) + first, k, left));
#else
    return x;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_cluster(const __grid_constant__ Params p) {
    __shared__ ClusterSum squares;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK;
    const int left = columns_left(p.cols, first);
    const unsigned long long row = blockIdx.x / CLUSTER;
    if (threadIdx.x == 0) squares.init();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait_for_earlier_kernels();

    Pack<H> h[PACKS];
    Pack<W> weights[PACKS];
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) h[k] = load_h(p, row, first, k, left);
    #pragma unroll
    for (int k = 0; k < PACKS; ++k)
        if constexpr (READS_EARLY) weights[k] = load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
#if HAS_RESIDUAL
    if (p.residual_out.data) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) store_pack(ROW(residual_out, row) + first, k, left, h[k]);
    }
#endif

    float sums[PACK] = {};
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) add_pack<true>(h[k], 0.0f, k, left, sums);
    const float sum = sum_pack(sums);
    // The other blocks must be there, with their barriers, before anything is sent.
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const float rstd = reciprocal_root(squares.sum(sum) * p.share + p.eps);

    #pragma unroll
    for (int batch = 0; batch < PACKS; batch += BATCH) {
        Pack<W> biases[BATCH];
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            if constexpr (!READS_EARLY) weights[k] = load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
            biases[k - batch] = load_parameter<HAS_BIAS>(p.bias + first, k, left);
        }
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(h[k], y);
            unpack_weight(weights[k], p.weight_offset, weight);
            unpack(biases[k - batch], bias);
            normalize(y, 0.0f, rstd, weight, bias);
            store_pack(ROW(y, row) + first, k, left, pack<T>(y));
        }
    }
    if (threadIdx.x == 0 && cluster_rank() == 0 && p.rstd) p.rstd[row] = rstd;
}
