// The first half of forward on a rank's columns: math.md, equations (1) and (15). A block, or a cluster of them, reads its rows once, for
// layer norm twice, unless they stay in registers.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
column_statistics(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    __shared__ float exchange[2][GROUPS][IS_LAYER ? 2 : 1][SENDERS];
    const Turn turn;
    const Visit start = {turn.first_col, p.cols};
    RowSums<IS_LAYER ? 2 : 1> sums(exchange, turn.group, turn.thread);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = turn.first_row; row < p.rows; row += turn.rows_apart) {
        Pack<H> h[BATCH];
        if constexpr (IS_HELD) load_packs(p, row, start, h);
        const auto each = [&](const auto& use) {
            if constexpr (IS_HELD) use_packs(start, h, use);
            else
                for (Visit at = start; at.is_inside(); at = use_packs(at, h, use)) load_packs(p, row, at, h);
        };
        float numbers[NUMBERS], terms[PACK] = {};
        each([&](const Visit& at, const Pack<H>& pack) { add_pack<!IS_LAYER>(pack, 0.0f, 0, at.left(), terms); });
        float sum[1] = {sum_pack(terms)};
        sums.sum(sum);
        numbers[0] = sum[0];
        if constexpr (IS_LAYER) {
            const float mean = own_mean(sum[0], float(p.cols));
            float deviations[PACK] = {}, squares[PACK] = {};
            each([&](const Visit& at, const Pack<H>& pack) {
                add_pack<true>(pack, mean, 0, at.left(), squares);
                float values[PACK];
                unpack(pack, values);
                #pragma unroll
                for (int i = 0; i < PACK; ++i)
                    if (is_in_row(0, i, at.left())) deviations[i] += values[i] - mean;
            });
            float both[2] = {sum_pack(deviations), sum_pack(squares)};
            sums.sum(both);
            numbers[1] = both[0], numbers[2] = both[1];
        }
        if (turn.is_writer()) {
            #pragma unroll
            for (int i = 0; i < NUMBERS; ++i) c.numbers[row * NUMBERS + i] = numbers[i];
        }
    }
}
