// The norm of a call: where its weight, bias and statistics are.
struct Norm {
    static constexpr bool IS_FIRST = true, SCALES = HAS_WEIGHT, SHIFTS = HAS_BIAS;

    __device__ static const W* weight(const Params& p) { return p.weight; }
    __device__ static const W* bias(const Params& p) { return p.bias; }
    __device__ static float* means(const Params& p) { return p.mean; }
    __device__ static float* rstds(const Params& p) { return p.rstd; }
};
