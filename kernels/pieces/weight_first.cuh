// Before the statistics: h = x * weight', rounded to the dtype of x: math.md, equation (24).
struct WeightFirst {
    using Value = T;
    using First = X;
    static constexpr bool IS_READ_ONCE = false;

    template <Hint HINT>
    __device__ static Pack<T> load(const At& at, int k) { return add<HINT>(X::load<HINT>(at, k), at, k); }

    template <Hint HINT>
    __device__ static Pack<T> add(const Pack<T>& x, const At& at, int k) { return add(x, load_addend<HINT>(at, k)); }

    struct Addend {
        Pack<W> weight;
        float offset;
    };

    template <Hint HINT>
    __device__ static Addend load_addend(const At& at, int k) {
        return {load_parameter<true>(Norm::weight(at.p) + row_column(at.p, at.row) + at.first, k, at.left), at.p.weight_offset};
    }

    __device__ static Pack<T> add(const Pack<T>& x, const Addend& addend) {
        float h[PACK], weight[PACK];
        unpack(x, h);
        unpack_weight<true>(addend.weight, addend.offset, weight);
        weigh(h, weight);
        return pack<T>(h);
    }

    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<T> (&h)[PACKS]) {
        X::load_row<HINT>(at, h);
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = add<HINT>(h[k], at, k);
    }

    // h is not stored.
    __device__ static void store_h(const At&, int, const Pack<T>&) {}
    __device__ static void store_h_row(const At&, const Pack<T> (&)[PACKS]) {}

    struct Slot {
        Pack<T> x[PACKS][THREADS]; // replaced by h once it is computed

        __device__ void start(const At& at, int k) { start_copy(&x[k][threadIdx.x], AT(x), k, at.left); }

        __device__ void finish(const At& at) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) x[k][threadIdx.x] = add<Hint::Keep>(x[k][threadIdx.x], at, k);
        }

        __device__ Pack<T> pack(int k) const { return x[k][threadIdx.x]; }
    };
};
