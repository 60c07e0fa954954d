// Quantization of y to codes and scales: math.md, equations (Q1) to (Q5).
//
// Largest magnitudes are exact; a NaN counts as the largest.

// Values of SCALE, the source of the scale: the caller, or the largest magnitude of the tensor, of
// a row or of SET columns. FIND also writes codes if IS_COOPERATIVE; otherwise it only computes the
// tensor's scale.
constexpr int GIVEN = 0, FIND = 1, BY_ROW = 2, BY_BLOCK = 3;

// Values of SCALE_FORM: a quotient, a power of two as f32, or a power of two as a byte, rounded up
// or taken from the exponent.
constexpr int QUOTIENT = 0, POWER = 1, BYTE_UP = 2, BYTE_FLOOR = 3;

// Values of SCALE_LAYOUT.
constexpr int ROW_MAJOR = 0, COLUMN_MAJOR = 1, PACKED_UE8M0 = 2, SWIZZLED_128X4 = 3;

// If v is a product of h, the weight and the row's rstd, and y is not needed otherwise, codes are
// computed from the products of h and the weight with one factor. The largest product then gives
// the largest |v|. This halves the instructions. It is off if rows share a warp: the lanes decide
// together whether products suffice, and a row's bits must not depend on other rows.
constexpr bool IS_FACTORED = After::IS_NORM && !HAS_BIAS && !HAS_Y && !IS_ROUNDED && !CAST_BEFORE_WEIGHT && THREADS_PER_ROW >= 32;

// Whether a thread tracks the largest encoded magnitude of its columns over all rows.
constexpr bool FINDS_AMAX = SCALE == GIVEN && HAS_AMAX;

// The larger of `magnitude` and the largest magnitude of a pack.
__device__ inline float largest_of(const float (&values)[PACK], int k, int left, float magnitude) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        // Columns past the end may hold a bias or NaN.
        magnitude = larger(magnitude, is_in_row(k, i, left) ? fabsf(values[i]) : 0.0f);
    }
    return magnitude;
}

// Replaces h with v in `values`. KEEPS_Y: also stores y, if the call has one.
template <bool KEEPS_Y>
__device__ inline void quantized_values(
    const Params& p, unsigned long long row, unsigned long long first, int k, int left,
    float (&values)[PACK], float mean, float rstd, const float (&weight)[PACK], const float (&bias)[PACK],
    const After::Waiting& waiting
) {
    normalize(values, mean, rstd, weight, bias);
    After::turn(values, waiting);
    if constexpr (KEEPS_Y && HAS_Y) store_pack(ROW(y, row) + first, k, left, pack<T>(values));
    if constexpr (IS_ROUNDED) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = to_f32(from_f32<T>(values[i]));
    }
}

struct Scale {
    float value;
    float reciprocal; // the factor of the elements
    unsigned byte;    // the scale for BYTE_UP and BYTE_FLOOR
};

// 1 / value for a positive normal value with a normal reciprocal: the device's estimate and one
// Newton step.
__device__ inline float reciprocal_of(float value) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
    return fmaf(estimate, fmaf(-value, estimate, 1.0f), estimate);
}

// The byte of the smallest power of two >= amax / Q, for a finite amax: the difference of their
// exponents, plus one if amax has the larger significand.
__device__ inline unsigned power_not_below(float amax) {
    const unsigned bits = __float_as_uint(amax), largest = __float_as_uint(LARGEST_CODE);
    const unsigned exponent = (bits >> 23) + 127 + ((bits & 0x7fffffu) > (largest & 0x7fffffu));
    return min(max(exponent, largest >> 23) - (largest >> 23), 254u);
}

// Equations (Q3) and (Q4).
__device__ inline Scale scale_of(const Params& p, float amax) {
    // A NaN fails both comparisons and is kept.
    if (amax < p.amax_floor) amax = p.amax_floor;
    if (amax > p.amax_ceiling) amax = p.amax_ceiling;
    const bool is_finite = __float_as_uint(amax) < 0x7f800000u;
    Scale scale = {};
    if constexpr (SCALE_FORM == QUOTIENT) {
        // Multiplies by a rounded reciprocal of Q, for an error of 2 u, which math.md allows.
        const float quotient = amax * (1.0f / LARGEST_CODE);
        scale.value = amax == 0.0f ? 1.0f : quotient < 0x1p-126f ? 0x1p-126f : quotient;
        scale.reciprocal = reciprocal_of(scale.value);
    } else {
        unsigned byte;
        if constexpr (SCALE_FORM == BYTE_FLOOR) {
            constexpr unsigned EXPONENT = CODES == 0 ? 8 : 15; // of Q
            byte = max(__float_as_uint(amax) >> 23, EXPONENT) - EXPONENT;
        } else {
            byte = power_not_below(amax);
        }
        if constexpr (SCALE_FORM == POWER) {
            byte = amax == 0.0f ? 127 : max(byte, 1u);
            scale.value = is_finite ? __uint_as_float(byte << 23) : amax;
        } else {
            byte = is_finite ? byte : amax == amax ? 254 : 255;
            scale.byte = byte;
        }
        // Exact, even for byte 254. If the byte is NaN, codes are arbitrary.
        scale.reciprocal = __uint_as_float(byte == 254 ? 0x00400000u : (254 - byte) << 23);
    }
    return scale;
}

