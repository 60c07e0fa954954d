// Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A thread has the same columns
// in each of its rows.
//
// A row is read from memory once, as in forward.cu, and again from the L1, or stays in registers
// (KEEPS_H). The largest magnitude for a scale is computed on the way: for a block of columns by the
// lanes that have it, for a row together with its sum if products suffice (IS_FACTORED). Otherwise it
// takes one more read.

static_assert(UNROLL == 1, "the registers of a second row are those of codes and scales");

// Whether a row stays in registers while all blocks wait for that scale. Otherwise the search for its
// largest magnitude reads the row again, and would spill.
constexpr bool KEEPS_H = IS_COOPERATIVE && IS_FACTORED;

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
        if (exists || SCALE == BY_BLOCK) write_row(p, at, exists, h, is_product, given.power, factor, largest, [](int, const Codes&) {});
        if (thread == 0 && cluster_rank() == 0 && exists) {
            if (IS_LAYER && p.mean) p.mean[statistic(at.row)] = at.mean;
            if (p.rstd) p.rstd[statistic(at.row)] = at.rstd;
        }
    }
    if constexpr (SCALE == FIND && !IS_COOPERATIVE) finish_amax(p, largest);
    else if constexpr (FINDS_AMAX) fold_amax(p.amax, largest);
}
