// Before the statistics: h is the rounded sum of the parts of x, and of the residual if there is one:
// math.md, equation (1').
//
// Each sum is only added to and finally rounded. There is no product that could contract to an FMA.

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
template <Hint HINT, int COUNT>
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
        if (is_there(k)) residual[k] = load_pack<HINT>(ROW(residual, row) + first, begin + k, left);
#endif
    const T* x = ROW(x, row) + first;
    for (unsigned long long part = 0; part < p.parts; part += PARTS_AHEAD) {
        Pack<T> addends[PARTS_AHEAD][COUNT];
        #pragma unroll
        for (int i = 0; i < PARTS_AHEAD; ++i) {
            if (part + i < p.parts) {
                #pragma unroll
                for (int k = 0; k < COUNT; ++k)
                    if (is_there(k)) addends[i][k] = load_pack<HINT>(x, begin + k, left);
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

struct Parts {
    using Value = R;
    using First = Parts;
    static constexpr bool IS_READ_ONCE = true;

    template <Hint HINT>
    __device__ static Pack<R> load(const At& at, int k) {
        Pack<R> h;
        add_parts<HINT, 1>(at.p, at.row, at.first, k, at.left, &h);
        return h;
    }

    template <Hint HINT>
    __device__ static Pack<R> add(const Pack<R>& h, const At&, int) { return h; }

    // BATCH packs at a time.
    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<R> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; k += BATCH) add_parts<HINT, BATCH>(at.p, at.row, at.first, k, at.left, h + k);
    }

    __device__ static bool stores_h(const Params& p) { return HAS_RESIDUAL && p.residual_out.data; }

    __device__ static void store_h(const At& at, int k, const Pack<R>& h) {
#if HAS_RESIDUAL
        if (at.p.residual_out.data) store_pack(AT(residual_out), k, at.left, h);
#endif
    }

    __device__ static void store_h_row(const At& at, const Pack<R> (&h)[PACKS]) {
#if HAS_RESIDUAL
        if (at.p.residual_out.data) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) store_pack(AT(residual_out), k, at.left, h[k]);
        }
#endif
    }

    // The parts are added in registers; shared memory holds their sum.
    struct Slot {
        Pack<R> sum[PACKS][THREADS];

        __device__ void start(const At& at, int k) {
            if (k % BATCH != 0) return;
            Pack<R> sums[BATCH];
            add_parts<Hint::EvictFirst, BATCH>(at.p, at.row, at.first, k, at.left, sums);
            #pragma unroll
            for (int i = k; i < k + BATCH && i < PACKS; ++i) sum[i][threadIdx.x] = sums[i - k];
        }

        __device__ void finish(const At& at) {
#if HAS_RESIDUAL
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) store_h(at, k, sum[k][threadIdx.x]);
#endif
        }

        __device__ Pack<R> pack(int k) const { return sum[k][threadIdx.x]; }
    };
};
