// Rows whose columns are divided among ranks: what all ranks have found of a row, and what it is for the whole of it. math.md, equations
// (15) to (18).
//
// Every rank makes the same of it, whatever else its kernel does, so that all have the same bits: in the order of the ranks, and by
// operations that do not contract.

// The argument beside Params: the mirror of `Columns` in rmsnorm-cuda/src/params.rs, field for field.
struct Columns {
    float* numbers; // a first half writes (rows, numbers), a second one reads (ranks, rows, numbers)
    unsigned ranks;
    unsigned unused;
    float columns[MOST_COLUMN_RANKS]; // of each rank
};

static_assert(sizeof(Columns) == COLUMNS_BYTES, "kernels/columns.cuh and rmsnorm-cuda/src/params.rs differ");

// Numbers of a row.
constexpr int NUMBERS = IS_BACKWARD ? (IS_LAYER ? 2 : 1) : (IS_LAYER ? 3 : 1);

// What a thread has where threads have rows: those of a group, or of a cluster of blocks, take turns at them.
struct Turn {
    unsigned group, thread; // of the group
    unsigned long long first_row, rows_apart, first_col;

    __device__ Turn() : group(threadIdx.x / THREADS_PER_ROW), thread(threadIdx.x % THREADS_PER_ROW) {
        first_row = (unsigned long long)(blockIdx.x / CLUSTER) * GROUPS + group;
        rows_apart = (unsigned long long)(gridDim.x / CLUSTER) * GROUPS;
        first_col = (unsigned long long)(cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    }

    // Whether it writes what is one for a row.
    __device__ bool is_writer() const { return thread == 0 && cluster_rank() == 0; }
};

// The mean of a rank's own columns. The rank itself and whoever reads what it has found must have the same.
__device__ inline float own_mean(float sum, float columns) { return __fdiv_rn(sum, columns); }

// A row, as all ranks have found it.
struct Found {
    const Columns& c;
    const float* first; // number of rank 0
    unsigned long long stride; // to those of the next rank

    __device__ Found(const Columns& c, const float* first, unsigned long long stride) : c(c), first(first), stride(stride) {}

    __device__ float number(unsigned rank, int i) const { return first[rank * stride + i]; }

    // In the order of the ranks; `of` says what each adds.
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
// What a rank finds of its columns of a row: equation (15). `each` calls what it is given with every pack that a thread has.
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
    float found[ABOUT_MEAN];
    about.total(found[0], found[ABOUT_MEAN - 1]);
    sums.sum(found);
    numbers[NUMBERS - 1] = found[0];
    if constexpr (IS_LAYER) numbers[1] = found[1];
}

// Of a whole row: equation (16).
struct Statistics {
    float mean, rstd;

    __device__ Statistics(const Params& p, const Found& found) : mean(0.0f) {
        float squares;
        if constexpr (IS_LAYER) {
            mean = __fmul_rn(found.sum_of(0), p.share);
            const auto apart = [&](unsigned rank) { return __fsub_rn(own_mean(found.number(rank, 0), found.c.columns[rank]), mean); };
            const float deviations = found.sum([&](unsigned rank) {
                return __fadd_rn(found.number(rank, 1), __fmul_rn(found.c.columns[rank], apart(rank)));
            });
            squares = found.sum([&](unsigned rank) {
                const float product = __fmul_rn(__fmul_rn(2.0f, apart(rank)), found.number(rank, 1));
                const float between = __fmul_rn(found.c.columns[rank], __fmul_rn(apart(rank), apart(rank)));
                return __fadd_rn(__fadd_rn(found.number(rank, 2), product), between);
            });
            correct_mean(p.share, deviations, mean, squares);
        } else squares = found.sum_of(0);
        rstd = reciprocal_root(__fadd_rn(__fmul_rn(squares, p.share), p.eps));
    }
};
#endif
