// The affine part of a norm.

// Replaces h with y in `values`, math.md, equations (5) and (6).
template <bool SHIFTS = HAS_BIAS>
__device__ inline void normalize(
    float (&values)[PACK], float mean, float rstd, const float (&weight)[PACK], const float (&bias)[PACK]
) {
#if CAST_RSTD
    rstd = to_f32(from_f32<T>(rstd));
#endif
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        float x_hat = (values[i] - mean) * rstd;
#if CAST_BEFORE_WEIGHT
        x_hat = to_f32(from_f32<T>(x_hat));
#endif
        values[i] = x_hat * weight[i];
        if constexpr (SHIFTS) values[i] += bias[i];
    }
}

// A weight before the norm: replaces x with h, math.md, equation (24). The product does not
// contract with a sum or a difference, so that forward and backward have one h.
__device__ inline void weigh(float (&values)[PACK], const float (&weight)[PACK]) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) values[i] = to_f32(from_f32<T>(__fmul_rn(values[i], weight[i])));
}
