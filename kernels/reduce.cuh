// Sums and largest magnitudes over the threads that share a row. The order of additions depends
// only on the tile.
//
// Lanes of a warp exchange with shuffles, warps through shared memory, blocks of a cluster through
// distributed shared memory. Each sum takes one barrier: two buffers alternate, so that no thread
// overwrites values that another still reads. If two sums overlap, the second is sent only after
// the first was received.

constexpr int THREADS = THREADS_PER_ROW * GROUPS;
constexpr int LANES = THREADS_PER_ROW < 32 ? THREADS_PER_ROW : 32;
constexpr int WARPS = THREADS_PER_ROW / LANES;
constexpr int SENDERS = WARPS * CLUSTER;

__device__ inline unsigned cluster_rank() {
    unsigned rank = 0;
#if CLUSTER > 1
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

__device__ inline void cluster_barrier() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Orders shared memory accesses among the lanes of a row. Other rows of the warp may be at other
// instructions.
__device__ inline void sync_lanes() {
    constexpr unsigned FIRST = LANES < 32 ? (1u << LANES % 32) - 1 : ~0u;
    __syncwarp(FIRST << (threadIdx.x % 32 / LANES * LANES));
}

// The larger of two magnitudes; NaN if either is NaN.
__device__ inline float larger(float one, float other) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
    return result;
#else
    return __uint_as_float(max(__float_as_uint(one), __float_as_uint(other)));
#endif
}

// Combines the values of two threads: their sum, or the larger.
struct Sum { __device__ static float of(float one, float other) { return one + other; } };
struct Larger { __device__ static float of(float one, float other) { return larger(one, other); } };

template <int WIDTH, class Both = Sum>
__device__ inline float reduce_lanes(float value) {
    #pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2) value = Both::of(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// The same of each of COUNT values: of value i by the lanes i * WIDTH / COUNT and the next, with
// about as many shuffles as for one value.
template <int WIDTH, class Both, int COUNT>
__device__ inline float reduce_each(const float (&values)[COUNT]) {
    if constexpr (COUNT == 1) {
        return reduce_lanes<WIDTH, Both>(values[0]);
    } else {
        const bool is_upper = threadIdx.x % WIDTH >= WIDTH / 2;
        float halves[COUNT / 2];
        #pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float own = is_upper ? values[COUNT / 2 + i] : values[i], others = is_upper ? values[i] : values[COUNT / 2 + i];
            halves[i] = Both::of(own, __shfl_xor_sync(~0u, others, WIDTH / 2));
        }
        return reduce_each<WIDTH / 2, Both>(halves);
    }
}

// Two sums, with one shuffle more than one sum takes. The lower half of the lanes gets the first,
// the upper half the second.
template <int WIDTH>
__device__ inline float reduce_lanes(float first, float second) {
    const bool is_upper = threadIdx.x % WIDTH >= WIDTH / 2;
    const float own = is_upper ? second : first, others = is_upper ? first : second;
    return reduce_lanes<WIDTH / 2>(own + __shfl_xor_sync(~0u, others, WIDTH / 2));
}

// Combines the values of all senders of a row; `of(i)` is the value of sender i.
template <class Both = Sum, class Of>
__device__ inline float total_of(const Of& of) {
    if constexpr (SENDERS <= TREE_SENDERS) {
        // A tree in every thread, over values that it reads itself, is faster than shuffles.
        float totals[SENDERS];
        #pragma unroll
        for (int i = 0; i < SENDERS; ++i) totals[i] = of(i);
        #pragma unroll
        for (int count = SENDERS; count > 1; count = (count + 1) / 2)
            #pragma unroll
            for (int i = 0; i < SENDERS / 2; ++i)
                if (i + (count + 1) / 2 < count) totals[i] = Both::of(totals[i], totals[i + (count + 1) / 2]);
        return totals[0];
    } else {
        constexpr int WIDTH = SENDERS > 16 ? 32 : 16;
        float total = 0.0f;
        #pragma unroll
        for (int i = 0; i < SENDERS; i += WIDTH) {
            const int at = i + threadIdx.x % WIDTH;
            if (SENDERS % WIDTH == 0 || at < SENDERS) total = Both::of(total, of(at));
        }
        return reduce_lanes<WIDTH, Both>(total);
    }
}

