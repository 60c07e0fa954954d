// Forward for rows that do not fit on chip: math.md, equations (1) to (6). A block, or a cluster of
// blocks, reads its row once for each sum and once more for y.

__device__ inline void write_y(const Params& p, unsigned long long row, Visit at, float mean, float rstd) {
    for (; at.is_inside(); at.advance()) write_pack(p, row, at, load_h(p, row, at), mean, rstd);
}

#if NORMS_TWICE
// `load_h` and `write_y` for the second norm. Each thread reads the sums that it stored itself.
__device__ inline Pack<R> load_sum(const Params& p, unsigned long long row, const Visit& at) {
    return load_pack<Reuse::ByNone>(ROW(residual_out, row) + at.col, 0, at.left());
}

__device__ inline void write_next_y(const Params& p, unsigned long long row, Visit at, float mean, float rstd) {
    for (; at.is_inside(); at.advance()) {
        float y[PACK], weight[PACK], bias[PACK];
        unpack(load_sum(p, row, at), y);
        unpack_weight<HAS_NEXT_WEIGHT>(
            load_parameter<HAS_NEXT_WEIGHT>(p.next_weight + at.col, 0, at.left()), p.weight_offset, weight);
        unpack(load_parameter<HAS_NEXT_BIAS>(p.next_bias + at.col, 0, at.left()), bias);
        normalize<HAS_NEXT_BIAS>(y, mean, rstd, weight, bias);
        store_pack(ROW(y, row) + at.col, 0, at.left(), pack<T>(y));
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_streaming(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][ABOUT_MEAN][SENDERS];
    const Visit start = {(unsigned long long)(cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK, p.cols};
    RowSums<ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        float mean[1] = {0.0f}, rstd[1];
        find_statistics(p, sums, [&](const Visit& at) { return load_h(p, row, at); }, start, mean, rstd);
        write_y(p, row, start, mean[0], rstd[0]);
#if NORMS_TWICE
        float next_mean[1] = {0.0f}, next_rstd[1];
        find_statistics(p, sums, [&](const Visit& at) { return load_sum(p, row, at); }, start, next_mean, next_rstd);
        write_next_y(p, row, start, next_mean[0], next_rstd[0]);
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
