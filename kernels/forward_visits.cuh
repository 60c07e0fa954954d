// Rows that fit nowhere on chip, visited again and again: what forward_streaming.cu, quantized_forward_streaming.cu and the halves of
// forward on a rank's columns have in common.

// Every pack is pack 0 of a thread that has one: its first and its last (`may_pass_end`).
static_assert(PACKS == 1);

// The part of a row that one thread visits: packs that are THREADS_PER_ROW * CLUSTER packs apart.
struct Visit {
    unsigned long long col, cols;

    __device__ bool is_inside() const { return col < cols; }
    __device__ int left() const { return is_inside() ? int(min(cols - col, (unsigned long long)PACK)) : 0; }
    __device__ void advance() { col += STEP; }
};

// h of one pack: x, or the rounded sum with the residual or of parts.
__device__ inline Pack<H> load_h(const Params& p, unsigned long long row, const Visit& at) {
#if HAS_PARTS
    Pack<R> h;
    add_parts<Reuse::ByNone, 1>(p, row, at.col, 0, at.left(), &h);
    return h;
#else
    const Pack<T> x = load_pack<Reuse::ByNone>(ROW(x, row) + at.col, 0, at.left());
#if RESIDUAL_BEFORE
    return add_residual(x, load_pack<Reuse::ByNone>(ROW(residual, row) + at.col, 0, at.left()));
#else
    return x;
#endif
#endif
}

// The thread's part of a row's sum, or of that of the squared distances from the mean; `load` says what the row has at a visit.
template <bool SQUARES, class Load>
__device__ inline float sum_part(const Load& load, Visit at, float mean) {
    float sums[PACK] = {};
    #pragma unroll 4
    for (; at.is_inside(); at.advance()) add_pack<SQUARES>(load(at), mean, 0, at.left(), sums);
    return sum_pack(sums);
}

// The same of h.
template <bool SQUARES>
__device__ inline float sum_part(const Params& p, unsigned long long row, Visit at, float mean) {
    return sum_part<SQUARES>([&](const Visit& visit) { return load_h(p, row, visit); }, at, mean);
}

// y of a pack, once the statistics are known, and residual_out.
__device__ inline void write_pack(
    const Params& p, unsigned long long row, const Visit& at, const Pack<H>& h, float mean, float rstd
) {
    float y[PACK], weight[PACK], bias[PACK];
    unpack(h, y);
    unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + at.col, 0, at.left()), p.weight_offset, weight);
    unpack(load_parameter<HAS_BIAS>(p.bias + at.col, 0, at.left()), bias);
    normalize(y, mean, rstd, weight, bias);
#if RESIDUAL_AFTER
    const Pack<R> residual = load_pack<Reuse::ByNone>(ROW(residual, row) + at.col, 0, at.left());
    store_pack(ROW(residual_out, row) + at.col, 0, at.left(), add_residual(y, residual, 0, at.left()));
#else
#if HAS_RESIDUAL
    if (p.residual_out.data) store_pack(ROW(residual_out, row) + at.col, 0, at.left(), h);
#endif
    store_pack(ROW(y, row) + at.col, 0, at.left(), pack<T>(y));
#endif
}
