// Forward for rows that do not fit the L1: math.md, equations (1) to (6), (13) and (14).
//
// When: rows that no cluster's registers hold and that fit shared memory.
// Who: a block, or a cluster of blocks, has one row at a time.
// Where: the block copies its row to shared memory. A thread reads back only data that it copied
// itself, so only the sums need barriers. BATCH packs are read from there together. Rows are not
// prefetched: while one block sums a row, other blocks of the same multiprocessor load theirs. With
// PREFETCHES_WEIGHT the weights are loaded with the row, and the bias during the exchange of the
// last sum, when the path from the L2 is idle.

// What a row has in shared memory. An empty part takes no room.
struct Slot : Before::Slot, After::Slot {
    __device__ Before::Slot& before() { return *this; }
    __device__ After::Slot& after() { return *this; }
};

template <bool EXISTS>
__device__ inline void load_parameters(const W* first, int left, Pack<W> (&packs)[PACKS]) {
    #pragma unroll
    for (int k = 0; k < PACKS; ++k) packs[k] = load_parameter<EXISTS>(first, k, left);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) forward_long(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    Slot& slot = *reinterpret_cast<Slot*>(shared);
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + threadIdx.x) * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    for (unsigned long long row = blockIdx.x / CLUSTER; row < p.rows; row += gridDim.x / CLUSTER) {
        const auto at = [&] { return At{p, row, first, left}; };
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            slot.before().start(at(), k);
            slot.after().start(at(), k);
        }
        if constexpr (!Before::IS_READ_ONCE) close_batch();
        Pack<W> weights[PACKS], biases[PACKS];
        if constexpr (PREFETCHES_WEIGHT) load_parameters<Norm::SCALES>(Norm::weight(p) + first, left, weights);
        wait_copies<0>();
        slot.before().finish(at());

        // Normalizes the packs of a part of the slot; `put` gets the values of each, and `then`
        // runs before the statistics are stored.
        const auto run = [&](auto norm, auto& part, const auto& put, const auto& then) {
            using N = decltype(norm);
            constexpr bool IS_EARLY = PREFETCHES_WEIGHT && N::IS_FIRST;
            float mean[1] = {0.0f}, rstd[1];
            const auto meanwhile = [&] {
                if constexpr (IS_EARLY) load_parameters<N::SHIFTS>(N::bias(p) + first, left, biases);
            };
            find_statistics<BATCH>(p, sums, [&](int, int k) { return part.pack(k); }, left, meanwhile, mean, rstd);

            #pragma unroll (IS_EARLY ? PACKS : BATCH)
            for (int k = 0; k < PACKS; ++k) {
                float y[PACK], weight[PACK], bias[PACK];
                unpack(part.pack(k), y);
                if constexpr (IS_EARLY) {
                    unpack_weight<N::SCALES>(weights[k], p.weight_offset, weight);
                    unpack(biases[k], bias);
                } else {
                    unpack_weight<N::SCALES>(load_parameter<N::SCALES>(N::weight(p) + first, k, left), p.weight_offset, weight);
                    unpack(load_parameter<N::SHIFTS>(N::bias(p) + first, k, left), bias);
                }
                normalize<N::SHIFTS>(y, mean[0], rstd[0], weight, bias);
                put(k, y);
            }
            then();
            store_statistics<N>(p, row, mean[0], rstd[0]);
        };
        const auto put = [&](int k, const float (&y)[PACK]) { slot.after().put(at(), k, y); };
        run(Norm{}, slot.before(), put, [&] {
            After::then(slot.after(), [&](auto next, auto& sum) {
                run(next, sum, [&](int k, const float (&y)[PACK]) { Store::put(at(), k, y, {}); }, [] {});
            });
        });
    }
}
