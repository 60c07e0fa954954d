// The norm of the sum that the first norm is added to: math.md, equation (14). Kind, eps, weight
// offset and cast order are those of the first norm.
struct NextNorm {
    static constexpr bool IS_FIRST = false, SCALES = HAS_NEXT_WEIGHT, SHIFTS = HAS_NEXT_BIAS;

    __device__ static const W* weight(const Params& p) { return p.next_weight; }
    __device__ static const W* bias(const Params& p) { return p.next_bias; }
    __device__ static float* means(const Params& p) { return p.next_mean; }
    __device__ static float* rstds(const Params& p) { return p.next_rstd; }
};
