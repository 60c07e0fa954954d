// The first phase of backward on a rank's columns: math.md, equations (7) and (17). A block, or a
// cluster of blocks, reads its rows once.

// `sum_pack` for products, with additions that never contract to FMA. The compiler could contract
// either operand, and the choice would make the bits of a row depend on the access width.
__device__ inline float sum_products(float (&values)[PACK]) {
    #pragma unroll
    for (int half = PACK / 2; half > 0; half /= 2)
        #pragma unroll
        for (int i = 0; i < PACK / 2; ++i)
            if (i < half) values[i] = __fadd_rn(values[i], values[i + half]);
    return values[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
partial_backward_statistics(const __grid_constant__ Params p, const __grid_constant__ Columns c) {
    __shared__ float exchange[2][GROUPS][NUMBERS][SENDERS];
    const Place place;
    RowSums<NUMBERS> sums(exchange, place.group, place.thread);
    wait_for_earlier_kernels();
    admit_next_kernel();

    for (unsigned long long row = place.first_row; row < p.rows; row += place.rows_apart) {
        const Statistics statistics(p, row);
        float numbers[NUMBERS] = {};
        #pragma unroll 2
        for (unsigned long long col = place.first_col; col < p.cols; col += STEP) {
            float weight[PACK], x_hat[PACK], dy[PACK], wdy[PACK], products[PACK];
            load_weight(p, col, weight);
            load_terms<false>(p, row, col, statistics, weight, x_hat, dy, wdy);
            #pragma unroll
            for (int i = 0; i < PACK; ++i) products[i] = wdy[i] * x_hat[i];
            if constexpr (IS_LAYER) numbers[0] += sum_products(wdy);
            numbers[NUMBERS - 1] += sum_products(products);
        }
        sums.sum(numbers);
        if (place.is_writer()) {
            #pragma unroll
            for (int i = 0; i < NUMBERS; ++i) c.numbers[row * NUMBERS + i] = numbers[i];
        }
    }
}
