// Forward for rows that do not fit the L1: math.md, equations (1) to (6).
//
// A block, or a cluster of blocks, copies its row to shared memory. A thread reads back only data
// that it copied itself, so only the sums need barriers. Rows are not prefetched: while one block
// sums a row, other blocks of the same multiprocessor load theirs.
//
// BATCH packs are read from shared memory together. With READS_EARLY the weights are loaded with
// the row, and the bias during the exchange of the last sum, when the path from the L2 is idle.

// The row in shared memory. Adjacent threads have adjacent packs, so that banks do not conflict.
struct Slot {
#if !HAS_PARTS
    Pack<T> x[PACKS][THREADS];
#endif
#if HAS_RESIDUAL || HAS_PARTS
    Pack<R> residual[PACKS][THREADS]; // replaced by h once it is computed
#endif
};

#if HAS_PARTS
// Parts and residual are added in registers; shared memory holds their sum.
__device__ inline void start_row(const Params& p, unsigned long long row, unsigned first, int left, Slot& slot) {
    #pragma unroll
    for (int batch = 0; batch < PACKS; batch += BATCH) {
        Pack<R> sums[BATCH];
        add_parts<Reuse::ByNone, BATCH>(p, row, first, batch, left, sums);
        #pragma unroll
        for (int k = batch; k < batch + BATCH && k < PACKS; ++k) slot.residual[k][threadIdx.x] = sums[k - batch];
    }
}
#else
__device__ inline void start_row(const Params& p, unsigned long long row, unsigned first, int left, Slot& slot) {
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        start_copy(&slot.x[k][threadIdx.x], ROW(x, row) + first, k, left);
#if HAS_RESIDUAL
        start_copy(&slot.residual[k][threadIdx.x], ROW(residual, row) + first, k, left);
#endif
    }
    close_batch();
}
#endif

// Waits for the row, and adds a residual that is added before the norm.
__device__ inline void finish_row(const Params& p, unsigned long long row, unsigned first, int left, Slot& slot) {
    wait_copies<0>();
#if RESIDUAL_BEFORE
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) {
        Pack<R>& residual = slot.residual[k][threadIdx.x];
#if !HAS_PARTS
        residual = add_residual(slot.x[k][threadIdx.x], residual);
#endif
        if (p.residual_out.data) store_pack(ROW(residual_out, row) + first, k, left, residual);
    }
#endif
}

__device__ inline Pack<H> load_h(const Slot& slot, int k) {
#if IS_SUM
    return slot.residual[k][threadIdx.x];
#else
    return slot.x[k][threadIdx.x];
#endif
}

template <bool EXISTS>
__device__ inline void load_parameters(const W* first, int left, Pack<W> (&packs)[PACKS]) {
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) packs[k] = load_parameter<EXISTS>(first, k, left);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_long(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][ABOUT_MEAN][SENDERS];
    Slot& slot = *reinterpret_cast<Slot*>(shared);
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        start_row(p, row, first, left, slot);
        Pack<W> weights[PACKS], biases[PACKS];
        if constexpr (READS_EARLY) load_parameters<HAS_WEIGHT>(p.weight + first, left, weights);
        finish_row(p, row, first, left, slot);
        float mean[1] = {0.0f}, rstd[1];
        const auto meanwhile = [&] {
            if constexpr (READS_EARLY) load_parameters<HAS_BIAS>(p.bias + first, left, biases);
        };
        find_statistics<BATCH>(p, sums, [&](int, int k) { return load_h(slot, k); }, left, meanwhile, mean, rstd);

        #pragma unroll (READS_EARLY ? PACKS : BATCH)
        for (int k = 0; k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(load_h(slot, k), y);
            if constexpr (READS_EARLY) {
                unpack_weight(weights[k], p.weight_offset, weight);
                unpack(biases[k], bias);
            } else {
                unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + first, k, left), p.weight_offset, weight);
                unpack(load_parameter<HAS_BIAS>(p.bias + first, k, left), bias);
            }
            normalize(y, mean[0], rstd[0], weight, bias);
#if RESIDUAL_AFTER
            Pack<R>& residual = slot.residual[k][threadIdx.x];
            residual = add_residual(y, residual, k, left);
            store_pack(ROW(residual_out, row) + first, k, left, residual);
#else
            store_pack(ROW(y, row) + first, k, left, pack<T>(y));
#endif
        }
#if NORMS_TWICE
        float next_mean[1] = {0.0f}, next_rstd[1];
        find_statistics<BATCH>(p, sums, [&](int, int k) { return slot.residual[k][threadIdx.x]; }, left, [] {}, next_mean, next_rstd);
        #pragma unroll BATCH
        for (int k = 0; k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(slot.residual[k][threadIdx.x], y);
            const Pack<W> raw = load_parameter<HAS_NEXT_WEIGHT>(p.next_weight + first, k, left);
            unpack_weight<HAS_NEXT_WEIGHT>(raw, p.weight_offset, weight);
            unpack(load_parameter<HAS_NEXT_BIAS>(p.next_bias + first, k, left), bias);
            normalize<HAS_NEXT_BIAS>(y, next_mean[0], next_rstd[0], weight, bias);
            store_pack(ROW(y, row) + first, k, left, pack<T>(y));
        }
#endif
        if (threadIdx.x == 0 && cluster_rank() == 0) {
            if (IS_LAYER && p.mean) p.mean[row] = mean[0];
            if (p.rstd) p.rstd[row] = rstd[0];
#if NORMS_TWICE
            if (IS_LAYER && p.next_mean) p.next_mean[row] = next_mean[0];
            if (p.next_rstd) p.next_rstd[row] = next_rstd[0];
#endif
        }
    }
}
