// The second phase of backward on a rank's columns: math.md, equation (18), then (10) to (12).

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
backward_with_statistics(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    wait_for_earlier_kernels();
    admit_next_kernel();
    write_columns(p, [&](unsigned long long row) {
        const RankNumbers found(c, c.numbers + row * NUMBERS, p.rows * NUMBERS);
        return Averages{__fmul_rn(found.sum_of(NUMBERS - 1), p.inv_cols), IS_LAYER ? __fmul_rn(found.sum_of(0), p.inv_cols) : 0.0f};
    });
}
