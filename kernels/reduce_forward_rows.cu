// Forward of the sum of all ranks' x, with rows divided among owners: math.md, equations (1') and
// (2) to (6), in one kernel per rank.
//
// A rank sends its part of a row to the row's owner. The owner adds the parts and normalizes. It
// sends y to all ranks, if `sends_y`. Parts and y have separate slots, which depend only on the row.
//
// Launch rows are ordered across owners: row i of every owner, then row i + 1. A block has one row
// in each step, and a thread the same columns in each of its rows. Parts are sent two steps ahead.
// An owner adds a row in its step, and the others receive y one step later: y travels while blocks
// work on the next row. All blocks are resident at once (plan/ranks.rs) and take their rows in order. So
// the first row that is incomplete on some rank has been sent by its blocks on every rank, and its
// owner waits for nothing but these parts before it sends y. For the same reason the next kernel is
// admitted early only where a rank has its device alone.
//
// A set of slots is filled again two calls later (peers.cuh), by a rank that has heard from all
// others in the call between. Every rank gets y from an owner that has received from all. If owners
// send nothing, ranks without rows would hear from nobody. So missing rows have owners too, and one
// empty pack is sent for each.
//
// A rank that has given up sends no y; the threads of a block decide this together. The deadline for
// y is twice the deadline for a part: an owner waits for parts and reports the missing rank first.
//
// KEEPS_ROW: h stays in registers. Otherwise it lies in shared memory, where a thread reads back
// only data that it wrote itself. In place: as in reduce_forward.cu.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
reduce_forward_rows(
    const __grid_constant__ Params p, const __grid_constant__ Peers g,
    unsigned long long rows_per_rank, // rows of an owner; the last owners have fewer or none
    unsigned long long first_own, // the row of the call at which residual, sum and statistics begin
    unsigned long long first_of_y, // the row of the call at which y begins
    unsigned sends_y) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    const unsigned first = threadIdx.x * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, 0, threadIdx.x);
    wait_for_earlier_kernels();

    Group group(g, p.cols);
    const auto owner_of = [](unsigned launch_row) { return launch_row % RANKS; };
    // The index among its owner's rows in this launch.
    const auto of_owner = [](unsigned launch_row) { return launch_row / RANKS; };
    // The row of the call, which may be past the end.
    const auto of_call = [&](unsigned launch_row) {
        return owner_of(launch_row) * rows_per_rank + g.first_row + of_owner(launch_row);
    };
    // The slot of y. Slots for y come after the slots for parts.
    const auto slot_of_y = [&](unsigned launch_row) { return group.slot(g.rows + of_owner(launch_row), first); };
    const auto exists = [&](int k) { return k < PACKS && is_in_row(k, 0, left); };
    const auto load_x = [&](unsigned long long row, int k) {
        return without_empty(load_pack<Hint::EvictFirst>(ROW(x, row) + first, k, left));
    };
    // A place in the tensors that have only the rows of their owner.
    const auto own = [&](unsigned long long row) { return At{p, row - first_own, first, left}; };
    const auto store_y = [&](unsigned long long row, int k, const Pack<T>& y) {
        store_pack(ROW(y, row - first_of_y) + first, k, left, y);
    };
    const unsigned launch_rows = unsigned(g.rows) * RANKS;
    // Sends this rank's part of a row to its owner, if that is another rank.
    const auto send_part = [&](unsigned launch_row) {
        const unsigned owner = owner_of(launch_row);
        if (launch_row >= launch_rows || owner == g.rank) return;
        const unsigned long long slot = group.slot(of_owner(launch_row), first), row = of_call(launch_row);
        if (row >= p.rows) {
            if (!sends_y && threadIdx.x == 0) group.send_to(owner, slot, Pack<T>{});
            return;
        }
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> parts[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (exists(begin + i)) parts[i] = load_x(row, begin + i);
                else parts[i] = {};
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (exists(begin + i)) group.send_to(owner, slot + (begin + i) * SLOT_STEP, parts[i]);
        }
    };

    send_part(blockIdx.x);
    admit_next(g);
    const Parameters<HOLDS_PARAMETERS> parameters(p, first, left);
    send_part(blockIdx.x + gridDim.x);
#if KEEPS_ROW
    Pack<R> held[PACKS];
    const auto h = [&](int k) -> Pack<R>& { return held[k]; };
#else
    Pack<R>* held = reinterpret_cast<Pack<R>*>(shared) + threadIdx.x;
    const auto h = [&](int k) -> Pack<R>& { return held[k * THREADS]; };
#endif

    // Adds and normalizes a row that this rank owns.
    const auto add = [&](unsigned launch_row) {
        const unsigned long long row = of_call(launch_row), slot = group.slot(of_owner(launch_row), first);
        if (row >= p.rows) {
            if (!sends_y && threadIdx.x == 0) {
                Pack<T> nothing[1][RANKS];
                group.receive(slot, [](int) { return true; }, nothing);
            }
            return;
        }
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> parts[TOGETHER], others[TOGETHER][RANKS];
            Before::Addend addends[TOGETHER];
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (!exists(begin + i)) continue;
                parts[i] = load_x(row, begin + i);
                addends[i] = Before::load_addend<Hint::EvictFirst>(own(row), begin + i);
            }
            group.receive(slot + begin * SLOT_STEP, [&](int i) { return exists(begin + i); }, others);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                if (begin + i >= PACKS) continue;
                h(begin + i) = {};
                if (!exists(begin + i)) continue;
                const Pack<R> sum = add_parts(parts[i], g.rank, others[i], addends[i]);
                h(begin + i) = sum;
                Before::store_h(own(row), begin + i, sum);
            }
        }
        const bool is_complete = sends_y && !__syncthreads_or(group.has_given_up);
        const auto put = [&](int k, const float (&values)[PACK]) {
            Pack<T> y = pack<T>(values);
            if (sends_y) y = without_empty(y);
            store_y(row, k, y);
            if (!is_complete || !exists(k)) return;
            // One after the other: the addresses of all ranks would take registers that parts need.
            #pragma unroll 1
            for (unsigned rank = 0; rank < RANKS; ++rank)
                if (rank != g.rank) group.send_to(rank, slot_of_y(launch_row) + k * SLOT_STEP, y);
        };
        normalize_row(p, sums, h, parameters, put, left, row - first_own);
    };
    // Receives y of a row that another rank owns.
    const auto take = [&](unsigned launch_row) {
        const unsigned long long row = of_call(launch_row);
        if (!sends_y || row >= p.rows) return;
        #pragma unroll (KEEPS_ROW ? PACKS : 1)
        for (int begin = 0; begin < PACKS; begin += TOGETHER) {
            Pack<T> y[TOGETHER];
            const auto owner = [&](int) { return owner_of(launch_row); };
            group.receive_from<2>(owner, slot_of_y(launch_row) + begin * SLOT_STEP, [&](int i) { return exists(begin + i); }, y);
            #pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (exists(begin + i)) store_y(row, begin + i, y[i]);
        }
    };

    for (unsigned now = blockIdx.x; now < launch_rows + gridDim.x; now += gridDim.x) {
        send_part(now + 2 * gridDim.x);
        if (now < launch_rows && owner_of(now) == g.rank) add(now);
        if (now >= gridDim.x && owner_of(now - gridDim.x) != g.rank) take(now - gridDim.x);
    }
    // After this barrier all threads have read the epoch.
    __syncthreads();
    group.end();
}
