// Hands every rank what all have found of the rows whose columns are divided among them: math.md, equations (15) and (17). `all` is
// (ranks, rows, numbers), with this rank's share in its place.
//
// A thread has a row at a time, and the numbers of a row are one slot. All of a thread's rows are sent before the first is waited for.
// All blocks are on the device at once (plan/gather_numbers.rs), and the ranks' rows are the same: whoever is waited for has been sent.

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
    // All threads have read the epoch.
    __syncthreads();
    group.end();
}
