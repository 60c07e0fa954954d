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

// h of one pack. The place is computed for each tensor anew: loops are unrolled as measured then.
__device__ inline Pack<H> load_h(const Params& p, unsigned long long row, const Visit& visit) {
    const auto at = [&] { return At{p, row, visit.col, visit.left()}; };
    return Before::add<Hint::EvictFirst>(Before::First::load<Hint::EvictFirst>(at(), 0), at(), 0);
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

// Normalizes a pack, given the statistics of its row; `put` gets the values.
template <class N, class E, class Put>
__device__ inline void normalize_pack(const Params& p, const Visit& visit, const Pack<E>& h, float mean, float rstd, const Put& put) {
    float y[PACK], weight[PACK], bias[PACK];
    unpack(h, y);
    unpack_weight<N::SCALES>(load_parameter<N::SCALES>(N::weight(p) + visit.col, 0, visit.left()), p.weight_offset, weight);
    unpack(load_parameter<N::SHIFTS>(N::bias(p) + visit.col, 0, visit.left()), bias);
    normalize<N::SHIFTS>(y, mean, rstd, weight, bias);
    put(y);
}

// Writes what follows the norm of a pack, and residual_out.
__device__ inline void write_pack(
    const Params& p, unsigned long long row, const Visit& visit, const Pack<H>& h, float mean, float rstd
) {
    normalize_pack<Norm>(p, visit, h, mean, rstd, [&](const float (&y)[PACK]) {
        const auto at = [&] { return At{p, row, visit.col, visit.left()}; };
        const After::Waiting held = After::load<Hint::EvictFirst>(at(), 0);
        Before::store_h(at(), 0, h);
        After::put(at(), 0, y, held);
    });
}
