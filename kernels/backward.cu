// Backward: docs/math.md, equations (7) to (12). The row stays on chip between its two uses.
//
// Rows are loaded ahead into a ring of STAGES slots in shared memory. A thread reads back only what it has copied itself,
// so that the one barrier of a step is that of the sums. A thread owns the same columns in every row: the weights, and
// the sums of dweight and dbias, stay in its registers for a whole chunk of rows.

// A thread's part of one row, as it waits in shared memory. Threads are neighbours, so that banks do not collide.
struct Slot {
    Pack<R> x[PACKS][THREADS];
    Pack<T> dy[PACKS][THREADS];
#if HAS_DRESIDUAL_OUT
    Pack<R> dresidual_out[PACKS][THREADS];
#endif
    // One for the lanes of a row that share a warp: the first of them copies, all of them read.
    float rstd[THREADS / LANES];
#if IS_LAYER
    float mean[THREADS / LANES];
#endif

    __device__ float row_rstd() const { return rstd[threadIdx.x / LANES]; }
    __device__ float row_mean() const {
#if IS_LAYER
        return mean[threadIdx.x / LANES];
#else
        return 0.0f;
#endif
    }
};

// wdy * x_hat and, for layer norm, wdy.
constexpr int SUMS = IS_LAYER ? 2 : 1;

// Weights stay in registers unless the sums of two gradients need them; then they are read from the L1 for every row.
constexpr bool HOLDS_WEIGHTS = GRADIENTS * PACKS * PACK <= 32;

// What a thread knows while it works on its chunk. A step is UNROLL rows of every group.
struct Worker {
    const Params& p;
    Slot (*ring)[UNROLL];
    RowSums<UNROLL * SUMS> sums;
    unsigned group, first;
    int left;
    unsigned steps;
    Pack<W> weights[PACKS];
    Gradients gradients;

    using Totals = float[UNROLL * SUMS];

    __device__ void load_weights() {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k)
            weights[k] = HAS_WEIGHT && HOLDS_WEIGHTS ? load_pack<Reuse::ByRows>(p.weight + first, k, left) : Pack<W>{};
    }

    __device__ void unpack_weights(int k, float (&weight)[PACK]) const {
        if constexpr (HAS_WEIGHT && !HOLDS_WEIGHTS) {
            const W* from = p.weight + first;
            // The compiler would lift the load out of the loop over rows, into registers that are not there.
            asm volatile("" : "+l"(from));
            unpack_weight(load_pack<Reuse::ByRows>(from, k, left), p.weight_offset, weight);
        } else {
            unpack_weight(weights[k], p.weight_offset, weight);
        }
    }

    // A block, or a cluster of them, has one chunk of rows.
    __device__ static unsigned chunk() { return blockIdx.x / CLUSTER; }

    __device__ void begin() {
        const unsigned long long rows = (p.rows - chunk() + p.chunks - 1) / p.chunks;
        steps = unsigned((rows + GROUPS * UNROLL - 1) / (GROUPS * UNROLL));
        gradients.clear();
    }

    // Chunks take turns with the rows, so that all of the device reads and writes in one place at a time.
    __device__ unsigned long long row(unsigned step, int u) const {
        return ((unsigned long long)(step * UNROLL + u) * GROUPS + group) * p.chunks + chunk();
    }

    __device__ bool exists(unsigned step, int u) const {
        return step < steps && (GROUPS * UNROLL == 1 || row(step, u) < p.rows);
    }

    __device__ void start_statistics(unsigned step, int u, Slot& slot) {
        if (threadIdx.x % LANES > 0) return;
        start_word(&slot.rstd[threadIdx.x / LANES], p.rstd + row(step, u));
#if IS_LAYER
        start_word(&slot.mean[threadIdx.x / LANES], p.mean + row(step, u));
#endif
    }

    __device__ void start_pack(unsigned step, int u, int k, Slot& slot) {
        start_copy(&slot.x[k][threadIdx.x], p.x.row(row(step, u)) + first, k, left);
        start_copy(&slot.dy[k][threadIdx.x], p.dy.row(row(step, u)) + first, k, left);
#if HAS_DRESIDUAL_OUT
        start_copy(&slot.dresidual_out[k][threadIdx.x], p.dresidual_out.row(row(step, u)) + first, k, left);
#endif
    }

    __device__ void start_step(unsigned step, int slot) {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(step, u)) {
                start_statistics(step, u, ring[slot][u]);
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) start_pack(step, u, k, ring[slot][u]);
            }
        close_batch();
    }

    // Until the thread's own copies have arrived, and the statistics that the first lane has copied.
    template <int PENDING>
    __device__ void wait_step() {
        wait_copies<PENDING>();
        __syncwarp();
    }

    // The thread's part of the row sums, and its columns' part of the gradients. Past the end of a row dy is zero.
    __device__ void first_pass(const Slot& slot, float* totals) {
        const float mean = slot.row_mean(), rstd = slot.row_rstd();
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) {
            float x[PACK], dy[PACK], weight[PACK];
            unpack(slot.x[k][threadIdx.x], x);
            unpack(slot.dy[k][threadIdx.x], dy);
            unpack_weights(k, weight);
            #pragma unroll
            for (int i = 0; i < PACK; ++i) {
                const float x_hat = (x[i] - mean) * rstd, wdy = dy[i] * weight[i];
                totals[0] += wdy * x_hat;
                if constexpr (IS_LAYER) totals[SUMS - 1] += wdy;
                gradients.add(k, i, dy[i], x_hat);
            }
        }
    }

    __device__ void first_passes(unsigned step, int slot, Totals& totals) {
        #pragma unroll
        for (float& total : totals) total = 0.0f;
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (exists(step, u)) first_pass(ring[slot][u], totals + u * SUMS);
    }

    // dx of one pack.
    __device__ Pack<T> gradient(const Slot& slot, int k, float mean, float rstd, float c1, float c2) const {
        float x[PACK], dx[PACK], weight[PACK];
        unpack(slot.x[k][threadIdx.x], x);
        unpack(slot.dy[k][threadIdx.x], dx);
        unpack_weights(k, weight);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) {
            const float x_hat = (x[i] - mean) * rstd;
            dx[i] = rstd * ((dx[i] * weight[i] - c1) - x_hat * c2);
        }
