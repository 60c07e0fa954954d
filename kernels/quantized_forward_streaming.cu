// Forward to codes for rows that do not stay on chip: math.md, equations (1) to (6) and (Q1) to
// (Q5). A block, or a cluster of blocks, reads its row once for each sum, once for the largest
// magnitude if the scale needs it first, and once more for the codes.

__device__ inline void load_parameters(const Params& p, const Visit& at, float (&weight)[PACK], float (&bias)[PACK]) {
    unpack_weight<Norm::SCALES>(load_parameter<Norm::SCALES>(Norm::weight(p) + at.col, 0, at.left()), p.weight_offset, weight);
    unpack(load_parameter<HAS_BIAS>(Norm::bias(p) + at.col, 0, at.left()), bias);
}

// What waits for the norm of a pack.
__device__ inline After::Waiting load_waiting(const Params& p, unsigned long long row, const Visit& at) {
    return After::load<Hint::EvictFirst>(At{p, row, at.col, at.left()}, 0);
}

// The largest |v| of the thread's columns.
__device__ inline float find_amax(const Params& p, unsigned long long row, Visit at, float mean, float rstd) {
    float magnitude = 0.0f;
    for (; at.is_inside(); at.advance()) {
        float v[PACK], weight[PACK], bias[PACK];
        unpack(load_h(p, row, at), v);
        load_parameters(p, at, weight, bias);
        quantized_values<false>(p, row, at.col, 0, at.left(), v, mean, rstd, weight, bias, load_waiting(p, row, at));
        magnitude = largest_of(v, 0, at.left(), magnitude);
    }
    return magnitude;
}

// Writes codes, scales of blocks, y and residual_out. Returns the largest |v| if FINDS_AMAX. With
// scales of blocks, all lanes of a warp stay in the loop while any lane has columns.
__device__ inline float write_row(
    const Params& p, unsigned long long row, Visit at, float mean, float rstd, float power, float reciprocal
) {
    static_assert(CHUNK == 1, "a block of columns is one warp's at most");
    const unsigned ahead = SCALE == BY_BLOCK ? threadIdx.x % 32 * PACK : 0;
    float largest = 0.0f;
    for (; at.col < at.cols + ahead; at.advance()) {
        const Pack<H> h = load_h(p, row, at);
        float v[PACK], weight[PACK], bias[PACK];
        unpack(h, v);
        load_parameters(p, at, weight, bias);
        quantized_values<true>(p, row, at.col, 0, at.left(), v, mean, rstd, weight, bias, load_waiting(p, row, at));
        Before::store_h(At{p, row, at.col, at.left()}, 0, h);
        if constexpr (FINDS_AMAX) largest = largest_of(v, 0, at.left(), largest);
        if constexpr (SCALE == BY_BLOCK) {
            const Scale scale = scale_of(p, reduce_lanes<SET_LANES, Larger>(largest_of(v, 0, at.left(), 0.0f)));
            reciprocal = scale.reciprocal;
            if (at.col % SET == 0 && at.is_inside()) store_scale(p, row, at.col / SET, scale);
        }
        if constexpr (SCALE == GIVEN) {
            #pragma unroll
            for (int i = 0; i < PACK; ++i) v[i] *= power;
        }
        write_codes(p, row, at.col, 0, at.left(), v, reciprocal);
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) quantized_forward_streaming(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const Visit start = {(unsigned long long)(cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK, p.cols};
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();
    admit_next_kernel();
    const Divisor given(SCALE == GIVEN ? *p.scale : 1.0f);
    float largest = 0.0f; // over all rows of the thread

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        float mean[1] = {0.0f}, rstd[1];
        find_statistics(p, sums, [&](const Visit& at) { return load_h(p, row, at); }, start, mean, rstd);

        float amax[1] = {0.0f}, reciprocal = given.reciprocal;
        if constexpr (SCALE == BY_ROW || SCALE == FIND) amax[0] = find_amax(p, row, start, mean[0], rstd[0]);
        if constexpr (SCALE == FIND) {
            largest = larger(largest, amax[0]);
            continue;
        }
        if constexpr (SCALE == BY_ROW) {
            sums.template reduce<0>(amax);
            const Scale scale = scale_of(p, amax[0]);
            reciprocal = scale.reciprocal;
            if (threadIdx.x == 0 && cluster_rank() == 0) store_scale(p, row, 0, scale);
        }
        largest = larger(largest, write_row(p, row, start, mean[0], rstd[0], given.power, reciprocal));
        store_statistics<Norm>(p, row, mean[0], rstd[0]);
    }
    if constexpr (SCALE == FIND) finish_amax(p, largest);
    else if constexpr (FINDS_AMAX) fold_amax(p.amax, largest);
}
