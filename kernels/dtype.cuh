// Element types and conversions. Arithmetic is f32; a stored value is rounded once, to nearest
// even.

template <class A, class B> constexpr bool IS_SAME = false;
template <class A> constexpr bool IS_SAME<A, A> = true;


using f32 = float;
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct Code { unsigned char bits; };

// PACK consecutive elements of one thread, as 32-bit words.
template <class E>
struct alignas(PACK * sizeof(E) < 16 ? PACK * sizeof(E) : 16) Pack {
    static constexpr int BYTES = PACK * sizeof(E);
    unsigned words[BYTES / 4];
};

__device__ inline float to_f32(f32 value) { return value; }
__device__ inline float to_f32(bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
__device__ inline float to_f32(f16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

template <class E> __device__ E from_f32(float value);
template <> __device__ inline f32 from_f32<f32>(float value) { return value; }
template <> __device__ inline f16 from_f32<f16>(float value) {
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}
template <> __device__ inline bf16 from_f32<bf16>(float value) {
    bf16 narrow;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#else
    // Add half a unit of the last kept place, minus one if the kept part is even: ties go to even.
    // A NaN keeps only its quiet bit.
    const unsigned bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    narrow.bits = is_nan ? 0x7fff : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
    return narrow;
}

// The two elements of a word, the lower first.
template <class E> __device__ void split_word(unsigned word, float& low, float& high);
template <> __device__ inline void split_word<bf16>(unsigned word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
}
template <> __device__ inline void split_word<f16>(unsigned word, float& low, float& high) {
    low = to_f32(f16{(unsigned short)(word & 0xffffu)});
    high = to_f32(f16{(unsigned short)(word >> 16)});
}

template <class E> __device__ inline unsigned join_word(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    if constexpr (IS_SAME<E, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
#else
    return unsigned(from_f32<E>(low).bits) | unsigned(from_f32<E>(high).bits) << 16;
#endif
}

template <class E> __device__ inline void unpack(const Pack<E>& pack, float (&values)[PACK]) {
    if constexpr (sizeof(E) == 4) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = __uint_as_float(pack.words[i]);
    } else {
        #pragma unroll
        for (int i = 0; i < PACK / 2; ++i) split_word<E>(pack.words[i], values[2 * i], values[2 * i + 1]);
    }
}

template <class E> __device__ inline Pack<E> pack(const float (&values)[PACK]) {
    Pack<E> result;
    if constexpr (sizeof(E) == 4) {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) result.words[i] = __float_as_uint(values[i]);
    } else {
        #pragma unroll
        for (int i = 0; i < PACK / 2; ++i) result.words[i] = join_word<E>(values[2 * i], values[2 * i + 1]);
    }
    return result;
}

// The sum of a pack's values as a tree: fewest dependent additions and lowest latency.
__device__ inline float sum_pack(float (&values)[PACK]) {
    #pragma unroll
    for (int half = PACK / 2; half > 0; half /= 2)
        #pragma unroll
        for (int i = 0; i < PACK / 2; ++i)
            if (i < half) values[i] += values[i + half];
    return values[0];
}
