// What forward does with one pack once the statistics are known.
//
// RESIDUAL_AFTER: the residual is added to what the norm gives, and the rounded sum is residual_out. NORMS_TWICE: y is the norm of
// that sum, by parameters of its own. math.md, equations (13) and (14). HAS_PARTS: x is the sum of several matrices. math.md,
// equation (1').

#define RESIDUAL_BEFORE (HAS_RESIDUAL && !RESIDUAL_AFTER)

// Whether what is normalized is a rounded sum: of x and the residual, of the parts of x, or of both.
#define IS_SUM (RESIDUAL_BEFORE || HAS_PARTS)

// The type of what is normalized: x, or the rounded sum.
#if IS_SUM
using H = R;
#else
using H = T;
#endif

// Adds a pack's part of sum(h), or of sum((h - mean)^2). Columns past the end hold zeros, which are not part of the row.
template <bool SQUARES, class E>
__device__ inline void add_pack(const Pack<E>& h, float mean, int k, int left, float (&sums)[PACK]) {
    float values[PACK];
    unpack(h, values);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        const float deviation = !SQUARES ? values[i] : !IS_LAYER || is_in_row(k, i, left) ? values[i] - mean : 0.0f;
        sums[i] += SQUARES ? deviation * deviation : deviation;
    }
}

// y from h, in place.
template <bool ADDS_BIAS = HAS_BIAS>
__device__ inline void normalize(
    float (&values)[PACK], float mean, float rstd, const float (&weight)[PACK], const float (&bias)[PACK]
) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        float x_hat = (values[i] - mean) * rstd;
#if CAST_BEFORE_WEIGHT
        x_hat = to_f32(from_f32<T>(x_hat));
#endif
        values[i] = x_hat * weight[i];
        if constexpr (ADDS_BIAS) values[i] += bias[i];
    }
}

// residual_out from what the norm gave and a residual that comes after it. Past the end there may be anything, but for a second
// norm zeros.
__device__ inline Pack<R> add_residual(const float (&normed)[PACK], const Pack<R>& residual, int k, int left) {
    float sum[PACK];
    unpack(residual, sum);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sum[i] = !NORMS_TWICE || is_in_row(k, i, left) ? sum[i] + normed[i] : 0.0f;
    return pack<R>(sum);
}

// h from x and residual, as it is stored.
__device__ inline Pack<R> add_residual(const Pack<T>& x, const Pack<R>& residual) {
    float sum[PACK], addend[PACK];
    unpack(x, sum);
    unpack(residual, addend);
    #pragma unroll
    for (int i = 0; i < PACK; ++i) sum[i] += addend[i];
    return pack<R>(sum);
}
