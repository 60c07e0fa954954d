// After the norm: it is added to the residual, rounded: math.md, equation (13). The sum replaces
// the residual where that waits, and `Next` normalizes it. No sum is kept for `Next` = void.

// residual_out. Columns past the end of the row are undefined, but zeros if they are normalized.
template <bool IS_KEPT>
__device__ inline Pack<R> add_to_residual(const float (&normed)[PACK], const Pack<R>& residual, int k, int left) {
    float sum[PACK];
    unpack(residual, sum);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sum[i] = !IS_KEPT || is_in_row(k, i, left) ? sum[i] + normed[i] : 0.0f;
    return pack<R>(sum);
}

template <class Next>
struct ResidualAfter {
    static constexpr bool GOES_ON = !IS_SAME<Next, void>;
    using Waiting = Pack<R>;

    template <Hint HINT>
    __device__ static Waiting load(const At& at, int k) { return load_pack<HINT>(AT(residual), k, at.left); }

    __device__ static Waiting put(const At& at, int k, const float (&y)[PACK], const Waiting& residual) {
        const Waiting sum = add_to_residual<GOES_ON>(y, residual, k, at.left);
        store_pack(AT(residual_out), k, at.left, sum);
        return sum;
    }

    // The sum that this thread stored itself.
    __device__ static Waiting load_sum(const At& at) { return load_pack<Hint::EvictFirst>(AT(residual_out), 0, at.left); }

    template <class Kept, class Run>
    __device__ static void then(Kept&& kept, const Run& run) {
        if constexpr (GOES_ON) run(Next{}, kept);
    }

    struct Slot {
        Pack<R> residual[PACKS][THREADS];

        __device__ void start(const At& at, int k) { start_copy(&residual[k][threadIdx.x], AT(residual), k, at.left); }

        __device__ void put(const At& at, int k, const float (&y)[PACK]) {
            Pack<R>& sum = residual[k][threadIdx.x];
            sum = ResidualAfter::put(at, k, y, sum);
        }

        __device__ Pack<R> pack(int k) const { return residual[k][threadIdx.x]; }
    };
};
