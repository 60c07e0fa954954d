// Backward for rows that do not fit on chip, in two passes: math.md, equations (7) to (10), then
// (10) to (12).

// mean_wdy_xhat and mean_wdy of every row. A block, or a cluster of blocks, has one row at a time.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward_row_sums(const __grid_constant__ Params p) {
    __shared__ float exchange[2][GROUPS][2][SENDERS];
    RowSums<2> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        const Statistics statistics(p, row);
        float totals[2] = {};
        // Sums packs, then blocks of packs, then all blocks. One running sum would be a longer
        // chain than math.md allows.
        for (unsigned long long col = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK; col < p.cols;) {
            const unsigned long long end = min(p.cols, col + (unsigned long long)BLOCK_VISITS * STEP);
            float block[2] = {};
            // The unroll factors are measured (docs/internals/tried.md).
            #pragma unroll (IS_LAYER ? 1 : 4)
            for (; col < end; col += STEP) {
                float weight[PACK], x_hat[PACK], dy[PACK], wdy[PACK], parts[2] = {};
                load_weight(p, col, weight);
                load_terms<false>(p, row, col, statistics, weight, x_hat, dy, wdy);
                #pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    parts[0] += wdy[i] * x_hat[i];
                    parts[1] += wdy[i];
                }
                block[0] += parts[0];
                block[1] += parts[1];
            }
            totals[0] += block[0];
            totals[1] += block[1];
        }
        sums.sum(totals);
        if (threadIdx.x == 0 && cluster_rank() == 0) {
            p.row_sums[group_workspace(p) + 2 * row] = totals[0] * p.inv_cols;
            p.row_sums[group_workspace(p) + 2 * row + 1] = IS_LAYER ? totals[1] * p.inv_cols : 0.0f;
        }
    }
}

// dx, and the partial sums of dweight and dbias.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward_columns(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    admit_next_kernel();
    write_columns(p, [&](unsigned long long row) {
        const float* found = p.row_sums + group_workspace(p) + 2 * row;
        return Averages{found[0], found[1]};
    });
}
