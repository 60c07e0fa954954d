// The second phase of forward on a rank's columns: math.md, equation (16), then (4) to (6).

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_with_statistics(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    const Place place;
    const Visit start = {place.first_col, p.cols};
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = place.first_row; row < p.rows; row += place.rows_apart) {
        // Loads overlap the computation of the statistics.
        Pack<H> h[BATCH];
        load_packs(p, row, start, h);
        const Statistics statistics(p, RankNumbers(c, c.numbers + row * NUMBERS, p.rows * NUMBERS));
        for (Visit at = start; at.is_inside();) {
            at = use_packs(at, h, [&](const Visit& visit, const Pack<H>& pack) {
                write_pack(p, row, visit, pack, statistics.mean, statistics.rstd);
            });
            load_packs(p, row, at, h);
        }
        if (place.is_writer()) {
            if (IS_LAYER && p.mean) p.mean[row] = statistics.mean;
            if (p.rstd) p.rstd[row] = statistics.rstd;
        }
    }
}
