// All-gather of the numbers of rows with columns divided among ranks: math.md, equations (15) and
// (17). `all` is (ranks, rows, numbers) and already holds this rank's numbers.
//
// A thread has one row at a time, and the numbers of a row fit one slot. A thread sends all its
// rows before it waits for the first. All blocks are resident at once (plan/gather_numbers.rs) and
// all ranks have the same rows, so every awaited slot has been sent.

static_assert(PACK == 4 && sizeof(T) == 4, "a slot has four numbers");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
gather_numbers(const __grid_constant__ Params p, const __grid_constant__ Peers g, float* all, unsigned numbers) {
    const unsigned long long first = blockIdx.x * (unsigned long long)THREADS + threadIdx.x;
    const unsigned long long step = gridDim.x * (unsigned long long)THREADS;
    const auto of_row = [&](unsigned rank, unsigned long long row) {
        return all + (rank * p.rows + g.first_row + row) * numbers;
    };
    wait_for_earlier_kernels();

    Group group(g, PACK);
    for (unsigned long long row = first; row < g.rows; row += step) {
        const float* own = of_row(g.rank, row);
        Pack<T> slot = {};
        #pragma unroll
        for (int i = 0; i < MOST_NUMBERS; ++i)
            if (i < numbers) slot.words[i] = __float_as_uint(own[i]);
        group.send(group.slot(row, 0), without_empty(slot));
    }
    admit_next(g);
    for (unsigned long long row = first; row < g.rows; row += step) {
        Pack<T> slots[1][RANKS];
        group.receive(group.slot(row, 0), [](int) { return true; }, slots);
        #pragma unroll
        for (unsigned rank = 0; rank < RANKS; ++rank) {
            if (rank == g.rank) continue;
            float* to = of_row(rank, row);
            #pragma unroll
            for (int i = 0; i < MOST_NUMBERS; ++i)
                if (i < numbers) to[i] = __uint_as_float(slots[0][rank].words[i]);
        }
    }
    // After this barrier all threads have read the epoch.
    __syncthreads();
    group.end();
}
