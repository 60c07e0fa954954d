// Code shared by the kernels of a sum over ranks: adding parts, and normalizing a row of their sum.

// Packs that are loaded and waited for together.
constexpr int TOGETHER = BATCH < PACKS ? BATCH : PACKS;

// Whether kernels with owners keep the parameters in registers throughout.
constexpr bool HOLDS_PARAMETERS = KEEPS_ROW && RANKS <= 4 && !IS_LAYER;

// h from the parts in rank order and the residual: additions in f32, one rounding. `own` is the
// part of rank `rank`.
__device__ inline Pack<R> add_parts(const Pack<T>& own, unsigned rank, const Pack<T> (&others)[RANKS], const Before::Addend& addend) {
    // Selects word by word, so that the compiler selects values and not addresses.
    const auto part = [&](unsigned of) {
        Pack<T> part;
        #pragma unroll
        for (int word = 0; word < 4; ++word) part.words[word] = of == rank ? own.words[word] : others[of].words[word];
        return part;
    };
    float sum[PACK];
    unpack(part(0), sum);
    #pragma unroll
    for (unsigned of = 1; of < RANKS; ++of) add_pack(part(of), sum);
    Before::add_to(sum, addend);
    return pack<R>(sum);
}

// Normalizes a row: `h(k)` is its pack k. `put` gets the values of each, and the statistics are
// those of row `place`.
template <class Load, class Parameters, class Put>
__device__ inline void normalize_row(
    const Params& p, RowSums<SUMS_ABOUT_MEAN>& sums, const Load& h, const Parameters& parameters, const Put& put, int left, unsigned long long place) {
    float mean[1] = {0.0f}, rstd[1];
    find_statistics<KEEPS_ROW ? PACKS : TOGETHER>(p, sums, [&](int, int k) { return h(k); }, left, [] {}, mean, rstd);

    #pragma unroll (KEEPS_ROW ? PACKS : TOGETHER)
    for (int k = 0; k < PACKS; ++k) {
        float y[PACK], weight[PACK], bias[PACK];
        unpack(h(k), y);
        unpack_weight(parameters.weight(k), p.weight_offset, weight);
        unpack(parameters.bias(k), bias);
        normalize(y, mean[0], rstd[0], weight, bias);
        put(k, y);
    }
    store_statistics<Norm>(p, place, mean[0], rstd[0]);
}