#if HAS_DRESIDUAL_OUT
        float residual[PACK];
        unpack(slot.dresidual_out[k][threadIdx.x], residual);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) dx[i] += residual[i];
#endif
        return pack<T>(dx);
    }

    // Writes dx. With REFILLS each pack makes room for the row that is STAGES steps ahead.
    template <bool REFILLS>
    __device__ void second_passes(unsigned step, int slot, const Totals& totals) {
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (!exists(step, u)) continue;
            const float c2 = totals[u * SUMS] * p.share, c1 = IS_LAYER ? totals[u * SUMS + SUMS - 1] * p.share : 0.0f;
            const float mean = ring[slot][u].row_mean(), rstd = ring[slot][u].row_rstd();
            const bool refills = REFILLS && exists(step + STAGES, u);
            if (refills) {
                // All lanes have read what the first one now replaces.
                __syncwarp();
                start_statistics(step + STAGES, u, ring[slot][u]);
            }
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                store_pack(p.dx.row(row(step, u)) + first, k, left, gradient(ring[slot][u], k, mean, rstd, c1, c2));
                if (refills) start_pack(step + STAGES, u, k, ring[slot][u]);
            }
        }
        if constexpr (REFILLS) close_batch();
    }

    // A row's two passes one after the other.
    __device__ void run_in_turn() {
        #pragma unroll 1
        for (unsigned step = 0; step < STAGES - 1; ++step) start_step(step, step);
        for (unsigned step = 0; step < steps; ++step) {
            // All lanes have read what the first one now replaces.
            __syncwarp();
            start_step(step + STAGES - 1, (step + STAGES - 1) % STAGES);
            wait_step<STAGES - 1>();
            Totals totals;
            first_passes(step, step % STAGES, totals);
            sums.sum(totals);
            second_passes<false>(step, step % STAGES, totals);
        }
    }

    // The next row's first pass runs while this row's sums are exchanged: for clusters, and where few threads share an SM.
    __device__ void run_overlapped() {
        constexpr int PENDING = STAGES > 1 ? STAGES - 2 : 0;
        Totals totals, next_totals;
        #pragma unroll 1
        for (unsigned step = 0; step < STAGES; ++step) start_step(step, step);
        wait_step<STAGES - 1>();
        first_passes(0, 0, totals);
        sums.send(totals);
        for (unsigned step = 0; step < steps; ++step) {
            const bool has_next = step + 1 < steps;
            wait_step<PENDING>();
            if (has_next) first_passes(step + 1, (step + 1) % STAGES, next_totals);
            sums.receive(totals);
            if (has_next) sums.send(next_totals);
            second_passes<true>(step, step % STAGES, totals);
            #pragma unroll
            for (int i = 0; i < UNROLL * SUMS; ++i) totals[i] = next_totals[i];
        }
    }

    // Adds up the gradients of the block's groups; those of the first group are then the whole block's.
    __device__ void sum_groups(float* shared) {
        constexpr int VALUES = GRADIENTS * PACKS * PACK;
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
            // What the upper half stores was read by the round before, or is part of the ring.
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ float exchange[2][GROUPS][UNROLL * SUMS][SENDERS];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    Worker worker = {
        p, reinterpret_cast<Slot (*)[UNROLL]>(shared), {exchange, group, thread}, group, first, columns_left(p.cols, first)
    };
    wait_for_earlier_kernels();
    admit_next_kernel();
    worker.load_weights();

    worker.begin();
    if constexpr (IS_OVERLAPPED) worker.run_overlapped();
    else worker.run_in_turn();
    wait_copies<0>();
    if constexpr (GRADIENTS > 0) {
        worker.sum_groups(reinterpret_cast<float*>(shared));
        hand_on(p, worker.chunk(), {cluster_rank(), CLUSTER}, first, group == 0 ? worker.left : 0, worker.gradients);
    }
}
