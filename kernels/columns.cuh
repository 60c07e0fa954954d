// Rows with columns divided among ranks: combines the ranks' numbers for a row into the statistics
// of the whole row. math.md, equations (15) to (18).
//
// All ranks get the same bits in every kernel, because numbers are added in rank order with
// operations that are not contracted to FMA.

// The second kernel argument: mirrors `Columns` in rmsnorm-cuda/src/params.rs field by field.
struct Columns {
    float* numbers; // first phase: (rows, numbers); second phase: (ranks, rows, numbers)
    unsigned ranks;
    unsigned unused;
    float columns[MOST_COLUMN_RANKS]; // columns of each rank
};

static_assert(sizeof(Columns) == COLUMNS_BYTES, "kernels/columns.cuh and rmsnorm-cuda/src/params.rs differ");

// Numbers per row.
constexpr int NUMBERS = IS_BACKWARD ? (IS_LAYER ? 2 : 1) : (IS_LAYER ? 3 : 1);

// The position of a thread in kernels whose groups (or clusters of blocks) take turns at the rows.
struct Place {
    unsigned group, thread; // `thread` within the group
    unsigned long long first_row, rows_apart, first_col;

    __device__ Place() : group(threadIdx.x / THREADS_PER_ROW), thread(threadIdx.x % THREADS_PER_ROW) {
        first_row = (unsigned long long)(blockIdx.x / CLUSTER) * GROUPS + group;
        rows_apart = (unsigned long long)(gridDim.x / CLUSTER) * GROUPS;
        first_col = (unsigned long long)(cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    }

    // Whether this thread writes the values that a row has once.
    __device__ bool is_writer() const { return thread == 0 && cluster_rank() == 0; }
};

// The mean of one rank's columns. That rank and the readers of its numbers must compute the same
// bits.
__device__ inline float own_mean(float sum, float columns) { return __fdiv_rn(sum, columns); }

// The numbers of all ranks for one row.
struct RankNumbers {
    const Columns& c;
    const float* first; // the numbers of rank 0
    unsigned long long stride; // to the numbers of the next rank

    __device__ RankNumbers(const Columns& c, const float* first, unsigned long long stride) : c(c), first(first), stride(stride) {}

    __device__ float number(unsigned rank, int i) const { return first[rank * stride + i]; }

    // Sums `of(rank)` in rank order.
    template <class Of>
    __device__ float sum(const Of& of) const {
        float sum = of(0);
        #pragma unroll 2
        for (unsigned rank = 1; rank < c.ranks; ++rank) sum = __fadd_rn(sum, of(rank));
        return sum;
    }

    __device__ float sum_of(int i) const {
        return sum([&](unsigned rank) { return number(rank, i); });
    }
};

#if !IS_BACKWARD
// The numbers of a rank's columns of a row: equation (15). `each` calls its argument with every
// pack of the thread.
template <class Sums, class Each>
__device__ inline void find_numbers(const Params& p, Sums& sums, const Each& each, float (&numbers)[NUMBERS]) {
    float mean = 0.0f;
    if constexpr (IS_LAYER) {
        float terms[PACK] = {};
        each([&](const Pack<H>& h, int, int) { add_pack(h, terms); });
        float sum[1] = {sum_pack(terms)};
        sums.sum(sum);
        numbers[0] = sum[0];
        mean = own_mean(sum[0], float(p.cols));
    }
    AboutMean about;
    each([&](const Pack<H>& h, int k, int left) { about.add(h, mean, k, left); });
    float found[SUMS_ABOUT_MEAN];
    about.total(found[0], found[SUMS_ABOUT_MEAN - 1]);
    sums.sum(found);
    numbers[NUMBERS - 1] = found[0];
    if constexpr (IS_LAYER) numbers[1] = found[1];
}

// The statistics of a whole row: equation (16).
struct Statistics {
    float mean, rstd;

    __device__ Statistics(const Params& p, const RankNumbers& found) : mean(0.0f) {
        float squares;
        if constexpr (IS_LAYER) {
            mean = __fmul_rn(found.sum_of(0), p.inv_cols);
            const auto apart = [&](unsigned rank) { return __fsub_rn(own_mean(found.number(rank, 0), found.c.columns[rank]), mean); };
            const float deviations = found.sum([&](unsigned rank) {
                return __fadd_rn(found.number(rank, 1), __fmul_rn(found.c.columns[rank], apart(rank)));
            });
            squares = found.sum([&](unsigned rank) {
                const float product = __fmul_rn(__fmul_rn(2.0f, apart(rank)), found.number(rank, 1));
                const float between = __fmul_rn(found.c.columns[rank], __fmul_rn(apart(rank), apart(rank)));
                return __fadd_rn(__fadd_rn(found.number(rank, 2), product), between);
            });
            correct_mean(p.inv_cols, deviations, mean, squares);
        } else squares = found.sum_of(0);
        if constexpr (IS_CLAMPED) rstd = rstd_of(p, squares);
        else rstd = reciprocal_root(__fadd_rn(__fmul_rn(squares, p.inv_cols), p.eps));
    }
};
#endif
