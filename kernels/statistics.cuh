// Statistics of a row: mean and rstd, math.md, equations (2) to (4).

// Adds a pack to the thread's partial sums of h.
template <class E>
__device__ inline void add_pack(const Pack<E>& h, float (&sums)[PACK]) {
    float values[PACK];
    unpack(h, values);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sums[i] += values[i];
}

// The number of sums about a mean: the squared deviations and, for layer norm, the deviations,
// which measure the error of that mean.
constexpr int SUMS_ABOUT_MEAN = IS_LAYER ? 2 : 1;

// A thread's partial sums. The deviations have one accumulator, because registers do not suffice
// for PACK of them.
struct AboutMean {
    float squares[PACK] = {}, deviations = 0.0f;

    // Columns past the end of the row hold zeros that must not count.
    __device__ static float deviation(float value, float mean, int k, int i, int left) {
        return !IS_LAYER || is_in_row(k, i, left) ? value - mean : 0.0f;
    }

    template <class E>
    __device__ void add(const Pack<E>& h, float mean, int k, int left) {
        float values[PACK];
        unpack(h, values);
        #pragma unroll
        for (int i = 0; i < PACK / 2; ++i) {
            const float one = deviation(values[i], mean, k, i, left), other = deviation(values[i + PACK / 2], mean, k, i + PACK / 2, left);
            squares[i] += one * one;
            squares[i + PACK / 2] += other * other;
            values[i] = one + other;
        }
        if constexpr (IS_LAYER) {
            float part = values[0];
            #pragma unroll
            for (int i = 1; i < PACK / 2; ++i) part += values[i];
            deviations += part;
        }
    }

    __device__ void total(float& of_squares, float& of_deviations) {
        of_squares = sum_pack(squares);
        if constexpr (IS_LAYER) of_deviations = deviations;
    }
};

constexpr float LARGEST = 3.40282347e38f;

__device__ inline bool is_finite(float value) { return value - value == 0.0f; }

// Corrects the mean and the sum of squares about it: math.md, 5.1. A mean that is not finite is
// kept. Nothing is contracted to FMA, so that a row has the same bits in every kernel. There is no
// branch, because registers would spill around one.
__device__ inline void correct_mean(float inv_cols, float deviations, float& mean, float& squares) {
    const float missed = is_finite(deviations) ? __fmul_rn(deviations, inv_cols) : 0.0f;
    // At most `squares` is subtracted, and nothing from infinity. NaN is kept.
    const float taken = fminf(__fmul_rn(deviations, missed), LARGEST);
    squares = __fsub_rn(squares, fminf(taken, squares));
    mean = __fadd_rn(mean, missed);
}

// rstd, from a sum of squares: equation (4), or (23) for the clamped L2 norm, whose eps here is the
// square. NaN stays.
__device__ inline float rstd_of(const Params& p, float squares) {
    if constexpr (IS_CLAMPED) return reciprocal_root(squares < p.eps ? p.eps : squares);
    else return reciprocal_root(squares * p.inv_cols + p.eps);
}

// Mean and rstd of COUNT rows, equations (2) to (4), in the threads that share them. `sum_of(u)`
// returns the thread's partial sum of row u. `about(u, mean, squares, deviations)` computes its
// partial sums about a mean. `meanwhile` runs during the exchange of the last sums.
template <int COUNT, class Sums, class SumOf, class About, class Meanwhile>
__device__ inline void find_statistics(
    const Params& p, Sums& sums, const SumOf& sum_of, const About& about, const Meanwhile& meanwhile,
    float (&mean)[COUNT], float (&rstd)[COUNT]
) {
    if constexpr (IS_LAYER) {
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) mean[u] = sum_of(u);
        sums.sum(mean);
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) mean[u] = __fmul_rn(mean[u], p.inv_cols);
    }
    float found[COUNT * SUMS_ABOUT_MEAN];
    #pragma unroll
    for (int u = 0; u < COUNT; ++u) {
        float squares, deviations;
        about(u, mean[u], squares, deviations);
        found[u] = squares;
        if constexpr (IS_LAYER) found[COUNT + u] = deviations;
    }
    sums.send(found);
    meanwhile();
    sums.receive(found);
    #pragma unroll
    for (int u = 0; u < COUNT; ++u) {
        if constexpr (IS_LAYER) correct_mean(p.inv_cols, found[COUNT + u], mean[u], found[u]);
        rstd[u] = rstd_of(p, found[u]);
    }
}

// The thread's partial sum of h in a row that stays on chip. `load(k)` returns pack k; TOGETHER
// packs are read at a time.
template <int TOGETHER, class Load>
__device__ inline float sum_packs(const Load& load) {
    float sums[PACK];
    // Starting from zeros would cost PACK more additions.
    unpack(load(0), sums);
    #pragma unroll TOGETHER
    for (int k = 1; k < PACKS; ++k) add_pack(load(k), sums);
    return sum_pack(sums);
}

// The thread's partial sums about a mean.
template <int TOGETHER, class Load>
__device__ inline void sum_packs_about(const Load& load, float mean, int left, float& squares, float& deviations) {
    AboutMean about;
    #pragma unroll TOGETHER
    for (int k = 0; k < PACKS; ++k) about.add(load(k), mean, k, left);
    about.total(squares, deviations);
}

// The same of rows that stay on chip. `load(u, k)` returns pack k of row u; TOGETHER packs are read
// before their sums are added.
template <int TOGETHER, int COUNT, class Sums, class Load, class Meanwhile>
__device__ inline void find_statistics(
    const Params& p, Sums& sums, const Load& load, int left, const Meanwhile& meanwhile, float (&mean)[COUNT], float (&rstd)[COUNT]
) {
    const auto row = [&](int u) { return [&load, u](int k) { return load(u, k); }; };
    const auto about = [&](int u, float mean, float& squares, float& deviations) {
        sum_packs_about<TOGETHER>(row(u), mean, left, squares, deviations);
    };
    find_statistics(p, sums, [&](int u) { return sum_packs<TOGETHER>(row(u)); }, about, meanwhile, mean, rstd);
}

// Stores the statistics of row `row`, in one thread of the row's blocks. N: `Norm`, `NextNorm`.
template <class N>
__device__ inline void store_statistics(const Params& p, unsigned long long row, float mean, float rstd) {
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        if (IS_LAYER && N::means(p)) N::means(p)[statistic(row)] = mean;
        if (N::rstds(p)) N::rstds(p)[statistic(row)] = rstd;
    }
}

// The same for COUNT rows: `at(u)` is a place in row u, if it `exists`.
template <int COUNT, class Exists, class AtRow>
__device__ inline void store_statistics(
    bool is_writer, float* means, float* rstds, const Exists& exists, const AtRow& at, const float (&mean)[COUNT], const float (&rstd)[COUNT]
) {
    if (is_writer) {
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            if (exists(u)) {
                if (IS_LAYER && means) means[statistic(at(u).row)] = mean[u];
                if (rstds) rstds[statistic(at(u).row)] = rstd[u];
            }
        }
    }
}
