// The second half of forward on a rank's columns: math.md, equation (16), then (4) to (6).

struct Statistics {
    float mean, rstd;

    __device__ Statistics(const Params& p, const Found& found) : mean(0.0f) {
        float squares;
        if constexpr (IS_LAYER) {
            mean = __fmul_rn(found.sum_of(0), p.share);
            squares = found.sum([&](unsigned rank) {
                const float columns = found.c.columns[rank];
                const float apart = __fsub_rn(own_mean(found.number(rank, 0), columns), mean);
                const float product = __fmul_rn(__fmul_rn(2.0f, apart), found.number(rank, 1));
                const float between = __fmul_rn(columns, __fmul_rn(apart, apart));
                return __fadd_rn(__fadd_rn(found.number(rank, 2), product), between);
            });
        } else squares = found.sum_of(0);
        float var = __fmul_rn(squares, p.share);
        // Layer norm's is no sum of squares, and rounding may leave it below 0. NaN stays.
        if (var < 0.0f) var = 0.0f;
        rstd = reciprocal_root(__fadd_rn(var, p.eps));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_given(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    const Turn turn;
    const Visit start = {turn.first_col, p.cols};
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = turn.first_row; row < p.rows; row += turn.rows_apart) {
        // On their way while the statistics are made.
        Pack<H> h[BATCH];
        load_packs(p, row, start, h);
        const Statistics statistics(p, Found(p, c, row));
        for (Visit at = start; at.is_inside();) {
            at = use_packs(at, h, [&](const Visit& visit, const Pack<H>& pack) {
                write_pack(p, row, visit, pack, statistics.mean, statistics.rstd);
            });
            load_packs(p, row, at, h);
        }
        if (turn.is_writer()) {
            if (IS_LAYER && p.mean) p.mean[row] = statistics.mean;
            if (p.rstd) p.rstd[row] = statistics.rstd;
        }
    }
}
