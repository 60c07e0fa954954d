// From y to codes and scales: math.md, equations (Q1) to (Q5).
//
// Magnitudes are compared as they are; a NaN among them is the largest.
#if IS_QUANTIZED

// Where the scale comes from, as SCALE names it: the caller, or the largest magnitude of all, of a row or of SET columns. FIND
// finds the tensor's, and writes nothing else.
constexpr int GIVEN = 0, FIND = 1, BY_ROW = 2, BY_BLOCK = 3;

// What a scale is, as SCALE_FORM names it: a quotient, a power of two as f32, or one as a byte, rounded up or by its exponent.
constexpr int QUOTIENT = 0, POWER = 1, BYTE_UP = 2, BYTE_FLOOR = 3;

// How scales lie, as SCALE_LAYOUT names it.
constexpr int ROW_MAJOR = 0, COLUMN_MAJOR = 1, PACKED_UE8M0 = 2, SWIZZLED_128X4 = 3;

// Where v is a product of h, the weight and the row's rstd, and nothing else is done with y: codes are made of the products of h and the
// weight, by one factor for all else, and the largest of those says what the largest |v| is. That takes half the instructions. Not where
// rows share a warp: whether products will do is settled by its lanes together, and a row's bits depend on no other row.
constexpr bool IS_FACTORED = !HAS_BIAS && !HAS_Y && !IS_ROUNDED && !CAST_BEFORE_WEIGHT && THREADS_PER_ROW >= 32;

// Whether a thread looks for the largest magnitude of its part of all rows.
constexpr bool FINDS_AMAX = SCALE == FIND || (SCALE == GIVEN && HAS_AMAX);

// The larger of a magnitude and of the pack's.
__device__ inline float largest_of(const float (&values)[PACK], int k, int left, float magnitude) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        // Past the end a bias would count, or what is not a number.
        magnitude = larger(magnitude, is_in_row(k, i, left) ? fabsf(values[i]) : 0.0f);
    }
    return magnitude;
}

// v from h, in place, and y on the way. KEEPS_Y: which is stored, if the call has one.
template <bool KEEPS_Y>
__device__ inline void quantized_values(
    const Params& p, unsigned long long row, unsigned long long first, int k, int left,
    float (&values)[PACK], float mean, float rstd, const float (&weight)[PACK], const float (&bias)[PACK]
) {
    normalize(values, mean, rstd, weight, bias);
    if constexpr (KEEPS_Y && HAS_Y) store_pack(ROW(y, row) + first, k, left, pack<T>(values));
    if constexpr (IS_ROUNDED) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = to_f32(from_f32<T>(values[i]));
    }
}

struct Scale {
    float value;
    float reciprocal; // what elements are multiplied with
    unsigned byte;    // of BYTE_UP and BYTE_FLOOR
};

// 1 / value, of a positive value that is normal and whose reciprocal is: the device's estimate and one step of Newton's method.
__device__ inline float reciprocal_of(float value) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
    return fmaf(estimate, fmaf(-value, estimate, 1.0f), estimate);
}

// The byte of the least power of two that is not below a finite amax / Q: the difference of their exponents, and one more where amax
// has the larger significand.
__device__ inline unsigned power_not_below(float amax) {
    const unsigned bits = __float_as_uint(amax), largest = __float_as_uint(LARGEST_CODE);
    const unsigned exponent = (bits >> 23) + 127 + ((bits & 0x7fffffu) > (largest & 0x7fffffu));
    return min(max(exponent, largest >> 23) - (largest >> 23), 254u);
}

// (Q3) and (Q4).
__device__ inline Scale scale_of(const Params& p, float amax) {
    // What is not a number is neither smaller nor larger.
    if (amax < p.amax_floor) amax = p.amax_floor;
    if (amax > p.amax_ceiling) amax = p.amax_ceiling;
    const bool is_finite = __float_as_uint(amax) < 0x7f800000u;
    Scale scale = {};
    if constexpr (SCALE_FORM == QUOTIENT) {
        // By a rounded reciprocal of Q, which math.md allows for: 2 u in all.
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
        // Exact, also of the largest byte. Where the byte says NaN, codes may be any.
        scale.reciprocal = __uint_as_float(byte == 254 ? 0x00400000u : (254 - byte) << 23);
    }
    return scale;
}

// Stores the scale of a row's set where the layout has it.
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

__device__ inline void store_scale(const Params& p, unsigned long long row, unsigned long long group, const Scale& scale) {
    store_scale_at(p.scales, p.scales_stride, row, group, scale);
}

// The scale that the caller gives, as two factors: where its reciprocal is no normal number, a power of two comes first.
struct Divisor {
    float power, reciprocal;

    __device__ explicit Divisor(float scale) : power(scale < 0x1p-126f ? 0x1p24f : scale > 0x1p126f ? 0x1p-24f : 1.0f) {
        reciprocal = 1.0f / (scale * power);
    }
};

// Codes of a pack, in place, of values times a factor.
__device__ inline void write_codes(
    const Params& p, unsigned long long row, unsigned long long first, int k, int left, float (&values)[PACK], float factor
) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) values[i] *= factor;
    store_codes(ROW(codes, row) + first, k, left, to_codes(values));
}

// Packs of a thread whose columns are of one set, where the threads of a row have fewer columns side by side than a set has.
constexpr int CHUNK = SCALE == BY_BLOCK && STEP < SET ? SET / STEP : 1;

// Lanes whose packs are of one set.
constexpr int SET_LANES = SCALE != BY_BLOCK ? 1 : STEP < SET ? THREADS_PER_ROW : SET / PACK;

// Whether the largest product of h and the weights says what the largest |v| is: if it is far from where products lose bits.
__device__ inline bool says_amax(float product) { return product > 0x1p-90f && product < 0x1p126f; }

// Whether products make by this factor the codes that v makes: what loses bits is then far below the least code, and what overflows
// beyond the largest.
__device__ inline bool makes_codes(float factor) { return factor > 0x1p-100f && factor < 0x1p100f; }

// The largest of a warp's threads, into a cell that holds the largest of all. What it holds is not negative, nor a NaN with a sign, so
// that it is ordered as an integer is.
__device__ inline void fold_amax(void* cell, float magnitude) {
    unsigned bits = __float_as_uint(magnitude);
#if __CUDA_ARCH__ >= 800
    // Volatile, so that it stays where all lanes come by.
    asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(bits));
#else
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
#endif
    // What is read here may be stale, which is less: at the worst the cell is asked in vain.
    int* const largest = static_cast<int*>(cell);
    if (threadIdx.x % 32 == 0 && int(bits) > *largest) atomicMax(largest, int(bits));
}

// The same, and once the last block has done so, it writes the tensor's scale. p.found: the largest magnitude, blocks that are done.
__device__ inline void finish_amax(const Params& p, float magnitude) {
    fold_amax(p.found, magnitude);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(p.found + 1, 1u) == gridDim.x - 1) {
        __threadfence();
        const float amax = __uint_as_float(atomicMax(p.found, 0u));
        static_cast<float*>(p.scales)[0] = scale_of(p, amax).value;
    }
}

#endif
