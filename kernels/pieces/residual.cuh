// Before the statistics: h = x + residual, rounded: math.md, equation (1).
struct Residual {
    using Value = R;
    using First = X;
    static constexpr bool IS_READ_ONCE = false;

    template <Hint HINT>
    __device__ static Pack<R> load(const At& at, int k) { return add<HINT>(X::load<HINT>(at, k), at, k); }

    template <Hint HINT>
    __device__ static Pack<R> add(const Pack<T>& x, const At& at, int k) { return add(x, load_addend<HINT>(at, k)); }

    __device__ static Pack<R> add(const Pack<T>& x, const Pack<R>& residual) {
        float sum[PACK], addend[PACK];
        unpack(x, sum);
        unpack(residual, addend);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) sum[i] += addend[i];
        return pack<R>(sum);
    }

    using Addend = Pack<R>;

    template <Hint HINT>
    __device__ static Addend load_addend(const At& at, int k) { return load_pack<HINT>(AT(residual), k, at.left); }

    __device__ static void add_to(float (&sum)[PACK], const Addend& residual) { add_pack(residual, sum); }

    template <Hint HINT>
    __device__ static void load_row(const At& at, Pack<R> (&h)[PACKS]) {
        #pragma unroll
        for (int k = 0; k < PACKS; ++k) h[k] = load<HINT>(at, k);
    }

    __device__ static void store_h(const At& at, int k, const Pack<R>& h) {
        if (at.p.residual_out.data) store_pack(AT(residual_out), k, at.left, h);
    }

    __device__ static void store_h_row(const At& at, const Pack<R> (&h)[PACKS]) {
        if (at.p.residual_out.data) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) store_pack(AT(residual_out), k, at.left, h[k]);
        }
    }

    struct Slot {
        Pack<T> x[PACKS][THREADS];
        Pack<R> residual[PACKS][THREADS]; // replaced by h once it is computed

        __device__ void start(const At& at, int k) {
            start_copy(&x[k][threadIdx.x], AT(x), k, at.left);
            start_copy(&residual[k][threadIdx.x], AT(residual), k, at.left);
        }

        __device__ void finish(const At& at) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                Pack<R>& h = residual[k][threadIdx.x];
                h = add(x[k][threadIdx.x], h);
                store_h(at, k, h);
            }
        }

        __device__ Pack<R> pack(int k) const { return residual[k][threadIdx.x]; }
    };
};
