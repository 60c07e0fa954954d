// Forward to codes: math.md, equations (1) to (6) and (Q1) to (Q5). A thread has the same columns in each of its rows.
//
// A row is read from memory once, as in forward.cu, and again from the L1. What a scale takes is found on the way: of a block of
// columns by the lanes that have it, of a row together with its sum where y is h times two factors, and else in a visit more.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) quantized_forward(const __grid_constant__ Params p) {
    constexpr int EXCHANGED = IS_FACTORED && SCALE == BY_ROW ? 2 * UNROLL : UNROLL;
    __shared__ float exchange[2][GROUPS][EXCHANGED][SENDERS];
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    const unsigned first = (cluster_rank() * THREADS_PER_ROW + thread) * PACK;
    const int left = columns_left(p.cols, first);
    RowSums<EXCHANGED> sums(exchange, group, thread);
    wait_for_earlier_kernels();
    const Divisor given(SCALE == GIVEN ? *p.scale : 1.0f);
    float largest = 0.0f; // of all rows of the thread

    constexpr unsigned BLOCK_ROWS = GROUPS * UNROLL;
    const unsigned long long stride = (unsigned long long)(gridDim.x / CLUSTER) * BLOCK_ROWS;
    for (unsigned long long block = (unsigned long long)(blockIdx.x / CLUSTER) * BLOCK_ROWS; block < p.rows; block += stride) {
        // Row u of this group. Where a block has one row, the loop has asked already whether it exists.
        const auto row = [&](int u) { return block + u * GROUPS + group; };
        const auto exists = [&](int u) { return BLOCK_ROWS == 1 || row(u) < p.rows; };
        Parts h = {};
        const auto load_rows = [&](auto is_last) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (exists(u))
                    #pragma unroll
                    for (int k = 0; k < PACKS; ++k) h[u][k] = load_h<is_last.value>(p, row(u), first, k, left);
        };
        const auto load_weight = [&](int k, float (&weight)[PACK]) {
            unpack_weight(load_parameter<HAS_WEIGHT>(p.weight + first, k, left), p.weight_offset, weight);
        };
        const auto load_bias = [&](int k, float (&bias)[PACK]) {
            unpack(load_parameter<HAS_BIAS>(p.bias + first, k, left), bias);
        };

        float mean[UNROLL] = {}, rstd[UNROLL], amax[UNROLL] = {}, sent[EXCHANGED] = {};
        load_rows(Bool<false>{});
        if constexpr (IS_LAYER) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) mean[u] = sum_part<false>(h[u], 0.0f, left);
            sums.sum(mean);
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) mean[u] *= p.share;
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) sent[u] = sum_part<true>(h[u], mean[u], left);
        if constexpr (IS_FACTORED) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) {
                float weight[PACK];
                load_weight(k, weight);
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    float product[PACK];
                    unpack(h[u][k], product);
                    #pragma unroll
                    for (int i = 0; i < PACK; ++i) product[i] *= weight[i];
                    amax[u] = largest_of(product, k, left, amax[u]);
                }
            }
            if constexpr (SCALE == BY_ROW) {
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) sent[UNROLL + u] = amax[u];
            }
        }
        sums.template reduce<UNROLL>(sent);
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) rstd[u] = reciprocal_root(sent[u] * p.share + p.eps);

        // Of the rows in hand, in amax: the thread's part, or by rows all of it. They are read again, so that nothing is kept for a
        // visit that few rows take.
        const auto find_amax = [&] {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) amax[u] = 0.0f;
            #pragma unroll (IS_FACTORED ? 1 : 2)
            for (int k = 0; k < PACKS; ++k) {
                float weight[PACK], bias[PACK];
                load_weight(k, weight);
                load_bias(k, bias);
                #pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    float v[PACK];
                    unpack(exists(u) ? load_h<false>(p, row(u), first, k, left) : Pack<H>{}, v);
                    quantized_values<false>(p, row(u), first, k, left, v, mean[u], rstd[u], weight, bias);
                    amax[u] = largest_of(v, k, left, amax[u]);
                }
            }
            if constexpr (SCALE == BY_ROW) sums.template reduce<0>(amax);
        };
        if constexpr (IS_FACTORED) {
            bool is_known = true;
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if constexpr (SCALE == BY_ROW) amax[u] = sent[UNROLL + u];
                // A thread with no column has no product either.
                is_known &= says_amax(amax[u]) || !exists(u) || (SCALE == FIND && left <= 0);
                amax[u] *= rstd[u];
            }
            if constexpr (SCALE == BY_ROW) is_known = __all_sync(~0u, is_known);
            if (!is_known) find_amax();
        } else if constexpr (SCALE == BY_ROW || SCALE == FIND) {
            find_amax();
        }
        if constexpr (SCALE == FIND) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (exists(u)) largest = larger(largest, amax[u]);
            continue;
        }

        Scale scales[UNROLL];
        if constexpr (SCALE == BY_ROW) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                scales[u] = scale_of(p, amax[u]);
                if (thread == 0 && cluster_rank() == 0 && exists(u)) store_scale(p, row(u), 0, scales[u]);
            }
        }
        // READS_LATE: each pack is read just before it is needed. Else all are asked for at once.
        if constexpr (!READS_LATE) load_rows(Bool<true>{});
        #pragma unroll
        for (int chunk = 0; chunk < PACKS; chunk += CHUNK) {
            constexpr auto packs = [](int chunk) { return chunk + CHUNK < PACKS ? chunk + CHUNK : PACKS; };
            float weight[CHUNK][PACK], bias[CHUNK][PACK];
            #pragma unroll
            for (int k = chunk; k < packs(chunk); ++k) {
                load_weight(k, weight[k - chunk]);
                load_bias(k, bias[k - chunk]);
            }
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                float v[CHUNK][PACK];
                float magnitude = 0.0f, reciprocal = given.reciprocal;
                #pragma unroll
                for (int k = chunk; k < packs(chunk); ++k) {
                    float (&values)[PACK] = v[k - chunk];
                    if constexpr (READS_LATE) {
                        if (exists(u)) h[u][k] = load_h<true>(p, row(u), first, k, left);
                    }
                    unpack(h[u][k], values);
                    if (exists(u)) {
                        quantized_values<true>(p, row(u), first, k, left, values, mean[u], rstd[u], weight[k - chunk], bias[k - chunk]);
                        if constexpr (FINDS_AMAX) largest = largest_of(values, k, left, largest);
                        if constexpr (SCALE == BY_BLOCK) magnitude = largest_of(values, k, left, magnitude);
                    }
                }
                if constexpr (SCALE == BY_ROW) reciprocal = scales[u].reciprocal;
                if constexpr (SCALE == BY_BLOCK) {
                    const Scale scale = scale_of(p, reduce_lanes<SET_LANES, Larger>(magnitude));
                    reciprocal = scale.reciprocal;
                    if (first % SET == 0 && chunk * STEP < left && exists(u))
                        store_scale(p, row(u), (first + chunk * STEP) / SET, scale);
                }
                #pragma unroll
                for (int k = chunk; k < packs(chunk); ++k)
                    if (exists(u)) write_codes(p, row(u), first, k, left, v[k - chunk], given.power, reciprocal);
            }
        }
        if (thread == 0 && cluster_rank() == 0) {
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (exists(u)) {
                    if (IS_LAYER && p.mean) p.mean[row(u)] = mean[u];
                    if (p.rstd) p.rstd[row(u)] = rstd[u];
                }
            }
        }
    }
    if constexpr (SCALE == FIND) finish_amax(p, largest);
    else if constexpr (FINDS_AMAX) fold_amax(p.amax, largest);
}
