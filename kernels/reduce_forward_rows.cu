// Forward of the sum of all ranks' x, with rows divided among owners: math.md, equations (1') and
// (2) to (6), in one kernel per rank.
//
// A rank sends its part of a row to the row's owner. The owner adds the parts, normalizes, and
// sends a result as `sends` tells: y, the sum h (which each rank normalizes itself), or nothing.
// Parts and results have separate slots, which depend only on the row.
//
// Launch rows are ordered across owners: row i of every owner, then row i + 1. A block has one row
// at a time, and a thread the same columns in each of its rows. The part of the next row is sent
// before the block waits for this row. All blocks are resident at once (plan.rs) and take their
// rows in order. So the first row that is incomplete on some rank has been sent by its blocks on
// every rank, and its owner waits for nothing but these parts before it sends the result. For the
// same reason no other kernel is admitted early.
//
// A set of slots is filled again two calls later (peers.cuh), by a rank that has heard from all
// others in the call between. Every rank gets a result from an owner that has received from all. If
// owners send nothing, ranks without rows would hear from nobody. So missing rows have owners too,
// and one empty pack is sent for each.
//
// A rank that has given up sends no result. For y the threads of a block decide this together, for
// h each thread decides for its packs. The deadline for a result is twice the deadline for a part:
// an owner waits for parts and reports the missing rank first.
//
// KEEPS_ROW: h stays in registers. Otherwise it lies in shared memory, where a thread reads back
// only data that it wrote itself. In place: as in reduce_forward.cu.

constexpr unsigned SENDS_NOTHING = 0, SENDS_Y = 1, SENDS_H = 2;

// A row of h fits a slot for a row of x if both have one dtype. Otherwise the host does not request
// SENDS_H.
constexpr bool IS_H_SENDABLE = sizeof(R) == sizeof(T);

// Whether the parameters stay in registers for the whole kernel.
constexpr bool HOLDS_PARAMETERS = KEEPS_ROW && RANKS <= 4 && !IS_LAYER;

// The words of a pack as another type. In all code that runs, the two types are the same.
template <class To, class From>
__device__ inline Pack<To> same_words(const Pack<From>& from) {
    Pack<To> to = {};
    #pragma unroll
    for (int word = 0; word < 4; ++word) to.words[word] = from.words[word];
    return to;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
reduce_forward_rows(
    const __grid_constant__ Params p, const __grid_constant__ Peers g,
    unsigned long long rows_per_rank, // rows of an owner; the last owners have fewer or none
    unsigned long long first_own, // the row of the call at which residual, sum and statistics begin
    unsigned long long first_of_y, // the row of the call at which y begins
    unsigned sends) {
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
    const auto exists = [&](int k) { return k < PACKS && is_in_row(k, 0, left); };
    const auto load_x = [&](unsigned long long row, int k) {
        return without_empty(load_pack<Hint::EvictFirst>(ROW(x, row) + first, k, left));
    };
    // A place in the tensors that have only the rows of their owner.
    const auto own = [&](unsigned long long row) { return At{p, row - first_own, first, left}; };
    // Sends a pack of a result to every other rank, one after the other: the addresses of all ranks
    // would take registers that parts need.
    const auto send_result = [&](unsigned long long slot, const Pack<T>& pack) {
        #pragma unroll 1
        for (unsigned rank = 0; rank < RANKS; ++rank)
            if (rank != g.rank) group.send_to(rank, slot, pack);
    };
    const unsigned launch_rows = unsigned(g.rows) * RANKS;
    // Sends this rank's part of a row to its owner, if that is another rank.
    const auto send_part = [&](unsigned launch_row) {
        const unsigned owner = owner_of(launch_row);
        if (launch_row >= launch_rows || owner == g.rank) return;
        const unsigned long long slot = group.slot(of_owner(launch_row), first), row = of_call(launch_row);
        if (row >= p.rows) {
            if (sends == SENDS_NOTHING && threadIdx.x == 0) group.send_to(owner, slot, Pack<T>{});
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
    const Parameters<HOLDS_PARAMETERS> parameters(p, first, left);
#if KEEPS_ROW
    Pack<R> held[PACKS];
    const auto h = [&](int k) -> Pack<R>& { return held[k]; };
#else
    Pack<R>* held = reinterpret_cast<Pack<R>*>(shared) + threadIdx.x;
    const auto h = [&](int k) -> Pack<R>& { return held[k * THREADS]; };
#endif

    for (unsigned launch_row = blockIdx.x; launch_row < launch_rows; launch_row += gridDim.x) {
        const unsigned owner = owner_of(launch_row);
        const bool is_own = owner == g.rank;
        const unsigned long long row = of_call(launch_row);
        send_part(launch_row + gridDim.x);
        if (row >= p.rows) {
            if (sends == SENDS_NOTHING && is_own && threadIdx.x == 0) {
                Pack<T> nothing[1][RANKS];
                group.receive(group.slot(of_owner(launch_row), first), [](int) { return true; }, nothing);
            }
            continue;
        }
        // The result's slot. Slots for results come after the slots for parts.
        const unsigned long long result = group.slot(g.rows + of_owner(launch_row), first);
        if (is_own) {
            const unsigned long long slot = group.slot(of_owner(launch_row), first);
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
                    Pack<R> sum = add_parts(parts[i], g.rank, others[i], addends[i]);
                    if (IS_H_SENDABLE && sends == SENDS_H) {
                        const Pack<T> sent = without_empty(same_words<T>(sum));
                        if (!group.has_given_up) send_result(result + (begin + i) * SLOT_STEP, sent);
                        sum = same_words<R>(sent);
                    }
                    h(begin + i) = sum;
                    Before::store_h(own(row), begin + i, sum);
                }
            }
        } else {
            if (sends == SENDS_NOTHING) continue;
            #pragma unroll (KEEPS_ROW ? PACKS : 1)
            for (int begin = 0; begin < PACKS; begin += TOGETHER) {
                Pack<T> packs[TOGETHER];
                group.receive_from<2>(owner, result + begin * SLOT_STEP, [&](int i) { return exists(begin + i); }, packs);
                #pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    if (begin + i >= PACKS) continue;
                    if (sends == SENDS_Y) {
                        if (exists(begin + i)) store_pack(ROW(y, row - first_of_y) + first, begin + i, left, packs[i]);
                        continue;
                    }
                    h(begin + i) = {};
                    if (!exists(begin + i)) continue;
                    h(begin + i) = same_words<R>(packs[i]);
                    Before::store_h(own(row), begin + i, h(begin + i));
                }
            }
            if (!IS_H_SENDABLE || sends == SENDS_Y) continue;
        }

        bool sends_y = false;
        if (is_own && sends == SENDS_Y) sends_y = !__syncthreads_or(group.has_given_up);
        const auto put = [&](int k, const float (&values)[PACK]) {
            Pack<T> y = pack<T>(values);
            if (sends == SENDS_Y) y = without_empty(y);
            store_pack(ROW(y, row - first_of_y) + first, k, left, y);
            if (sends_y && exists(k)) send_result(result + k * SLOT_STEP, y);
        };
        normalize_row(p, sums, h, parameters, put, left, row - first_own);
    }
    // After this barrier all threads have read the epoch.
    __syncthreads();
    group.end();
}