// Stores the scale of a row's set at its place in the layout.
__device__ inline void store_scale_at(
    void* scales, unsigned long long stride, unsigned long long row, unsigned long long group, const Scale& scale
) {
    unsigned long long index;
    if constexpr (SCALE_LAYOUT == ROW_MAJOR) index = row * stride + group;
    else if constexpr (SCALE_LAYOUT == COLUMN_MAJOR) index = group * stride + row;
    else if constexpr (SCALE_LAYOUT == PACKED_UE8M0) index = (group / 4 * stride + row) * 4 + group % 4;
    else index = (row / 128 * stride + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
    if constexpr (SCALE_FORM >= BYTE_UP) store_byte(static_cast<unsigned char*>(scales) + index, scale.byte);
    else static_cast<float*>(scales)[index] = scale.value;
}

// `set` counts from the first column of the row's group.
__device__ inline void store_scale(const Params& p, unsigned long long row, unsigned long long set, const Scale& scale) {
    if constexpr (SCALE == BY_BLOCK) set += (group_column(p) + row_column(p, row)) / SET;
    store_scale_at(p.scales, p.scales_stride, matrix_row(p, row), set, scale);
}

// The reciprocal of the caller's scale, as two factors: if it is not a normal number, a power of
// two comes first.
struct Divisor {
    float power, reciprocal;

    __device__ explicit Divisor(float scale) : power(scale < 0x1p-126f ? 0x1p24f : scale > 0x1p126f ? 0x1p-24f : 1.0f) {
        reciprocal = 1.0f / (scale * power);
    }
};

// Multiplies `values` by `factor`, and stores their codes and returns them.
__device__ inline Codes write_codes(
    const Params& p, unsigned long long row, unsigned long long first, int k, int left, float (&values)[PACK], float factor
) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) values[i] *= factor;
    const Codes codes = to_codes(values);
    store_codes(ROW(codes, row) + first, k, left, codes);
    return codes;
}

// Lanes with packs in one set.
constexpr int SET_LANES = SCALE != BY_BLOCK ? 1 : STEP < SET ? THREADS_PER_ROW : SET / PACK;

// Sets whose scales the lanes find together: a lane then computes one scale in place of several.
constexpr int TOGETHER = SCALE != BY_BLOCK || STEP < SET ? 1 : PACKS < BATCH ? (PACKS > 1 ? 2 : 1) : BATCH;
static_assert(TOGETHER <= SET_LANES, "a lane has one of the scales");

// Packs of a thread in these sets, several in one set if the threads of a row span fewer columns.
constexpr int CHUNK = SCALE == BY_BLOCK && STEP < SET ? SET / STEP : TOGETHER;

// Whether the largest product of h and the weights determines the largest |v|: it must be far from
// values where products lose bits.
__device__ inline bool says_amax(float product) { return product > 0x1p-90f && product < 0x1p126f; }

// Whether products times this factor give the same codes as v: values that lose bits are then far
// below the smallest code, and values that overflow are beyond the largest.
__device__ inline bool makes_codes(float factor) { return factor > 0x1p-100f && factor < 0x1p100f; }

// Folds the warp's largest magnitude into `cell`, which holds the largest of all. Magnitudes are
// not negative and their NaNs have no sign, so that they are ordered like integers.
__device__ inline void fold_amax(void* cell, float magnitude) {
    unsigned bits = __float_as_uint(magnitude);
#if __CUDA_ARCH__ >= 800
    // Volatile, so that it stays at a place that all lanes reach.
    asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(bits));
#else
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
#endif
    // The value read may be stale, and then smaller: at worst an atomic is issued needlessly.
    int* const largest = static_cast<int*>(cell);
    if (threadIdx.x % 32 == 0 && int(bits) > *largest) atomicMax(largest, int(bits));
}

// Folds as above; the last block then writes the tensor's scale. p.found: the largest magnitude,
// then the number of finished blocks.
__device__ inline void finish_amax(const Params& p, float magnitude) {
    fold_amax(p.found, magnitude);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(p.found + 1, 1u) == (HAS_COLUMN_GROUPS ? gridDim.x * gridDim.y : gridDim.x) - 1) {
        __threadfence();
        const float amax = __uint_as_float(atomicMax(p.found, 0u));
        static_cast<float*>(p.scales)[0] = scale_of(p, amax).value;
    }
}

// Returns the tensor's scale, which the first block stores: waits for the largest magnitude of each
// block. p.found: a word for each of several blocks, zero until it is sent; as many as fill packs of
// four. All blocks must run at the same time.
__device__ inline float meet_amax(const Params& p, float magnitude) {
    __shared__ unsigned own, largest;
    if (threadIdx.x == 0) own = largest = 0;
    __syncthreads();
    fold_amax(&own, magnitude);
    __syncthreads();
    unsigned found = own;
    if (gridDim.x > 1) {
        // A word is all that blocks tell each other, so no fence is needed. It is one more than the bits.
        unsigned word = own + 1;
        if (threadIdx.x == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p.found + blockIdx.x), "r"(word) : "memory");
        for (unsigned first = threadIdx.x * 4; first < gridDim.x; first += THREADS * 4) {
            unsigned words[4];
            bool is_sent;
            do {
                asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                    : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(p.found + first) : "memory");
                is_sent = true;
                #pragma unroll
                for (int i = 0; i < 4; ++i) is_sent &= words[i] != 0 || first + i >= gridDim.x;
            } while (!is_sent);
            #pragma unroll
            for (int i = 0; i < 4; ++i) word = max(word, words[i]);
        }
        fold_amax(&largest, __uint_as_float(word - 1));
        __syncthreads();
        found = largest;
    }
    const float scale = scale_of(p, __uint_as_float(found)).value;
    if (blockIdx.x == 0 && threadIdx.x == 0) static_cast<float*>(p.scales)[0] = scale;
    return scale;
}
