// Forward of the sum of all ranks' x: math.md, equations (1') and (2) to (6), in one kernel per
// rank.
//
// A block, or a cluster of blocks, has one row at a time, and a thread the same columns in each of
// its rows. The next row is sent before the block waits for this one. All blocks are resident at
// once (plan/ranks.rs) and take their rows in order, so the first row that is incomplete on some rank has
// been sent by its blocks on every rank. The next kernel is admitted early only where a rank has its
// device alone: blocks of other ranks that do not run yet would have no room.
//
// KEEPS_ROW: sent parts, h and the parameters stay in registers. Otherwise, for longer rows, the
// sent part is read again, and h lies in shared memory. There a thread reads back only data that it
// wrote itself.
//
// In place is safe: the thread that stores y and the sum over x and the residual is the last to
// read those elements.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
reduce_forward(const __grid_constant__ Params p, const __grid_constant__ Peers g) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const unsigned first = (cluster_rank() * THREADS + threadIdx.x) * PACK;
    const unsigned block = blockIdx.x / CLUSTER, blocks = gridDim.x / CLUSTER;
    const int left = columns_left(p.cols, first);
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    Group group(g, p.cols);
    // `row` counts from the first row of this launch; `of_call` converts it to a row of the
    // tensors.
    const auto of_call = [&](unsigned long long row) { return g.first_row + row; };
    const auto exists = [&](int k) { return k < PACKS && is_in_row(k, 0, left); };
    const auto load_x = [&](unsigned long long row, int k) {
        return without_empty(load_pack<Hint::EvictFirst>(ROW(x, of_call(row)) + first, k, left));
    };
    const auto at = [&](unsigned long long row) { return At{p, of_call(row), first, left}; };
    // Sends this rank's part of a row, and keeps it if rows are held.
    const auto send = [&](unsigned long long row, Pack<T> (&kept)[PACKS]) {
        const unsigned long long slot = group.slot(row, first);
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> parts[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (exists(begin + i)) parts[i] = load_x(row, begin + i);
                else parts[i] = {};
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (exists(begin + i)) group.send(slot + (begin + i) * SLOT_STEP, parts[i]);
                if (KEEPS_ROW && begin + i < PACKS) kept[begin + i] = parts[i];
            }
        }
    };

    Pack<T> own[PACKS] = {}, next[PACKS] = {};
    send(block, own);
    admit_next(g);
    const Parameters<KEEPS_ROW> parameters(p, first, left);
#if KEEPS_ROW
    Pack<R> held[PACKS];
    const auto h = [&](int k) -> Pack<R>& { return held[k]; };
#else
    Pack<R>* held = reinterpret_cast<Pack<R>*>(shared) + threadIdx.x;
    const auto h = [&](int k) -> Pack<R>& { return held[k * THREADS]; };
#endif

    for (unsigned long long row = block; row < g.rows; row += blocks) {
        Before::Addend addends[PACKS];
        if constexpr (KEEPS_ROW) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) addends[k] = Before::load_addend<Hint::EvictFirst>(at(row), k);
        }
        if (row + blocks < g.rows) send(row + blocks, next);

        const unsigned long long slot = group.slot(row, first);
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> parts[TOGETHER], others[TOGETHER][RANKS];
            Before::Addend addend[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (!exists(begin + i)) continue;
                parts[i] = KEEPS_ROW ? own[begin + i] : load_x(row, begin + i);
                addend[i] = KEEPS_ROW ? addends[begin + i] : Before::load_addend<Hint::EvictFirst>(at(row), begin + i);
            }
            group.receive(slot + begin * SLOT_STEP, [&](int i) { return exists(begin + i); }, others);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (begin + i >= PACKS) continue;
                h(begin + i) = {};
                if (!exists(begin + i)) continue;
                const Pack<R> sum = add_parts(parts[i], g.rank, others[i], addend[i]);
                h(begin + i) = sum;
                Before::store_h(at(row), begin + i, sum);
            }
        }

        const auto put = [&](int k, const float (&y)[PACK]) {
            After::put(at(row), k, y, After::load<Hint::EvictFirst>(at(row), k));
            if constexpr (KEEPS_ROW) own[k] = next[k];
        };
        normalize_row(p, sums, h, parameters, put, left, of_call(row));
    }
    group.end();
}
