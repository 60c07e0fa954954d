// Rows of backward: math.md, equations (7) to (12). A row stays on chip between its two uses.
//
// When: rows of which a ring fits shared memory. Longer ones: backward_streaming.cu.
// Who: a block, or a cluster of blocks, has a chunk of rows, and GROUPS * UNROLL of them at a time.
// A thread owns the same columns in every row: its weights and its sums of dweight and dbias stay
// in registers for the whole chunk.
// Where: rows are prefetched into a ring of STAGES slots in shared memory, so memory is read once.
// A thread reads back only data that it copied itself, so the only barrier of a step is that of the
// sums.

// One row in shared memory: x and dy, and the matrices of its pieces; an empty part takes no room.
// Adjacent threads have adjacent packs, so that banks do not conflict.
struct Inputs {
    Pack<R> x[PACKS][THREADS];
    Pack<T> dy[PACKS][THREADS];
};
struct Slot : AfterPull::Slot, Inputs, BeforePull::Slot {};

struct Statistics {
    float mean, rstd;
};

// wdy * x_hat and, for layer norm, wdy.
constexpr int SUMS = IS_LAYER ? 2 : 1;

static_assert(THREADS % 32 == 0, "shuffles are of whole warps");
static_assert((GROUPS & (GROUPS - 1)) == 0, "groups are folded by a tree");
static_assert(THREADS_PER_ROW % 32 == 0 || (THREADS_PER_ROW < 32 && 32 % THREADS_PER_ROW == 0), "the threads of a row are lanes or warps");
static_assert(CLUSTER > 1 || THREADS_PER_ROW <= 32 || GROUPS <= 15, "each group of several warps has a barrier");

// The state of a thread during its chunk. A step is UNROLL rows of every group.
struct Worker {
    const Params& p;
    Slot (*ring)[UNROLL];
    Statistics (*kept)[UNROLL][THREADS / LANES];
    RowSums<UNROLL * SUMS> sums;
    unsigned group, first;
    int left;
    // Steps of the block, and rows of this group.
    unsigned steps, rows;
    Pack<W> weights[PACKS];
    Gradients gradients;

    using Rows = Statistics[UNROLL];
    using Totals = float[UNROLL * SUMS];

