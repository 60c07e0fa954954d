// The first phase of forward on a rank's columns: math.md, equations (1) and (15). A block, or a
// cluster of blocks, reads its rows once (layer norm: twice), unless they stay in registers.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
partial_statistics(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const Place place;
    const Visit start = {place.first_col, p.cols};
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, place.group, place.thread);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = place.first_row; row < p.rows; row += place.rows_apart) {
        Pack<H> h[BATCH];
        if constexpr (KEEPS_ROW) load_packs(p, row, start, h);
        const auto each = [&](const auto& use) {
            const auto use_visit = [&](const Visit& at, const Pack<H>& pack) { use(pack, 0, at.left()); };
            if constexpr (KEEPS_ROW) use_packs(start, h, use_visit);
            else
                for (Visit at = start; at.is_inside(); at = use_packs(at, h, use_visit)) load_packs(p, row, at, h);
        };
        float numbers[NUMBERS];
        find_numbers(p, sums, each, numbers);
        if (place.is_writer()) {
            #pragma unroll
            for (int i = 0; i < NUMBERS; ++i) c.numbers[row * NUMBERS + i] = numbers[i];
        }
    }
}
