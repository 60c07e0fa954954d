// Sums over the threads that share a row, in an order that depends on the tile alone, and largest magnitudes.
//
// Lanes of a warp exchange by shuffles, warps through shared memory, the blocks of a cluster through each other's shared
// memory. One barrier a sum: two buffers alternate, so that nobody overwrites what another still reads.
// Of two sums that overlap, the second is sent only after the first was received.

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

// Orders shared memory among the lanes of a row. Other rows of the warp may be elsewhere.
__device__ inline void sync_lanes() {
    constexpr unsigned FIRST = LANES < 32 ? (1u << LANES % 32) - 1 : ~0u;
    __syncwarp(FIRST << (threadIdx.x % 32 / LANES * LANES));
}

// The larger of two magnitudes; NaN if one is.
__device__ inline float larger(float one, float other) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
    return result;
#else
    return __uint_as_float(max(__float_as_uint(one), __float_as_uint(other)));
#endif
}

// What two threads have makes one: their sum, or the larger.
struct Sum { __device__ static float of(float one, float other) { return one + other; } };
struct Larger { __device__ static float of(float one, float other) { return larger(one, other); } };

template <int WIDTH, class Both = Sum>
__device__ inline float reduce_lanes(float value) {
    #pragma unroll
    for (int distance = WIDTH / 2; distance > 0; distance /= 2) value = Both::of(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// Two sums, by as many shuffles as one and one more: the lower half of the lanes gets the first, the upper half the second.
template <int WIDTH>
__device__ inline float reduce_lanes(float first, float second) {
    const bool is_upper = threadIdx.x % WIDTH >= WIDTH / 2;
    const float own = is_upper ? second : first, others = is_upper ? first : second;
    return reduce_lanes<WIDTH / 2>(own + __shfl_xor_sync(~0u, others, WIDTH / 2));
}

// What all senders of a row have, made one; `of` says what sender i has.
template <class Both = Sum, class Of>
__device__ inline float total_of(const Of& of) {
    if constexpr (SENDERS <= TREE_SENDERS) {
        // A tree over what every thread reads itself is sooner done than shuffles.
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
// Where block `rank` of the cluster has what this block has at an address of its shared memory.
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
        // The other blocks must exist before their shared memory is written.
        cluster_barrier();
    }

    // Each of the values, summed over the threads of the row; every thread gets the sums.
    template <int COUNT>
    __device__ void sum(float (&values)[COUNT]) {
        send(values);
        receive(values);
    }

    // The first SUMS of the values, summed over the threads of the row; of the others the largest, which are magnitudes.
    template <int SUMS, int COUNT>
    __device__ void reduce(float (&values)[COUNT]) {
        send<COUNT, SUMS>(values);
        receive<COUNT, SUMS>(values);
    }

    // The first half of `sum`. What a thread does before `receive` hides the time that the exchange takes.
    template <int COUNT, int SUMS = COUNT>
    __device__ void send(float (&values)[COUNT]) {
        static_assert(COUNT <= MOST, "the buffers are too small");
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = i < SUMS ? reduce_lanes<LANES>(values[i]) : reduce_lanes<LANES, Larger>(values[i]);
        if constexpr (SENDERS > 1) store(buffers[turn][group], values);
        arrive();
    }

    // The second half: the same values, as `send` left them.
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

// 1 / sqrt(value), with a relative error of at most 2^-23: the device's estimate and one step of Newton's method.
// Zero, infinity and NaN give what IEEE 754 says.
__device__ inline float reciprocal_root(float value) {
    float root;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
    const float error = fmaf(-value * root, root, 1.0f);
    // 0 * inf: the estimate is exact already.
    return error == error ? fmaf(root * 0.5f, error, root) : root;
}
