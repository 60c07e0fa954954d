// The second stage of dweight and dbias: adds partial rows in a fixed order and stores the sum.
//
// THREADS_PER_ROW threads own PACK columns each, one float4. GROUPS such groups share the partial
// rows and combine with shuffles, then through shared memory. A thread loads UNROLL rows at once.

static_assert(PACK == 4 && THREADS_PER_ROW <= 32 && THREADS % 32 == 0);

__device__ inline void add(float4& sum, float4 other) {
    sum.x += other.x; sum.y += other.y; sum.z += other.z; sum.w += other.w;
}

// Sums over the groups of a warp.
__device__ inline void add_in_warp(float4& sum) {
    #pragma unroll
    for (int distance = THREADS_PER_ROW; distance < 32; distance *= 2) {
        float4 other;
        other.x = __shfl_xor_sync(~0u, sum.x, distance); other.y = __shfl_xor_sync(~0u, sum.y, distance);
        other.z = __shfl_xor_sync(~0u, sum.z, distance); other.w = __shfl_xor_sync(~0u, sum.w, distance);
        add(sum, other);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) reduce_partials(const __grid_constant__ Params p) {
    constexpr int PARTS = THREADS / 32;
    __shared__ float4 shared[PARTS][THREADS_PER_ROW];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned long long stride = partial_stride(p.cols);
    const unsigned long long tiles = (p.cols + PACK * THREADS_PER_ROW - 1) / (PACK * THREADS_PER_ROW);
    const bool is_dbias = blockIdx.x >= tiles || !HAS_DWEIGHT;
    const unsigned long long tile = blockIdx.x >= tiles ? blockIdx.x - tiles : blockIdx.x;
    const unsigned long long col = (tile * THREADS_PER_ROW + thread) * PACK;
    const float* partials = p.workspace + group_workspace(p) + (HAS_DWEIGHT && is_dbias ? p.partial_rows * stride : 0) + col;
    wait_for_earlier_kernels();
    admit_next_kernel();

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    if (col < p.cols) {
        #pragma unroll 1
        for (unsigned long long row = group; row < p.partial_rows; row += GROUPS * UNROLL) {
            // Issue all loads before the first addition.
            float4 values[UNROLL];
            #pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
                const unsigned long long at = row + i * GROUPS;
                if (at < p.partial_rows) values[i] = __ldcg(reinterpret_cast<const float4*>(partials + at * stride));
            }
            #pragma unroll
            for (int i = 0; i < UNROLL; ++i) add(sum, values[i]);
        }
    }
    add_in_warp(sum);
    if (threadIdx.x % 32 < THREADS_PER_ROW) shared[threadIdx.x / 32][thread] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    constexpr int EVERY = THREADS_PER_ROW < 32 ? 32 / THREADS_PER_ROW : 1;
    sum = {0.0f, 0.0f, 0.0f, 0.0f};
    #pragma unroll
    for (int i = 0; i < (PARTS + EVERY - 1) / EVERY; ++i)
        if (i * EVERY + group < PARTS) add(sum, shared[i * EVERY + group][thread]);
    add_in_warp(sum);
    if (group > 0 || col >= p.cols) return;
    G* gradient = (is_dbias ? p.dbias : p.dweight) + group_column(p);
    const float values[PACK] = {sum.x, sum.y, sum.z, sum.w};
    #pragma unroll
    for (int i = 0; i < PACK; ++i)
        if (col + i < p.cols) store_gradient(gradient + col + i, values[i]);
}