    __device__ void load_weights() {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k)
            weights[k] = load_parameter<HAS_WEIGHT>(p.weight + group_column(p) + first, k, left);
    }

    // A block, or a cluster of blocks, has one chunk of rows.
    __device__ static unsigned chunk() { return blockIdx.x / CLUSTER; }

    __device__ void begin() {
        const unsigned long long in_chunk = (p.rows - chunk() + p.chunks - 1) / p.chunks;
        steps = unsigned((in_chunk + GROUPS * UNROLL - 1) / (GROUPS * UNROLL));
        rows = in_chunk > group ? unsigned((in_chunk - group + GROUPS - 1) / GROUPS) : 0;
        gradients.clear();
    }

    // Rows are dealt to the chunks in turn, so that the whole device reads and writes in one region
    // at a time. The plan keeps GROUPS * chunks within 32 bits.
    __device__ unsigned long long row(unsigned step, int u) const {
        const unsigned chunks = unsigned(p.chunks);
        return (unsigned long long)(step * UNROLL + u) * (GROUPS * chunks) + (group * chunks + chunk());
    }

    __device__ At at(unsigned step, int u) const { return {p, row(step, u), first, left}; }

    __device__ bool exists(unsigned step, int u) const { return step * UNROLL + u < rows; }

    __device__ void load_statistics(unsigned step, Rows& statistics) const {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            statistics[u] = {0.0f, 0.0f};
            if (exists(step, u)) statistics[u] = {IS_LAYER ? p.mean[statistic(row(step, u))] : 0.0f, p.rstd[statistic(row(step, u))]};
        }
    }

    __device__ void start_pack(unsigned step, int u, int k, Slot& slot) {
        start_copy(&slot.x[k][threadIdx.x], ROW(x, row(step, u)) + first, k, left);
        start_copy(&slot.dy[k][threadIdx.x], ROW(dy, row(step, u)) + first, k, left);
        static_cast<AfterPull::Slot&>(slot).start(at(step, u), k);
        static_cast<BeforePull::Slot&>(slot).start(at(step, u), k);
    }

    __device__ void start_step(unsigned step, int slot) {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(step, u))
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) start_pack(step, u, k, ring[slot][u]);
        close_batch();
    }

    // Adds the thread's columns to the row sums and the gradients. Past the end of a row dy is
    // zero.
    __device__ void first_pass(const Slot& slot, const At& at, Statistics row, float* totals) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float x[PACK], dy[PACK], weight[PACK];
            BeforePull::unpack_h(slot.x[k][threadIdx.x], BeforePull::values(slot, k), x);
            unpack(slot.dy[k][threadIdx.x], dy);
            unpack_weight(weights[k], p.weight_offset, weight);
            if constexpr (IS_WEIGHT_FIRST) weigh(x, weight);
            const AfterPull::Values values = AfterPull::values<false>(slot, at, k);
            // Each pack has separate sums: in short rows, one sum over all packs would be a longer
            // chain than math.md allows.
            float parts[SUMS] = {};
            #pragma unroll
            for (int i = 0; i < PACK; ++i) {
                float x_hat = (x[i] - row.mean) * row.rstd;
                // Past the end dy is zero, but an infinite x_hat would make the product NaN.
                if (IS_LAYER && !is_in_row(k, i, left)) x_hat = 0.0f;
                dy[i] = AfterPull::pull(values, i, dy[i]);
                const float wdy = weighted_gradient(dy[i], weight[i]);
                parts[0] += wdy * x_hat;
                if constexpr (IS_LAYER) parts[SUMS - 1] += wdy;
                gradients.add(k, i, dy[i], x_hat);
            }
            #pragma unroll
            for (int sum = 0; sum < SUMS; ++sum) totals[sum] += parts[sum];
        }
    }

    __device__ void first_passes(unsigned step, int slot, const Rows& statistics, Totals& totals) {
        #pragma unroll
        for (float& total : totals) total = 0.0f;
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(step, u)) first_pass(ring[slot][u], at(step, u), statistics[u], totals + u * SUMS);
    }

    // dx of one pack before rounding. Stores the gradients of what follows the norm, and adds to
    // dweight if the weight comes before it.
    __device__ void gradient(
        const Slot& slot, const At& at, int k, Statistics row, float mean_wdy, float mean_wdy_xhat, float (&dx)[PACK]
    ) {
        float x[PACK], weight[PACK];
        BeforePull::unpack_h(slot.x[k][threadIdx.x], BeforePull::values(slot, k), x);
        unpack(slot.dy[k][threadIdx.x], dx);
        unpack_weight(weights[k], p.weight_offset, weight);
        if constexpr (IS_WEIGHT_FIRST) weigh(x, weight);
        AfterPull::Values values = AfterPull::values<true>(slot, at, k);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            const float x_hat = (x[i] - row.mean) * row.rstd;
            AfterPull::find(values, i, weighted(x_hat, weight[i]), dx[i]);
            dx[i] = AfterPull::pull(values, i, dx[i]);
            dx[i] = row.rstd * ((weighted_gradient(dx[i], weight[i]) - mean_wdy) - x_hat * mean_wdy_xhat);
        }
        AfterPull::store(at, k, values);
        if constexpr (IS_WEIGHT_FIRST) {
            unpack(slot.x[k][threadIdx.x], x);
            gradients.pull_weight(k, x, weight, dx);
        }
        BeforePull::pull(slot, at, k, slot.x[k][threadIdx.x], dx);
    }

    // Writes dx and dresidual. With REFILLS, each pack read starts the copy of the row STAGES steps
    // ahead.
    template <bool REFILLS>
    __device__ void second_passes(unsigned step, int slot, const Rows& statistics, const Totals& totals) {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (!exists(step, u)) continue;
            const float mean_wdy_xhat = unless_clamped(p, statistics[u].rstd, totals[u * SUMS] * p.inv_cols);
            const float mean_wdy = IS_LAYER ? totals[u * SUMS + SUMS - 1] * p.inv_cols : 0.0f;
            const bool refills = REFILLS && exists(step + STAGES, u);
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                float dx[PACK];
                gradient(ring[slot][u], at(step, u), k, statistics[u], mean_wdy, mean_wdy_xhat, dx);
                BeforePull::store(at(step, u), k, dx);
                if (refills) start_pack(step + STAGES, u, k, ring[slot][u]);
            }
        }
        if constexpr (REFILLS) close_batch();
    }

    // Runs the two passes of each row one after the other.
    __device__ void run_in_turn() {
        Rows now, next;
        #pragma unroll 1
        for (unsigned step = 0; step < STAGES - 1; ++step) start_step(step, step);
        load_statistics(0, next);
        for (unsigned step = 0; step < steps; ++step) {
            start_step(step + STAGES - 1, (step + STAGES - 1) % STAGES);
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) now[u] = next[u];
            load_statistics(step + 1, next);
            wait_copies<STAGES - 1>();
            Totals totals;
            first_passes(step, step % STAGES, now, totals);
            sums.sum(totals);
            second_passes<false>(step, step % STAGES, now, totals);
        }
    }

    // Keeps a row's statistics in shared memory. They are needed again after the next row's first
    // pass, which has no registers for them.
    __device__ void keep(unsigned step, const Rows& statistics) {
        sync_lanes();
        if (threadIdx.x % LANES == 0)
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) kept[step % 2][u][threadIdx.x / LANES] = statistics[u];
    }

    __device__ void recall(unsigned step, Rows& statistics) const {
        sync_lanes();
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) statistics[u] = kept[step % 2][u][threadIdx.x / LANES];
    }

    // The next row's first pass runs during the exchange of this row's sums. Used for the largest
    // clusters.
    __device__ void run_overlapped() {
        constexpr int PENDING = STAGES > 1 ? STAGES - 2 : 0;
        Rows now, next;
        Totals totals, next_totals;
        #pragma unroll 1
        for (unsigned step = 0; step < STAGES; ++step) start_step(step, step);
        load_statistics(0, next);
        wait_copies<STAGES - 1>();
        first_passes(0, 0, next, totals);
        keep(0, next);
        load_statistics(1, next);
        sums.send(totals);
        for (unsigned step = 0; step < steps; ++step) {
            const bool has_next = step + 1 < steps;
            wait_copies<PENDING>();
            if (has_next) {
                first_passes(step + 1, (step + 1) % STAGES, next, next_totals);
                keep(step + 1, next);
            }
            load_statistics(step + 2, next);
            sums.receive(totals);
            if (has_next) sums.send(next_totals);
            recall(step, now);
            second_passes<true>(step, step % STAGES, now, totals);
            #pragma unroll
            for (int i = 0; i < UNROLL * SUMS; ++i) totals[i] = next_totals[i];
        }
    }

    // Adds the gradients of the block's groups; the first group then has the block's sums.
    __device__ void sum_groups(float* shared) {
        constexpr int VALUES = KEPT * PACKS * PACK;
        float* values = &gradients.sums[0][0][0];
        // Groups within a warp first.
        #pragma unroll
        for (int distance = THREADS_PER_ROW; distance < 32 && distance < THREADS; distance *= 2)
            #pragma unroll
            for (int i = 0; i < VALUES; ++i) values[i] += __shfl_xor_sync(~0u, values[i], distance);
        constexpr int WIDTH = THREADS_PER_ROW < 32 ? 32 : THREADS_PER_ROW;
        const unsigned part = threadIdx.x / WIDTH, place = threadIdx.x % WIDTH;
        #pragma unroll
        for (unsigned half = THREADS / WIDTH / 2; half > 0; half /= 2) {
            // The memory that the upper half overwrites was read in the previous round, or belongs
            // to the ring.
            __syncthreads();
            if (part >= half && part < 2 * half)
                #pragma unroll
                for (int i = 0; i < VALUES; ++i) shared[(i * half + part - half) * WIDTH + place] = values[i];
            __syncthreads();
            if (part < half)
                #pragma unroll
                for (int i = 0; i < VALUES; ++i) values[i] += shared[(i * half + part) * WIDTH + place];
        }
    }
};

// Processes the block's chunk: dx, and the partial sums of dweight and dbias unless other blocks
// compute them.
__device__ inline void run_rows(const Params& p, char* shared) {
    __shared__ float exchange[2][GROUPS][UNROLL * SUMS][SENDERS];
    __shared__ Statistics kept[2][UNROLL][THREADS / LANES];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    Worker worker = {
        p, reinterpret_cast<Slot (*)[UNROLL]>(shared), kept, {exchange, group, thread}, group, first, columns_left(p.cols, first)
    };
    worker.begin();
    wait_for_earlier_kernels();
    admit_next_kernel();
    worker.load_weights();

    if constexpr (IS_OVERLAPPED) worker.run_overlapped();
    else worker.run_in_turn();
    wait_copies<0>();
    if constexpr (KEPT > 0) {
        worker.sum_groups(reinterpret_cast<float*>(shared));
        store_partials<CAN_TRADE>(p, worker.chunk(), {cluster_rank(), CLUSTER}, first, group == 0 ? worker.left : NOTHING_LEFT, worker.gradients);
    }
}
