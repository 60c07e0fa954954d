// Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A thread has the same columns
// in each of its rows.
//
// A row is read from memory once, as in forward.cu, and again from the L1, or stays in registers
// (KEEPS_H). The largest magnitude for a scale is computed on the way: for a block of columns by the
// lanes that have it, for a row together with its sum if products suffice (IS_FACTORED). Otherwise it
// takes one more read.

static_assert(UNROLL == 1, "the registers of a second row are those of codes and scales");

// Whether all codes have one scale.
constexpr bool IS_TENSORS = SCALE == GIVEN || SCALE == FIND;

// Whether a row stays in registers while all blocks wait for that scale. Otherwise the search for its
// largest magnitude reads the row again, and would spill.
constexpr bool KEEPS_H = IS_COOPERATIVE && IS_FACTORED;

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
// used. `is_known`: whether products suffice for all scales.
template <bool IS_PRODUCT>
__device__ inline float write_part(const Params& p, const Part& at, bool exists, Pack<H> (&h)[PACKS], float power, float factor, bool& is_known) {
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
            write_codes(p, at.row, at.first, chunk + c, at.left, values[c], factors[c % TOGETHER]);
        }
    }
    return largest;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) quantized_forward(const __grid_constant__ Params p) {
    // Whether the largest product of a row is exchanged with its sum. In layer norm the products
    // depend on the mean that the sum corrects.
    constexpr bool SENDS_PRODUCT = IS_FACTORED && SCALE == BY_ROW && !IS_LAYER;
    constexpr int SENT = SUMS_ABOUT_MEAN + SENDS_PRODUCT;
    __shared__ float exchange[2][GROUPS][SENT][SENDERS];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    Part at = {0, first, columns_left(p.cols, first), 0.0f, 0.0f};
    RowSums<SENT> sums(exchange, group, thread);
    wait_for_earlier_kernels();
    Divisor given(SCALE == GIVEN ? *p.scale : 1.0f);
    float largest = 0.0f; // over all rows of the thread

    const unsigned long long stride = (unsigned long long)(gridDim.x / CLUSTER) * GROUPS;
    for (unsigned long long block = (unsigned long long)(blockIdx.x / CLUSTER) * GROUPS; block < p.rows; block += stride) {
        at.row = block + group;
        // If a block has one row, the loop condition implies that the row exists.
        const bool exists = GROUPS == 1 || at.row < p.rows;
        Pack<H> h[PACKS] = {};
        const auto load_row = [&](const auto& load) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k)
                if (exists) h[k] = load(k);
        };
        load_row([&](int k) { return load_h(p, at, k); });
        const auto of_row = [&](int k) { return h[k]; };
        if constexpr (IS_LAYER) {
            float sum[1] = {sum_packs<PACKS>(of_row)};
            sums.sum(sum);
            at.mean = __fmul_rn(sum[0], p.inv_cols);
        }
        float sent[SENT];
        sum_packs_about<PACKS>(of_row, at.mean, at.left, sent[0], sent[SUMS_ABOUT_MEAN - 1]);
        float product[1] = {0.0f}; // the largest
        const auto find_product = [&] {
            if constexpr (IS_FACTORED && (SCALE == FIND || SCALE == BY_ROW)) {
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) {
                    float products[PACK];
                    values_of<true, false>(p, at, k, h[k], products);
                    product[0] = largest_of(products, k, at.left, product[0]);
                }
            }
        };
        if constexpr (!IS_LAYER) find_product();
        if constexpr (SENDS_PRODUCT) sent[1] = product[0];
        sums.template reduce<SUMS_ABOUT_MEAN>(sent);
        if constexpr (SENDS_PRODUCT) product[0] = sent[1];
        if constexpr (IS_LAYER) {
            correct_mean(p.inv_cols, sent[1], at.mean, sent[0]);
            find_product();
            if constexpr (IS_FACTORED && SCALE == BY_ROW) sums.template reduce<0>(product);
        }
        at.rstd = rstd_of(p, sent[0]);

        // Whether codes come from products, and with which factor; otherwise they come from v.
        bool is_product = IS_FACTORED;
        float factor = 1.0f;
        if constexpr (SCALE == FIND || SCALE == BY_ROW) {
            float amax[1] = {product[0] * at.rstd};
            bool is_known = IS_FACTORED && (says_amax(product[0]) || !exists || (SCALE == FIND && at.left <= 0));
            if constexpr (SCALE == BY_ROW) is_known = __all_sync(~0u, is_known);
            if (!is_known) {
                amax[0] = exists ? find_amax(p, at) : 0.0f;
                if constexpr (SCALE == BY_ROW) sums.template reduce<0>(amax);
            }
            if constexpr (SCALE == FIND) {
                if (exists) largest = larger(largest, amax[0]);
                if constexpr (!IS_COOPERATIVE) continue;
                // A block has one step, so that no other largest magnitude follows.
                given = Divisor(meet_amax(p, largest));
            } else {
                const Scale scale = scale_of(p, amax[0]);
                if (thread == 0 && cluster_rank() == 0 && exists) store_scale(p, at.row, 0, scale);
                factor = scale.reciprocal;
            }
        }
        if constexpr (IS_TENSORS) {
            factor = given.reciprocal;
            is_product &= given.power == 1.0f;
        }
        if constexpr (SCALE != BY_BLOCK) {
            is_product &= makes_codes(factor * at.rstd);
            if (is_product) factor *= at.rstd;
        }
        if constexpr (KEEPS_H) {
            if (exists) Before::store_h_row(At{p, at.row, at.first, at.left}, h);
        } else if constexpr (!LOADS_AT_USE) {
            load_row([&](int k) { return load_last(p, at, k); });
        }
        // With scales of blocks all lanes of a warp exchange, also lanes of missing rows.
        if (exists || SCALE == BY_BLOCK) {
            float magnitude = 0.0f;
            if (IS_FACTORED && is_product) {
                bool is_known = true;
                magnitude = write_part<IS_FACTORED>(p, at, exists, h, given.power, factor, is_known);
                if constexpr (FINDS_AMAX) {
                    is_known = says_amax(magnitude) || at.left <= 0;
                    magnitude = is_known ? magnitude * at.rstd : find_amax(p, at);
                }
                if constexpr (SCALE == BY_BLOCK) is_product = __all_sync(~0u, is_known);
            }
            if (!is_product) {
                bool is_known = true;
                magnitude = write_part<false>(p, at, exists, h, given.power, factor, is_known);
            }
            if constexpr (FINDS_AMAX) largest = larger(largest, magnitude);
        }
        if (thread == 0 && cluster_rank() == 0 && exists) {
            if (IS_LAYER && p.mean) p.mean[statistic(at.row)] = at.mean;
            if (p.rstd) p.rstd[statistic(at.row)] = at.rstd;
        }
    }
    if constexpr (SCALE == FIND && !IS_COOPERATIVE) finish_amax(p, largest);
    else if constexpr (FINDS_AMAX) fold_amax(p.amax, largest);
}
