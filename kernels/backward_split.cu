// Backward in one launch, for matrices that fit the L2: math.md, equations (7) to (12). dweight and
// dbias need no sum over a row. So some blocks have rows and write dx; the others have columns and
// write dweight and dbias. x and dy are read twice, but there are no partial rows, and blocks of
// one kind never wait for blocks of the other.

// A block of columns has COLUMN_LANES packs of columns, and shares the rows with the other blocks
// of its cluster.
constexpr int COLUMN_WIDTH = COLUMN_LANES * PACK;
constexpr int COLUMN_GROUPS = THREADS / COLUMN_LANES;
constexpr int COLUMN_WARPS = THREADS / 32;
static_assert(CLUSTER == 1, "a row has one block");
static_assert(COLUMN_LANES <= 32 && THREADS % 32 == 0, "lanes that share columns are found by shuffles");

// Rows that a thread loads at once: fewer of more matrices.
constexpr int COLUMN_BATCH = BeforePull::READS_MORE || AfterPull::READS_MORE ? 2 : 4;

// The sums that threads, then blocks, exchange: columns of dweight, then of dbias.
using ColumnSums = float[GRADIENTS][COLUMN_WIDTH];

__device__ inline unsigned cluster_size() {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}

// A barrier of the cluster, with the size given at launch; of the block on devices without
// clusters.
__device__ inline void all_blocks_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Reads the value at the same address of shared memory in block `rank` of the cluster.
__device__ inline float load_of_block(const float* address, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    float value;
    const unsigned own = unsigned(__cvta_generic_to_shared(address));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(of_block(own, rank)) : "memory");
    return value;
#else
    return *address;
#endif
}

// Loads a pack of one row: all of it, or the first `left` columns.
template <class E>
__device__ inline Pack<E> load_column_pack(const E* from, int left) {
    const bool is_part = HAS_TAIL && left < PACK;
    if (IS_HALF_ACCESS<E> || is_part) return load_elements(from, is_part ? left : PACK);
    return load_whole<Hint::EvictFirst>(from);
}

// Adds dy * x_hat and dy, of the norm, over every `stride`-th row from `row` on.
__device__ inline void sum_rows(
    const Params& p, unsigned long long row, unsigned long long stride, unsigned long long col, int left, float (&sums)[GRADIENTS][PACK]
) {
    const auto load = [&](const auto* from) { return load_column_pack(from, left); };
    for (; row < p.rows; row += COLUMN_BATCH * stride) {
        Pack<R> x[COLUMN_BATCH] = {};
        Pack<T> dy[COLUMN_BATCH] = {};
        BeforePull::Values befores[COLUMN_BATCH] = {};
        AfterPull::Values pulls[COLUMN_BATCH] = {};
        Statistics statistics[COLUMN_BATCH] = {};
        #pragma unroll
        for (int u = 0; u < COLUMN_BATCH; ++u) {
            const unsigned long long of = row + u * stride;
            if (of >= p.rows) continue;
            x[u] = load(ROW(x, of) + col);
            dy[u] = load(ROW(dy, of) + col);
            befores[u] = BeforePull::values(At{p, of, col, left}, load);
            pulls[u] = AfterPull::values<false>(At{p, of, col, left}, load);
            statistics[u] = {IS_LAYER ? p.mean[statistic(of)] : 0.0f, p.rstd[statistic(of)]};
        }
        #pragma unroll
        for (int u = 0; u < COLUMN_BATCH; ++u) {
            // A missing row adds nothing.
            if (row + u * stride >= p.rows) continue;
            float x_hat[PACK], values[PACK];
            BeforePull::unpack_h(x[u], befores[u], x_hat);
            unpack(dy[u], values);
            #pragma unroll
            for (int i = 0; i < PACK; ++i) {
                x_hat[i] = (x_hat[i] - statistics[u].mean) * statistics[u].rstd;
                values[i] = AfterPull::pull(pulls[u], i, values[i]);
                if constexpr (HAS_DWEIGHT) sums[0][i] += values[i] * x_hat[i];
                if constexpr (HAS_DBIAS) sums[HAS_DWEIGHT][i] += values[i];
            }
        }
    }
}

// The work of column block `index`.
__device__ inline void run_columns(const Params& p, unsigned index, char* shared) {
    ColumnSums* of_warps = reinterpret_cast<ColumnSums*>(shared);
    ColumnSums& block_sums = of_warps[COLUMN_WARPS];
    const unsigned blocks = cluster_size(), rank = index % blocks;
    const unsigned long long begin = (unsigned long long)(index / blocks) * COLUMN_WIDTH;
    const unsigned lane = threadIdx.x % COLUMN_LANES, group = threadIdx.x / COLUMN_LANES;
    const unsigned long long col = begin + lane * PACK;
    wait_for_earlier_kernels();
    admit_next_kernel();

    float sums[GRADIENTS][PACK] = {};
    if (col < p.cols) {
        const int left = int(min(p.cols - col, (unsigned long long)PACK));
        sum_rows(p, rank * COLUMN_GROUPS + group, blocks * COLUMN_GROUPS, col, left, sums);
    }
    #pragma unroll
    for (int g = 0; g < GRADIENTS; ++g)
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            #pragma unroll
            for (int distance = COLUMN_LANES; distance < 32; distance *= 2) sums[g][i] += __shfl_xor_sync(~0u, sums[g][i], distance);
            if (threadIdx.x % 32 < COLUMN_LANES) of_warps[threadIdx.x / 32][g][lane * PACK + i] = sums[g][i];
        }
    __syncthreads();
    for (unsigned at = threadIdx.x; at < GRADIENTS * COLUMN_WIDTH; at += THREADS) {
        const unsigned g = at / COLUMN_WIDTH, place = at % COLUMN_WIDTH;
        float sum = 0.0f;
        #pragma unroll 8
        for (int warp = 0; warp < COLUMN_WARPS; ++warp) sum += of_warps[warp][g][place];
        block_sums[g][place] = sum;
    }
    all_blocks_barrier();
    if (rank == 0)
        for (unsigned at = threadIdx.x; at < GRADIENTS * COLUMN_WIDTH; at += THREADS) {
            const unsigned g = at / COLUMN_WIDTH, place = at % COLUMN_WIDTH;
            float sum = block_sums[g][place];
            for (unsigned block = 1; block < blocks; ++block) sum += load_of_block(&block_sums[g][place], block);
            G* gradient = (HAS_DWEIGHT && g == 0 ? p.dweight : p.dbias) + group_column(p);
            if (begin + place < p.cols) store_gradient(gradient + begin + place, sum);
        }
    // Keep shared memory until other blocks have read it.
    all_blocks_barrier();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward_split(const __grid_constant__ Params p) {
    // Aligned to 128 bytes: a line that cp.async copies is then one line of shared memory, which
    // takes half as long as two.
    extern __shared__ __align__(128) char shared[];
    if (blockIdx.x < p.chunks) run_rows(p, shared);
    else run_columns(p, blockIdx.x - unsigned(p.chunks), shared);
}
