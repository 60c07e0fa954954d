// The norm of a call: where its weight, bias and statistics are. A weight before the norm scales x,
// not the normalized row.
struct Norm {
    static constexpr bool IS_FIRST = true, SCALES = HAS_WEIGHT && !IS_WEIGHT_FIRST, SHIFTS = HAS_BIAS;

    __device__ static const W* weight(const Params& p) { return p.weight + group_column(p); }
    __device__ static const W* bias(const Params& p) { return p.bias + group_column(p); }
    __device__ static float* means(const Params& p) { return p.mean; }
    __device__ static float* rstds(const Params& p) { return p.rstd; }
};

// A thread's weights and biases: held in registers, or loaded on use.
template <bool HELD>
struct Parameters {
    const Params& p;
    unsigned first;
    int left;
    Pack<W> weights[HELD ? PACKS : 1], biases[HELD ? PACKS : 1];

    __device__ Parameters(const Params& p, unsigned first, int left) : p(p), first(first), left(left) {
        if constexpr (HELD) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                weights[k] = load_parameter<Norm::SCALES>(Norm::weight(p) + first, k, left);
                biases[k] = load_parameter<Norm::SHIFTS>(Norm::bias(p) + first, k, left);
            }
        }
    }

    __device__ Pack<W> weight(int k) const {
        if constexpr (HELD) return weights[k];
        else return load_parameter<Norm::SCALES>(Norm::weight(p) + first, k, left);
    }

    __device__ Pack<W> bias(int k) const {
        if constexpr (HELD) return biases[k];
        else return load_parameter<Norm::SHIFTS>(Norm::bias(p) + first, k, left);
    }
};
