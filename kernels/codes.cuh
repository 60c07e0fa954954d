// 8-bit codes: conversion from f32, and stores. math.md, equation (Q5).
#if IS_QUANTIZED

// The formats; the macro CODES is one of them.
constexpr int E4M3 = 0, E5M2 = 1, INT8 = 2;

// Q of math.md: the value of the largest code that scales use.
constexpr float LARGEST_CODE = CODES == E4M3 ? 448.0f : CODES == E5M2 ? 57344.0f : 127.0f;

// PACK consecutive codes of one thread, as 32-bit words.
struct Codes { unsigned words[PACK / 4]; };

// One access stores as many codes as an access to the widest matrix has elements.
constexpr int CODES_ACCESS = ACCESS_BYTES * PACK / 16 > 0 ? ACCESS_BYTES * PACK / 16 : 1;

#if CODES == 2
// Rounds to nearest even within [-128, 127]. NaN, which has no code, becomes 0.
__device__ inline unsigned code_of(float value) {
    const float inside = fminf(fmaxf(value, -128.0f), 127.0f);
    // The addition rounds: the sum's lowest bits are the integer.
    return value == value ? __float_as_uint(inside + 12582912.0f) & 0xffu : 0u;
}
#elif __CUDA_ARCH__ < 890
// With integer arithmetic: rounds to nearest even, saturates (also infinities) and keeps NaN.
__device__ inline unsigned code_of(float value) {
    constexpr unsigned SHIFT = CODES == E4M3 ? 20 : 21, MIN_EXPONENT = CODES == E4M3 ? 121 : 113;
    const unsigned sign = __float_as_uint(value) >> 24 & 0x80u, bits = min(__float_as_uint(fabsf(value)), __float_as_uint(LARGEST_CODE));
    const unsigned exponent = bits >> 23;
    const bool is_normal = exponent >= MIN_EXPONENT;
    // A shift of 25 removes all bits.
    const unsigned shift = is_normal ? SHIFT : min(SHIFT + MIN_EXPONENT - exponent, 25u);
    const unsigned significand = is_normal ? bits : (bits & 0x007fffffu) | 0x00800000u;
    const unsigned rounded = (significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift;
    // A carry correctly increases the exponent.
    const unsigned code = is_normal ? rounded - ((MIN_EXPONENT - 1) << 23 >> SHIFT) : rounded;
    return value == value ? sign | code : 0x7fu;
}
#endif

// Codes of two values, the first in the lower byte.
__device__ inline unsigned join_codes(float low, float high) {
#if CODES < 2 && __CUDA_ARCH__ >= 890
    unsigned short pair;
    if constexpr (CODES == E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    }
    return pair;
#else
    return code_of(low) | code_of(high) << 8;
#endif
}

__device__ inline Codes to_codes(const float (&values)[PACK]) {
    Codes codes;
    #pragma unroll
    for (int i = 0; i < PACK; i += 4)
        codes.words[i / 4] = join_codes(values[i], values[i + 1]) | join_codes(values[i + 2], values[i + 3]) << 16;
    return codes;
}

__device__ inline void store_byte(void* to, unsigned byte) {
    asm volatile("st.global.u8 [%0], %1;" :: "l"(to), "r"(byte) : "memory");
}

// Stores the columns of pack k that are in the row. If another kernel transposes them, wide stores let
// the L2 evict codes first, as the copy does (16384x4096 with the copy: 92 us instead of 94 us).
__device__ inline void store_codes(Code* first, int k, int left, const Codes& codes) {
    Code* to = first + k * STEP;
    if (!is_in_row(k, 0, left)) return;
    if (CODES_ACCESS == 1 || has_part(k, left)) {
        const int count = has_part(k, left) ? left - k * STEP : PACK;
        #pragma unroll
        for (int i = 0; i < PACK; ++i)
            if (i < count) store_byte(to + i, codes.words[i / 4] >> (8 * (i % 4)));
    } else if constexpr (CODES_ACCESS == 2) {
        #pragma unroll
        for (int i = 0; i < PACK; i += 2) store_half(to + i, codes.words[i / 4] >> (8 * (i % 4)));
    } else if constexpr (CODES_ACCESS >= 4) {
        #pragma unroll
        for (int i = 0; i < PACK; i += CODES_ACCESS) store<CODES_ACCESS, HAS_CODES_T && STAGES == 0 ? Hint::EvictFirst : Hint::None>(to + i, &codes.words[i / 4]);
    }
}

#endif