template <class Both = Sum>
__device__ inline float total_of(const float (&sent)[SENDERS]) {
    return total_of<Both>([&](int i) { return sent[i]; });
}

#if __CUDA_ARCH__ >= 900
// Maps an address of this block's shared memory to the same object of block `rank` of the cluster.
__device__ inline unsigned of_block(unsigned address, unsigned rank) {
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}
#endif

template <int MOST>
struct RowSums {
    float (*buffers)[GROUPS][MOST][SENDERS];
    unsigned group, thread, turn;

    __device__ RowSums(float (*shared)[GROUPS][MOST][SENDERS], unsigned group, unsigned thread)
        : buffers(shared), group(group), thread(thread), turn(0) {
        // Waits until the other blocks exist, so that their shared memory can be written.
        cluster_barrier();
    }

    // Sums each of the values over the threads of the row; every thread gets the sums.
    template <int COUNT>
    __device__ void sum(float (&values)[COUNT]) {
        send(values);
        receive(values);
    }

    // Sums the first SUMS values over the threads of the row, and takes the largest of each other
    // value, a magnitude.
    template <int SUMS, int COUNT>
    __device__ void reduce(float (&values)[COUNT]) {
        send<COUNT, SUMS>(values);
        receive<COUNT, SUMS>(values);
    }

    // The first half of `sum`. Work between `send` and `receive` hides the latency of the exchange.
    template <int COUNT, int SUMS = COUNT>
    __device__ void send(float (&values)[COUNT]) {
        static_assert(COUNT <= MOST, "the buffers are too small");
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = i < SUMS ? reduce_lanes<LANES>(values[i]) : reduce_lanes<LANES, Larger>(values[i]);
        if constexpr (SENDERS > 1) store(buffers[turn][group], values);
        arrive();
    }

    // The second half of `sum`, with the values that `send` left.
    template <int COUNT, int SUMS = COUNT>
    __device__ void receive(float (&values)[COUNT]) {
        if constexpr (SENDERS > 1) {
            wait();
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const float (&sent)[SENDERS] = buffers[turn][group][i];
                values[i] = i < SUMS ? total_of(sent) : total_of<Larger>(sent);
            }
            turn ^= 1;
        }
    }

private:
    template <int COUNT>
    __device__ void store(float (&buffer)[MOST][SENDERS], const float (&values)[COUNT]) {
        const unsigned lane = thread % 32, warp = thread / 32;
#if CLUSTER > 1
        // Lane i writes to block i.
        if (lane < CLUSTER) {
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const unsigned own = unsigned(__cvta_generic_to_shared(&buffer[i][cluster_rank() * WARPS + warp]));
                asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(of_block(own, lane)), "f"(values[i]) : "memory");
            }
        }
#else
        if (lane == 0) {
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) buffer[i][warp] = values[i];
        }
#endif
    }

    __device__ void arrive() {
#if CLUSTER > 1
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }

    __device__ void wait() {
#if CLUSTER > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
        if constexpr (GROUPS == 1) __syncthreads();
        else asm volatile("bar.sync %0, %1;" :: "r"(group + 1), "n"(THREADS_PER_ROW) : "memory");
#endif
    }
};

// 1 / sqrt(value) with a relative error of at most 2^-23: the device's estimate and one Newton
// step. Zero, infinity and NaN follow IEEE 754.
__device__ inline float reciprocal_root(float value) {
    float root;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
    const float error = fmaf(-value * root, root, 1.0f);
    // 0 * inf: the estimate is exact already.
    return error == error ? fmaf(root * 0.5f, error, root) : root;
}
