// Rows that do not fit on chip and are read repeatedly. Shared by forward_streaming.cu,
// quantized_forward_streaming.cu and both phases of forward on a rank's columns.

// Every pack counts as pack 0 of a thread with one pack, its last (`may_pass_end`).
static_assert(PACKS == 1);

// A position in a row. The packs that a thread visits are THREADS_PER_ROW * CLUSTER packs apart.
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

// Visits a thread's packs in blocks of BLOCK_VISITS and closes each block. Long sums are sums of
// block sums, so that no chain of additions is long.
template <class Add, class Close>
__device__ inline void visit_in_blocks(Visit at, const Add& add, const Close& close) {
    while (at.is_inside()) {
        const unsigned long long end = min(at.cols, at.col + (unsigned long long)BLOCK_VISITS * STEP);
        #pragma unroll 4
        for (; at.col < end; at.advance()) add(at);
        close();
    }
}

// Mean and rstd of a row; `load(at)` returns its pack at a visit.
template <class Sums, class Load>
__device__ inline void find_statistics(
    const Params& p, Sums& sums, const Load& load, const Visit& start, float (&mean)[1], float (&rstd)[1]
) {
    const auto sum_of = [&](int) {
        float sum = 0.0f, block[PACK] = {};
        visit_in_blocks(start, [&](const Visit& at) { add_pack(load(at), block); }, [&] {
            sum += sum_pack(block);
            #pragma unroll
            for (float& part : block) part = 0.0f;
        });
        return sum;
    };
    const auto about = [&](int, float mean, float& squares, float& deviations) {
        AboutMean block;
        squares = deviations = 0.0f;
        visit_in_blocks(start, [&](const Visit& at) { block.add(load(at), mean, 0, at.left()); }, [&] {
            float of_squares, of_deviations = 0.0f;
            block.total(of_squares, of_deviations);
            squares += of_squares, deviations += of_deviations;
            block = {};
        });
    };
    find_statistics(p, sums, sum_of, about, [] {}, mean, rstd);
}

// Writes y and residual_out of a pack, given the statistics.
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
