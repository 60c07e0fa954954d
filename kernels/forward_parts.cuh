// h if x is the sum of several parts: math.md, equation (1'). Used by all kernels of forward.
//
// Each sum is only added to and finally rounded. There is no product that could contract to an FMA.

#if HAS_PARTS

// Parts that a thread loads together. Most calls have at most four, so no load waits for another.
constexpr int PARTS_AHEAD = 4;

template <class E>
__device__ inline void add_to(float (&sum)[PACK], const Pack<E>& addend) {
    float values[PACK];
    unpack(addend, values);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sum[i] += values[i];
}

// Computes COUNT packs of h from pack `begin` on. Packs after the thread's last one are not
// written.
template <Reuse REUSE, int COUNT>
__device__ inline void add_parts(
    const Params& p, unsigned long long row, unsigned long long first, int begin, int left, Pack<R>* h
) {
    const auto is_there = [&](int k) { return begin + k < PACKS; };
    float sums[COUNT][PACK];
    #pragma unroll
    for (int k = 0; k < COUNT; ++k)
        #pragma unroll
        for (int i = 0; i < PACK; ++i) sums[k][i] = -0.0f; // -0 keeps every first part unchanged, including the sign of a zero
#if HAS_RESIDUAL
    Pack<R> residual[COUNT];
    #pragma unroll
    for (int k = 0; k < COUNT; ++k)
        if (is_there(k)) residual[k] = load_pack<REUSE>(ROW(residual, row) + first, begin + k, left);
#endif
    const T* x = ROW(x, row) + first;
    for (unsigned long long part = 0; part < p.parts; part += PARTS_AHEAD) {
        Pack<T> addends[PARTS_AHEAD][COUNT];
        #pragma unroll
        for (int i = 0; i < PARTS_AHEAD; ++i) {
            if (part + i < p.parts) {
                #pragma unroll
                for (int k = 0; k < COUNT; ++k)
                    if (is_there(k)) addends[i][k] = load_pack<REUSE>(x, begin + k, left);
            }
            x += p.part_stride;
        }
        #pragma unroll
        for (int i = 0; i < PARTS_AHEAD; ++i) {
            if (part + i < p.parts) {
                #pragma unroll
                for (int k = 0; k < COUNT; ++k)
                    if (is_there(k)) add_to(sums[k], addends[i][k]);
            }
        }
    }
    #pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        if (is_there(k)) {
#if HAS_RESIDUAL
            add_to(sums[k], residual[k]);
#endif
            h[k] = pack<R>(sums[k]);
        }
    }
}

// Computes all packs of a thread, BATCH at a time.
template <Reuse REUSE>
__device__ inline void add_parts(const Params& p, unsigned long long row, unsigned first, int left, Pack<R> (&h)[PACKS]) {
    #pragma unroll
    for (int k = 0; k < PACKS; k += BATCH) add_parts<REUSE, BATCH>(p, row, first, k, left, h + k);
}

#endif
