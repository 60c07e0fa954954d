// Forward of the sum of all ranks' x, with the packs of each row divided among owners: math.md,
// equations (1') and (2) to (6), in one kernel per rank.
//
// A rank sends the packs of its part to their owners. An owner adds the parts of a pack and the
// residual, and sends the sum to all ranks. Every rank then has the whole row, and normalizes it. A
// part and a sum use the same slot: at the owner of a pack the slot of another rank gets that rank's
// part, elsewhere the slot of the owner gets the sum. The packs of a warp have one owner, and the
// next packs and the next row another, so that all ranks and all warps add alike.
//
// A block has one row in each step, and a thread the same columns in each of its rows. Parts are sent
// two steps before their row is normalized, and sums are made one step before: they travel while
// blocks work on the row before. All blocks are resident at once (plan/ranks.rs) and take their rows in
// order. So the first row that is incomplete on some rank has been sent by its blocks on every rank,
// and its owners wait for nothing but these parts before they send sums. The next kernel is admitted
// early only where a rank has its device alone.
//
// A set of slots is filled again two calls later (peers.cuh), by a rank that has heard from all
// others in the call between: it has received a sum from an owner that has received from all, or is
// itself such an owner.
//
// A thread that has given up sends no sum. The deadline for a sum is twice the deadline for a part:
// an owner waits for parts and reports the missing rank first.
//
// KEEPS_ROW: h and the sums of the next row stay in registers. Otherwise they lie in shared memory,
// where a thread reads back only data that it wrote itself. In place: as in reduce_forward.cu.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
reduce_forward_packs(const __grid_constant__ Params p, const __grid_constant__ Peers g) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const unsigned first = threadIdx.x * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    Group group(g, p.cols);
    // `row` counts from the first row of this launch; `of_call` converts it to a row of the
    // tensors.
    const auto of_call = [&](unsigned long long row) { return g.first_row + row; };
    const auto exists = [&](int k) { return k < PACKS && is_in_row(k, 0, left); };
    const auto owner_of = [&](unsigned long long row, int k) { return (threadIdx.x / 32 + k + unsigned(row)) % RANKS; };
    const auto is_own = [&](unsigned long long row, int k) { return exists(k) && owner_of(row, k) == g.rank; };
    const auto is_others = [&](unsigned long long row, int k) { return exists(k) && owner_of(row, k) != g.rank; };
    const auto load_x = [&](unsigned long long row, int k) {
        return without_empty(load_pack<Hint::EvictFirst>(ROW(x, of_call(row)) + first, k, left));
    };
    const auto at = [&](unsigned long long row) { return At{p, of_call(row), first, left}; };
    const auto send_parts = [&](unsigned long long row) {
        if (row >= g.rows) return;
        const unsigned long long slot = group.slot(row, first);
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> parts[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (is_others(row, begin + i)) parts[i] = load_x(row, begin + i);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int k = begin + i;
                if (is_others(row, k)) group.send_to(owner_of(row, k), slot + k * SLOT_STEP, parts[i]);
            }
        }
    };

    send_parts(blockIdx.x);
    admit_next(g);
    const Parameters<HOLDS_PARAMETERS> parameters(p, first, left);
#if KEEPS_ROW
    Pack<R> held[PACKS] = {}, ahead[PACKS] = {};
    const auto h = [&](int k) -> Pack<R>& { return held[k]; };
    const auto next = [&](int k) -> Pack<R>& { return ahead[k]; };
#else
    Pack<R>* held = reinterpret_cast<Pack<R>*>(shared) + threadIdx.x;
    const auto h = [&](int k) -> Pack<R>& { return held[k * THREADS]; };
    const auto next = [&](int k) -> Pack<R>& { return held[(PACKS + k) * THREADS]; };
#endif

    // Adds the packs of a row that this rank owns.
    const auto add = [&](unsigned long long row) {
        if (row >= g.rows) return;
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int k = 0; k < PACKS; ++k) {
            if (!is_own(row, k)) continue;
            const unsigned long long slot = group.slot(row, first) + k * SLOT_STEP;
            const Pack<T> x = load_x(row, k);
            const Before::Addend addend = Before::load_addend<Hint::EvictFirst>(at(row), k);
            Pack<T> others[1][RANKS];
            group.receive(slot, [](int) { return true; }, others);
            const Pack<T> sum = without_empty(add_parts(x, g.rank, others[0], addend));
            if (!group.has_given_up) group.send(slot, sum);
            next(k) = sum;
        }
    };

    for (unsigned long long now = blockIdx.x; now < g.rows + gridDim.x; now += gridDim.x) {
        send_parts(now + gridDim.x);
        const bool is_first = now < gridDim.x;
        const unsigned long long row = now - gridDim.x;
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int k = 0; k < PACKS; ++k)
            if (!is_first && is_own(row, k)) h(k) = next(k);
        add(now);
        if (is_first) continue;

        const unsigned long long slot = group.slot(row, first);
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> of_others[TOGETHER];
            const auto owner = [&](int i) { return owner_of(row, begin + i); };
            group.receive_from<2>(owner, slot + begin * SLOT_STEP, [&](int i) { return is_others(row, begin + i); }, of_others);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int k = begin + i;
                if (k >= PACKS) continue;
                if (!exists(k)) h(k) = {};
                else if (is_others(row, k)) h(k) = of_others[i];
                if (exists(k)) Before::store_h(at(row), k, h(k));
            }
        }
        const auto put = [&](int k, const float (&y)[PACK]) {
            After::put(at(row), k, y, After::load<Hint::EvictFirst>(at(row), k));
        };
        normalize_row(p, sums, h, parameters, put, left, of_call(row));
    }
    // After this barrier all threads have read the epoch.
    __syncthreads();
    group.end();
}
