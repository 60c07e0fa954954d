// Sums of dweight and dbias over rows: storing a block's partial sums and the final sum.

constexpr int GRADIENTS = HAS_DWEIGHT + HAS_DBIAS;

// Gradients that a thread sums while it works on rows: none if other threads have the columns.
constexpr int KEPT = IS_SPLIT ? 0 : GRADIENTS;

// Whether lanes can trade sums before they store them: lanes 2n and 2n + 1 have adjacent columns,
// and a pack is two vectors of four.
constexpr bool CAN_TRADE = PACK == 8 && THREADS_PER_ROW % 2 == 0;

// wdy of equation (7); dy if the weight comes before the norm. In layer norm it must not contract
// with the subtraction of its mean: in a row of one column the two are equal.
__device__ inline float weighted_gradient(float dy, float weight) {
    if constexpr (IS_WEIGHT_FIRST) return dy;
    return IS_LAYER ? __fmul_rn(dy, weight) : dy * weight;
}

// The normalized value times the weight, if that does not come before the norm.
__device__ inline float weighted(float x_hat, float weight) {
    if constexpr (IS_WEIGHT_FIRST) return x_hat;
    return x_hat * weight;
}

// mean_wdy_xhat of a row, equation (9), which is 0 where the clamped L2 norm was clamped: (23).
__device__ inline float unless_clamped(const Params& p, float rstd, float mean_wdy_xhat) {
    if constexpr (IS_CLAMPED) return rstd * p.eps >= __uint_as_float(CLAMPED_FROM) ? 0.0f : mean_wdy_xhat;
    else return mean_wdy_xhat;
}

// Stores a sum over all rows: rounded once if G is narrower than f32, or added to the previous
// value.
__device__ inline void store_gradient(G* gradient, float sum) {
    if constexpr (ADDS_TO_GRADIENTS) sum = to_f32(*gradient) + sum;
    *gradient = from_f32<G>(sum);
}

// Partial rows are padded so that each begins on 32 bytes.
__device__ inline unsigned long long partial_stride(unsigned long long cols) {
    return (cols + (ROW_MULTIPLE - 1)) / ROW_MULTIPLE * ROW_MULTIPLE;
}

// The sums of one thread over its rows: dweight, then dbias, for each of its columns.
struct Gradients {
    float sums[KEPT > 0 ? KEPT : 1][PACKS][PACK];

    __device__ void clear() {
        #pragma unroll
        for (int g = 0; g < KEPT; ++g)
            #pragma unroll
            for (int k = 0; k < PACKS; ++k)
                #pragma unroll
                for (int i = 0; i < PACK; ++i) sums[g][k][i] = 0.0f;
    }

    __device__ void add(int k, int i, float dy, float x_hat) {
        if constexpr (KEPT > 0 && HAS_DWEIGHT && !IS_WEIGHT_FIRST) sums[0][k][i] += dy * x_hat;
        if constexpr (KEPT > 0 && HAS_DBIAS) sums[HAS_DWEIGHT][k][i] += dy;
    }

    // A weight before the norm: adds to dweight, and replaces the gradient of h with that of x. See
    // math.md, equation (25).
    __device__ void pull_weight(int k, const float (&x)[PACK], const float (&weight)[PACK], float (&dx)[PACK]) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            if constexpr (KEPT > 0 && HAS_DWEIGHT) sums[0][k][i] += dx[i] * x[i];
            dx[i] *= weight[i];
        }
    }

    // For packs of eight. Two lanes trade halves, so that each access to a partial row fills whole
    // sectors of 32 bytes. The even lane then has the first four columns of each lane, and the odd
    // lane the last four of each. All lanes of a warp must call it together.
    __device__ void trade() {
        const bool is_odd = threadIdx.x % 2 != 0;
        #pragma unroll
        for (int g = 0; g < KEPT; ++g)
            #pragma unroll
            for (int k = 0; k < PACKS; ++k)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // A select, not a branch: divergent lanes would each store half a sector.
                    const float low = sums[g][k][i], high = sums[g][k][PACK - 4 + i];
                    const float got = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
                    sums[g][k][i] = is_odd ? got : low;
                    sums[g][k][PACK - 4 + i] = is_odd ? high : got;
                }
    }
};

// The column of sums i to i + 3 of pack k, counted from the thread's first column.
template <bool IS_TRADED>
__device__ inline int column_of(int k, int i) {
    return k * STEP + (IS_TRADED ? 2 * i - int(threadIdx.x % 2) * 4 : i);
}

// `left` of a thread without columns to store; small enough for every pack and trade.
constexpr int NOTHING_LEFT = -(1 << 30);

#if ACCUMULATE == 1
// Spin locks that also record whether their row was written. A lock's holder is always resident, so
// the lock is released at any occupancy.
enum Lock : unsigned { Untouched, Held, Written };

// Takes the lock, and returns whether the row is still unwritten.
__device__ inline bool acquire(unsigned* lock) {
    unsigned was = Held;
    if (threadIdx.x == 0) {
        while ((was = atomicExch(lock, unsigned(Held))) == Held) __nanosleep(32);
        __threadfence();
    }
    return __syncthreads_or(was == Untouched);
}

__device__ inline void release(unsigned* lock) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicExch(lock, unsigned(Written));
    }
}
#endif

// Adds to four values that other blocks add to concurrently.
__device__ inline void accumulate(float* to, const float* values) {
    // Compilers up to CUDA 12.0 do not know this instruction.
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
#else
    #pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(to + i, values[i]);
#endif
}

// The part of a partial row that a block owns: its index and the number of parts.
struct Slice {
    unsigned long long index, count;
};

// Stores or adds a thread's gradients, which begin at column `col` and end `left` columns later.
// Padding is written too, so that whole vectors of four are stored. All threads of the block must
// call it. TRADES: all threads of a row must pass `left` counted to the end of the row, because
// neighbours store each other's columns.
template <bool TRADES>
__device__ inline void store_partials(
    const Params& p, unsigned long long chunk, Slice slice, unsigned long long col, int left, Gradients& gradients
) {
    if constexpr (TRADES) gradients.trade();
    const unsigned long long target = ACCUMULATE == 0 ? chunk : chunk % p.partial_rows;
    const unsigned long long stride = partial_stride(p.cols);
    float* rows = p.workspace + group_workspace(p) + target * stride + col;
    const auto each = [&](auto visit) {
        #pragma unroll
        for (int g = 0; g < KEPT; ++g)
            #pragma unroll
            for (int k = 0; k < PACKS; ++k)
                #pragma unroll
                for (int i = 0; i < PACK; i += 4) {
                    const int column = column_of<TRADES>(k, i);
                    if (column < left) visit(rows + g * p.partial_rows * stride + column, &gradients.sums[g][k][i]);
                }
    };
#if ACCUMULATE == 1
    unsigned* lock = p.locks + group_workspace(p) + target * slice.count + slice.index;
    if (!acquire(lock))
        // Bypass the L1, which may hold the row from before another block's addition.
        each([](const float* from, float* sums) {
            const float4 before = __ldcg(reinterpret_cast<const float4*>(from));
            sums[0] += before.x; sums[1] += before.y; sums[2] += before.z; sums[3] += before.w;
        });
#endif
    each([](float* to, const float* sums) {
        if constexpr (ACCUMULATE == 2) accumulate(to, sums);
        else {
            // One 16-byte store: compilers split an assignment of a float4 here.
            const unsigned words[4] = {__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]), __float_as_uint(sums[3])};
            store<16>(to, words);
        }
    });
#if ACCUMULATE == 1
    release(lock);
#endif
}
