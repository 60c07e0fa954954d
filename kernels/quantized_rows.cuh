// Codes of rows that a block has on chip: math.md, equations (4) to (6) and (Q1) to (Q5).

// Whether all codes have one scale.
constexpr bool IS_TENSORS = SCALE == GIVEN || SCALE == FIND;

// A thread's columns in a row, and the row's statistics.
struct Part {
    unsigned long long row;
    unsigned first;
    int left;
    float mean, rstd;
};

// Loads a pack of h that is loaded again later.
__device__ inline Pack<H> load_h(const Params& p, const Part& part, int k) {
    return Before::load<Hint::Keep>(At{p, part.row, part.first, part.left}, k);
}

// Loads a pack of h for the last time, and stores it if the call wants to have it.
__device__ inline Pack<H> load_last(const Params& p, const Part& part, int k) {
    const auto at = [&] { return At{p, part.row, part.first, part.left}; };
    const Pack<H> h = Before::load<Hint::EvictFirst>(at(), k);
    Before::store_h(at(), k, h);
    return h;
}

// The products of h - mean and the weight, without rstd. Otherwise v, and y is stored if KEEPS_Y.
template <bool IS_PRODUCT, bool KEEPS_Y>
__device__ inline void values_of(const Params& p, const Part& at, int k, const Pack<H>& h, float (&values)[PACK]) {
    const unsigned long long column = row_column(p, at.row) + at.first;
    float weight[PACK];
    unpack_weight<Norm::SCALES>(load_parameter<Norm::SCALES>(Norm::weight(p) + column, k, at.left), p.weight_offset, weight);
    unpack(h, values);
    if constexpr (IS_PRODUCT) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = (values[i] - at.mean) * weight[i];
    } else {
        float bias[PACK];
        unpack(load_parameter<HAS_BIAS>(Norm::bias(p) + column, k, at.left), bias);
        const auto waiting = After::load<KEEPS_Y ? Hint::EvictFirst : Hint::Keep>(At{p, at.row, at.first, at.left}, k);
        quantized_values<KEEPS_Y>(p, at.row, at.first, k, at.left, values, at.mean, at.rstd, weight, bias, waiting);
    }
}

// The largest |v| of a part. Reads the row again, because few rows need it.
__device__ inline float find_amax(const Params& p, const Part& at) {
    float magnitude = 0.0f;
    #pragma unroll (IS_FACTORED ? 1 : 2)
    for (int k = 0; k < PACKS; ++k) {
        float v[PACK];
        values_of<false, false>(p, at, k, load_h(p, at, k), v);
        magnitude = largest_of(v, k, at.left, magnitude);
    }
    return magnitude;
}

// Finds and stores the scales of sets of columns, whose lanes share the work. `factors`: those of
// the sets' values. Returns whether products suffice for the lane's set.
template <bool IS_PRODUCT>
__device__ inline bool find_scales(const Params& p, const Part& at, bool exists, int chunk, const float (&values)[CHUNK][PACK], float (&factors)[TOGETHER]) {
    constexpr int SHARE = SET_LANES / TOGETHER; // lanes with the same set
    float magnitudes[TOGETHER] = {};
    #pragma unroll
    for (int c = 0; c < CHUNK; ++c)
        if (chunk + c < PACKS) magnitudes[c % TOGETHER] = largest_of(values[c], chunk + c, at.left, magnitudes[c % TOGETHER]);
    const float magnitude = reduce_each<SET_LANES, Larger>(magnitudes);
    Scale scale = scale_of(p, IS_PRODUCT ? magnitude * at.rstd : magnitude);
    // The first column of the lane's set, from the lane's own.
    const int lane = threadIdx.x % SET_LANES, column = (chunk + lane / SHARE) * STEP - lane * PACK;
    const bool is_inside = exists && chunk + lane / SHARE < PACKS && column < at.left;
    if (is_inside && lane % SHARE == 0) store_scale(p, at.row, (at.first + column) / SET, scale);
    bool is_known = true;
    if constexpr (IS_PRODUCT) {
        scale.reciprocal *= at.rstd;
        is_known = says_amax(magnitude) && makes_codes(scale.reciprocal);
    }
    #pragma unroll
    for (int set = 0; set < TOGETHER; ++set)
        factors[set] = TOGETHER == 1 ? scale.reciprocal : __shfl_sync(~0u, scale.reciprocal, set * SHARE, SET_LANES);
    return is_known || !is_inside;
}

// Writes the codes of a part and the scales of blocks. Returns the largest magnitude of the encoded
// values if FINDS_AMAX. `h` has the part, unless LOADS_AT_USE: then each pack is loaded just before it is
// used. `is_known`: whether products suffice for all scales. `kept` gets the codes of each pack.
template <bool IS_PRODUCT, class Kept>
__device__ inline float write_part(const Params& p, const Part& at, bool exists, Pack<H> (&h)[PACKS], float power, float factor, bool& is_known, const Kept& kept) {
    // This path is rare, so its loop is not unrolled.
    constexpr bool IS_RARE = IS_FACTORED && !IS_PRODUCT;
    float largest = 0.0f;
    #pragma unroll (IS_RARE ? 1 : PACKS)
    for (int chunk = 0; chunk < PACKS; chunk += CHUNK) {
        float values[CHUNK][PACK] = {};
        #pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            const int k = chunk + c;
            if (!exists || k >= PACKS) continue;
            if constexpr (IS_RARE) {
                values_of<false, true>(p, at, k, load_last(p, at, k), values[c]);
            } else {
                if constexpr (LOADS_AT_USE) h[k] = load_last(p, at, k);
                values_of<IS_PRODUCT, true>(p, at, k, h[k], values[c]);
            }
            if constexpr (FINDS_AMAX) largest = largest_of(values[c], k, at.left, largest);
        }
        float factors[TOGETHER] = {factor};
        if constexpr (SCALE == BY_BLOCK) is_known &= find_scales<IS_PRODUCT>(p, at, exists, chunk, values, factors);
        #pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            if (!exists || chunk + c >= PACKS) continue;
            if constexpr (IS_TENSORS && !IS_PRODUCT) {
                #pragma unroll
                for (int i = 0; i < PACK; ++i) values[c][i] *= power;
            }
            kept(chunk + c, write_codes(p, at.row, at.first, chunk + c, at.left, values[c], factors[c % TOGETHER]));
        }
    }
    return largest;
}

// The same, from products with the weight if `is_product` and these suffice, else from v. `largest` is the
// largest magnitude so far, if FINDS_AMAX.
template <class Kept>
__device__ inline void write_row(const Params& p, const Part& at, bool exists, Pack<H> (&h)[PACKS], bool is_product, float power, float factor, float& largest, const Kept& kept) {
    float magnitude = 0.0f;
    if (IS_FACTORED && is_product) {
        bool is_known = true;
        magnitude = write_part<IS_FACTORED>(p, at, exists, h, power, factor, is_known, kept);
        if constexpr (FINDS_AMAX) {
            is_known = says_amax(magnitude) || at.left <= 0;
            magnitude = is_known ? magnitude * at.rstd : find_amax(p, at);
        }
        if constexpr (SCALE == BY_BLOCK) is_product = __all_sync(~0u, is_known);
    }
    if (!is_product) {
        bool is_known = true;
        magnitude = write_part<false>(p, at, exists, h, power, factor, is_known, kept);
    }
    if constexpr (FINDS_AMAX) largest = larger(largest, magnitude);
}
