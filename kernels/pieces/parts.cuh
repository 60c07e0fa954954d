// Before the statistics: h is the rounded sum of the parts of x, and of the residual if `Alone` is
// `Residual`: math.md, equation (1').
//
// Each sum is only added to and finally rounded. There is no product that could contract to an FMA.

// Parts that a thread loads together. Most calls have at most four, so no load waits for another.
constexpr int PARTS_AHEAD = 4;

// Computes COUNT packs of h from pack `begin` on. Packs after the thread's last one are not
// written. `Alone`: what h would be with one part.
template <class Alone, Hint HINT, int COUNT>
__device__ inline void add_parts(const At& at, int begin, Pack<R>* h) {
    const auto is_there = [&](int k) { return begin + k < PACKS; };
    float sums[COUNT][PACK];
    #pragma unroll
    for (int k = 0; k < COUNT; ++k)
        #pragma unroll
        for (int i = 0; i < PACK; ++i) sums[k][i] = -0.0f; // -0 keeps every first part unchanged, including the sign of a zero
    typename Alone::Addend addend[COUNT];
    #pragma unroll
    for (int k = 0; k < COUNT; ++k)
        if (is_there(k)) addend[k] = Alone::template load_addend<HINT>(at, begin + k);
    const T* x = AT(x);
    for (unsigned long long part = 0; part < at.p.parts; part += PARTS_AHEAD) {
        Pack<T> addends[PARTS_AHEAD][COUNT];
        #pragma unroll
        for (int i = 0; i < PARTS_AHEAD; ++i) {
            if (part + i < at.p.parts) {
                #pragma unroll
                for (int k = 0; k < COUNT; ++k)
                    if (is_there(k)) addends[i][k] = load_pack<HINT>(x, begin + k, at.left);
            }
            x += at.p.part_stride;
        }
        #pragma unroll
        for (int i = 0; i < PARTS_AHEAD; ++i) {
            if (part + i < at.p.parts) {
                #pragma unroll
                for (int k = 0; k < COUNT; ++k)
                    if (is_there(k)) add_pack(addends[i][k], sums[k]);
            }
        }
    }
    #pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        if (is_there(k)) {
            Alone::add_to(sums[k], addend[k]);
            h[k] = pack<R>(sums[k]);
        }
    }
}

template <class Alone>
struct Parts : Alone {
    using Value = R;
    using First = Parts;
    static constexpr bool IS_READ_ONCE = true;

    template <Hint HINT>
    __device__ static Pack<R> load(const At& at, int k) {
        Pack<R> h;
        add_parts<Alone, HINT, 1>(at, k, &h);
        return h;
    }

    template <Hint HINT>
    __device__ static Pack<R> add(const Pack<R>& h, const At&, int) { return h; }

    // BATCH packs at a time.
    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<R> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; k += BATCH) add_parts<Alone, HINT, BATCH>(at, k, h + k);
    }

    // The parts are added in registers; shared memory holds their sum.
    struct Slot {
        Pack<R> sum[PACKS][THREADS];

        __device__ void start(const At& at, int k) {
            if (k % BATCH != 0) return;
            Pack<R> sums[BATCH];
            add_parts<Alone, Hint::EvictFirst, BATCH>(at, k, sums);
            #pragma unroll
            for (int i = k; i < k + BATCH && i < PACKS; ++i) sum[i][threadIdx.x] = sums[i - k];
        }

        __device__ void finish(const At& at) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) Alone::store_h(at, k, sum[k][threadIdx.x]);
        }

        __device__ Pack<R> pack(int k) const { return sum[k][threadIdx.x]; }
    };
};
