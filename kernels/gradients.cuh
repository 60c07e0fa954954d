// Sums of dweight and dbias over rows: how a block hands its share on.

constexpr int GRADIENTS = HAS_DWEIGHT + HAS_DBIAS;

// Partial rows are padded, so that each begins on 32 bytes.
__device__ inline unsigned long long partial_stride(unsigned long long cols) {
    return (cols + (ROW_MULTIPLE - 1)) / ROW_MULTIPLE * ROW_MULTIPLE;
}

// The sums of one thread over its rows: dweight, then dbias, for each of its columns.
struct Gradients {
    float sums[GRADIENTS > 0 ? GRADIENTS : 1][PACKS][PACK];

    __device__ void clear() {
        #pragma unroll
        for (int g = 0; g < GRADIENTS; ++g)
            #pragma unroll
            for (int k = 0; k < PACKS; ++k)
                #pragma unroll
                for (int i = 0; i < PACK; ++i) sums[g][k][i] = 0.0f;
    }

    __device__ void add(int k, int i, float dy, float x_hat) {
        if constexpr (HAS_DWEIGHT) sums[0][k][i] += dy * x_hat;
        if constexpr (HAS_DBIAS) sums[HAS_DWEIGHT][k][i] += dy;
    }
};

#if ACCUMULATE == 1
// Spin locks. Whoever holds one runs, so it is given back however many blocks are resident.
__device__ inline void acquire(unsigned* lock) {
    if (threadIdx.x == 0) {
        while (atomicCAS(lock, 0u, 1u) != 0u) __nanosleep(100);
        __threadfence();
    }
    __syncthreads();
}

__device__ inline void release(unsigned* lock) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(lock, 0u);
}
#endif

// Adds one value to a partial row that other blocks add to as well.
__device__ inline void accumulate(float* to, float value) {
#if ACCUMULATE == 1
    // Past the L1, which may hold what the row was before another block's turn.
    __stcg(to, __ldcg(to) + value);
#else
    atomicAdd(to, value);
#endif
}

// The part of a partial row that a block owns: which one, of how many.
struct Slice {
    unsigned long long index, count;
};

// Stores or adds a block's gradients, which begin at column `col` and end `left` columns behind it.
__device__ inline void hand_on(
    const Params& p, unsigned long long chunk, Slice slice, unsigned long long col, int left, const Gradients& gradients
) {
    const unsigned long long target = ACCUMULATE == 0 ? chunk : ACCUMULATE == 1 ? chunk % p.partial_rows : 0;
    const unsigned long long stride = partial_stride(p.cols);
#if ACCUMULATE == 1
    unsigned* lock = p.locks + target * slice.count + slice.index;
    acquire(lock);
#endif
    #pragma unroll
    for (int g = 0; g < GRADIENTS; ++g) {
        float* row = p.partials + (g * p.partial_rows + target) * stride + col;
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            const int count = left - k * STEP;
#if ACCUMULATE == 0
            // The padding is written too, so that whole words of four move.
            if (count > 0)
                #pragma unroll
                for (int i = 0; i < PACK; i += 4) {
                    const float* sums = &gradients.sums[g][k][i];
                    *reinterpret_cast<float4*>(row + k * STEP + i) = {sums[0], sums[1], sums[2], sums[3]};
                }
#else
            #pragma unroll
            for (int i = 0; i < PACK; ++i)
                if (i < count) accumulate(row + k * STEP + i, gradients.sums[g][k][i]);
#endif
        }
    }
#if ACCUMULATE == 1
    release(lock);
#endif
}
