// Forward on a rank's columns in one kernel per rank: math.md, equations (1), (15), (16), then (4)
// to (6).
//
// A block has one row at a time, and a thread the same columns in each of its rows. The numbers of
// a row fit one slot. For each other rank, one thread sends this rank's slot and waits for that
// rank's slot. Before a block waits for the numbers of its current row, it has loaded the row after
// next and sent the numbers of the next row. All blocks are resident at once
// (plan/forward_exchange.rs) and take their rows in order, so the first row that is incomplete on
// some rank has been sent by its blocks on every rank. If a row is too long for this kernel, the
// rank runs gather_numbers.cu, which sends the same slots.
//
// In place is safe: the thread that stores y and the sum over x and the residual has read those
// elements before.

static_assert(NUMBERS * sizeof(float) <= Pack<T>::BYTES, "the numbers of a row fit one slot");

static_assert(!After::GOES_ON, "the numbers of a next norm are not exchanged");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_exchange(const __grid_constant__ Params p, const __grid_constant__ Peers g, const __grid_constant__ Columns c) {
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    __shared__ float found[2][RANKS][NUMBERS];
    const unsigned first = threadIdx.x * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    admit_next(g);
    Group group(g, PACK);
    // `row` counts from the first row of this launch; `of_call` converts it to a row of the
    // tensors.
    const auto of_call = [&](unsigned long long row) { return g.first_row + row; };
    const auto at = [&](unsigned long long row) { return At{p, of_call(row), first, left}; };
    const auto load = [&](unsigned long long row, Pack<H> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = Before::load<Hint::EvictFirst>(at(row), k);
    };
    // Computes this rank's numbers of a row and sends them.
    const auto find = [&](unsigned long long row, const Pack<H> (&h)[PACKS]) {
        const auto each = [&](const auto& use) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) use(h[k], k, left);
        };
        float numbers[NUMBERS];
        find_numbers(p, sums, each, numbers);
        Pack<T> slot = {};
        #pragma unroll
        for (int i = 0; i < NUMBERS; ++i) slot.words[i] = __float_as_uint(numbers[i]);
        slot = without_empty(slot);
        if (threadIdx.x < RANKS && threadIdx.x != g.rank) group.send_to(threadIdx.x, group.slot(row, 0), slot);
        return slot;
    };

    const auto exists = [&](unsigned long long row) { return row < g.rows; };
    Pack<H> h[PACKS], next[PACKS], after[PACKS];
    load(blockIdx.x, h);
    if (exists(blockIdx.x + gridDim.x)) load(blockIdx.x + gridDim.x, next);
    Pack<T> own = find(blockIdx.x, h), own_next = {};
    const Parameters<PREFETCHES_WEIGHT> parameters(p, first, left);
    unsigned turn = 0;
    for (unsigned long long row = blockIdx.x; exists(row); row += gridDim.x) {
        if (exists(row + 2 * gridDim.x)) load(row + 2 * gridDim.x, after);
        if (exists(row + gridDim.x)) own_next = find(row + gridDim.x, next);
        if (threadIdx.x < RANKS) {
            const unsigned rank = threadIdx.x;
            const Pack<T> slot = rank == g.rank ? own : group.receive_from(rank, group.slot(row, 0));
            #pragma unroll
            for (int i = 0; i < NUMBERS; ++i) found[turn][rank][i] = __uint_as_float(slot.words[i]);
        }
        // `found[turn]` is written again two rows later, after the barrier of the next row.
        __syncthreads();
        const Statistics statistics(p, RankNumbers(c, found[turn][0], NUMBERS));
        turn ^= 1;

        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float y[PACK], weight[PACK], bias[PACK];
            unpack(h[k], y);
            unpack_weight(parameters.weight(k), p.weight_offset, weight);
            unpack(parameters.bias(k), bias);
            normalize(y, statistics.mean, statistics.rstd, weight, bias);
            Before::store_h(at(row), k, h[k]);
            After::put(at(row), k, y, After::load<Hint::EvictFirst>(at(row), k));
            h[k] = next[k];
            next[k] = after[k];
        }
        own = own_next;
        store_statistics<Norm>(p, of_call(row), statistics.mean, statistics.rstd);
    }
    group.end();
}
