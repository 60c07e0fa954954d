// Code shared by the kernels of a sum over ranks: adding parts, and normalizing a row of their sum.

// Packs that are loaded and waited for together.
constexpr int TOGETHER = BATCH < PACKS ? BATCH : PACKS;

// h from the parts in rank order and the residual: additions in f32, one rounding. `own` is the
// part of rank `rank`.
__device__ inline Pack<R> add_parts(const Pack<T>& own, unsigned rank, const Pack<T> (&others)[RANKS], const Pack<R>& residual) {
    // Selects word by word, so that the compiler selects values and not addresses.
    const auto unpack_part = [&](unsigned of, float (&values)[PACK]) {
        Pack<T> part;
        #pragma unroll
        for (int word = 0; word < 4; ++word) part.words[word] = of == rank ? own.words[word] : others[of].words[word];
        unpack(part, values);
    };
    float sum[PACK], addend[PACK];
    unpack_part(0, sum);
    #pragma unroll
    for (unsigned of = 1; of < RANKS; ++of) {
        unpack_part(of, addend);
        #pragma unroll
        for (int i = 0; i < PACK; ++i) sum[i] += addend[i];
    }
#if HAS_RESIDUAL
    unpack(residual, addend);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sum[i] += addend[i];
#endif
    return pack<R>(sum);
}

// Normalizes a row: `h(k)` is its pack k. Passes every pack of y to `store`, and writes the
// statistics of row `place`.
template <class H, class Parameters, class Store>
__device__ inline void normalize_row(
    const Params& p, RowSums<SUMS_ABOUT_MEAN>& sums, const H& h, const Parameters& parameters, const Store& store, int left, unsigned long long place) {
    float mean[1] = {0.0f}, rstd[1];
    find_statistics<IS_HELD ? PACKS : TOGETHER>(p, sums, [&](int, int k) { return h(k); }, left, [] {}, mean, rstd);

    #pragma unroll (IS_HELD ? PACKS : TOGETHER)
    for (int k = 0; k < PACKS; ++k) {
        float y[PACK], weight[PACK], bias[PACK];
        unpack(h(k), y);
        unpack_weight(parameters.weight(k), p.weight_offset, weight);
        unpack(parameters.bias(k), bias);
        normalize(y, mean[0], rstd[0], weight, bias);
        store(k, pack<T>(y));
    }
    store_statistics<Norm>(p, place, mean[0], rstd[0]);
}

// A thread's weights and biases: held in registers, or loaded on use.
template <bool HELD>
struct Parameters {
    const Params& p;
    unsigned first;
    int left;
    Pack<W> weights[HELD ? PACKS : 1], biases[HELD ? PACKS : 1];

    __device__ Parameters(const Params& p, unsigned first, int left) : p(p), first(first), left(left) {
        if constexpr (HELD) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                weights[k] = load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
                biases[k] = load_parameter<HAS_BIAS>(p.bias + first, k, left);
            }
        }
    }

    __device__ Pack<W> weight(int k) const {
        if constexpr (HELD) return weights[k];
        else return load_parameter<HAS_WEIGHT>(p.weight + first, k, left);
    }

    __device__ Pack<W> bias(int k) const {
        if constexpr (HELD) return biases[k];
        else return load_parameter<HAS_BIAS>(p.bias + first, k, left);
    }
};
