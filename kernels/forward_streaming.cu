// Forward for rows that fit nowhere on chip: math.md, equations (1) to (6). A block, or a cluster of them, reads
// its row once for each sum and once more for y.

__device__ inline void write_y(const Params& p, unsigned long long row, Visit at, float mean, float rstd) {
    for (; at.is_inside(); at.advance()) {
        const Pack<H> h = load_h(p, row, at);
        float y[PACK], weight[PACK], bias[PACK];
        unpack(h, y);
        unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + at.col, 0, at.left()), p.weight_offset, weight);
        unpack(load_parameter<HAS_BIAS>(p.bias + at.col, 0, at.left()), bias);
        normalize(y, mean, rstd, weight, bias);
#if HAS_RESIDUAL
        if (p.residual_out.data) store_pack(ROW(residual_out, row) + at.col, 0, at.left(), h);
#endif
        store_pack(ROW(y, row) + at.col, 0, at.left(), pack<T>(y));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_streaming(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][1][SENDERS];
    const Visit start = {(unsigned long long)(cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK, p.cols};
    RowSums<1> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        float mean[1] = {0.0f}, rstd[1];
        if constexpr (IS_LAYER) {
            mean[0] = sum_part<false>(p, row, start, 0.0f);
            sums.sum(mean);
            mean[0] *= p.share;
        }
        rstd[0] = sum_part<true>(p, row, start, mean[0]);
        sums.sum(rstd);
        rstd[0] = reciprocal_root(rstd[0] * p.share + p.eps);
        write_y(p, row, start, mean[0], rstd[0]);
        if (threadIdx.x == 0 && cluster_rank() == 0) {
            if (IS_LAYER && p.mean) p.mean[row] = mean[0];
            if (p.rstd) p.rstd[row] = rstd[0];
        }
    }
}
