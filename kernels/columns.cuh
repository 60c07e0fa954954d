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
    const float* first; // of rank 0
    unsigned long long stride;

    __device__ Found(const Params& p, const Columns& c, unsigned long long row)
        : c(c), first(c.numbers + row * NUMBERS), stride(p.rows * NUMBERS) {}

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
