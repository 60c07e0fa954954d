// The second stage of dweight and dbias: adds partial rows in a fixed order and rounds once.
//
// THREADS_PER_ROW threads own PACK columns each, a float4; GROUPS of them share the partial rows and meet in shared memory.

static_assert(PACK == 4);

extern "C" __global__ void __launch_bounds__(THREADS_PER_ROW * GROUPS) reduce_partials(const __grid_constant__ Params p) {
    __shared__ float4 shared[GROUPS][THREADS_PER_ROW];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned long long stride = partial_stride(p.cols);
    const unsigned long long tiles = (p.cols + PACK * THREADS_PER_ROW - 1) / (PACK * THREADS_PER_ROW);
    wait_for_earlier_kernels();
    admit_next_kernel();

    const bool is_dbias = blockIdx.x >= tiles || !HAS_DWEIGHT;
    const unsigned long long tile = blockIdx.x >= tiles ? blockIdx.x - tiles : blockIdx.x;
    const unsigned long long col = (tile * THREADS_PER_ROW + thread) * PACK;
    const float* partials = p.partials + (HAS_DWEIGHT && is_dbias ? p.partial_rows * stride : 0);

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    if (col < p.cols) {
        #pragma unroll 8
        for (unsigned long long row = group; row < p.partial_rows; row += GROUPS) {
            const float4 value = __ldcg(reinterpret_cast<const float4*>(partials + row * stride + col));
            sum.x += value.x; sum.y += value.y; sum.z += value.z; sum.w += value.w;
        }
    }
    shared[group][thread] = sum;
    #pragma unroll
    for (int half = GROUPS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (group < half) {
            const float4 other = shared[group + half][thread];
            sum.x += other.x; sum.y += other.y; sum.z += other.z; sum.w += other.w;
            shared[group][thread] = sum;
        }
    }
    if (group > 0 || col >= p.cols) return;
    W* gradient = is_dbias ? p.dbias : p.dweight;
    const float values[PACK] = {sum.x, sum.y, sum.z, sum.w};
    #pragma unroll
    for (int i = 0; i < PACK; ++i)
        if (col + i < p.cols) gradient[col + i] = from_f32<W>(values[i]);
}
