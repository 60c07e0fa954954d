// Moves packs between memory and registers, as wide as the alignment allows.
//
// A thread owns PACK consecutive columns at every alignment. ACCESS_BYTES only sets the size of an
// access, so the bits of results do not depend on alignment.

// Bytes of one access to a tensor of E.
template <class E>
constexpr int ACCESS = ACCESS_BYTES < int(sizeof(E)) ? int(sizeof(E))
                     : ACCESS_BYTES > Pack<E>::BYTES ? Pack<E>::BYTES
                     : ACCESS_BYTES;

// Accesses of 2 bytes have separate code.
template <class E> constexpr bool IS_HALF_ACCESS = ACCESS<E> < 4;

// Bytes of one access if a pack moves in whole words.
template <class E> constexpr int WORD_ACCESS = IS_HALF_ACCESS<E> ? 4 : ACCESS<E>;

// How caches treat data. None: as usual. EvictFirst: nobody reads it again. Keep: it is used again soon.
// ReadOnly: all rows read it. Only accesses of 16 bytes, and stores of 8, on sm_80 and later, carry it.
enum class Hint { None, EvictFirst, Keep, ReadOnly };

// Loads 16 bytes with a hint: keep them in the caches for a second read, or evict them first.
template <bool KEEPS>
__device__ inline void load_with_hint(const void* from, unsigned* words) {
#if __CUDA_ARCH__ >= 800
    unsigned long long policy;
    if constexpr (KEEPS) {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from), "l"(policy) : "memory");
    } else {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("ld.global.L1::evict_first.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from), "l"(policy) : "memory");
    }
#else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from) : "memory");
#endif
}

template <int BYTES, Hint HINT>
__device__ inline void load(const void* from, unsigned* words) {
    static_assert(HINT != Hint::None, "a load has a hint");
    if constexpr (BYTES == 16) {
        if constexpr (HINT == Hint::ReadOnly) {
            // Volatile, so that it stays after the wait for earlier kernels.
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from));
        } else if constexpr (HINT == Hint::Keep) {
            load_with_hint<true>(from, words);
        } else {
            load_with_hint<false>(from, words);
        }
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from) : "memory");
    } else {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
    }
}

// Stores 8 or 16 bytes with a hint: the L2 evicts them first, or keeps them for what is stored beside them.
template <int BYTES, bool KEEPS>
__device__ inline void store_with_hint(void* to, const unsigned* words) {
    unsigned long long policy;
    if constexpr (KEEPS) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if constexpr (BYTES == 16) {
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
            :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(policy) : "memory");
    } else {
        asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
            :: "l"(to), "r"(words[0]), "r"(words[1]), "l"(policy) : "memory");
    }
}

// Narrower stores, and devices before sm_80, have no hint.
template <int BYTES, Hint HINT = Hint::None>
__device__ inline void store(void* to, const unsigned* words) {
    static_assert(HINT != Hint::ReadOnly, "a hint for loads");
#if __CUDA_ARCH__ >= 800
    if constexpr (HINT != Hint::None && BYTES >= 8) return store_with_hint<BYTES, HINT == Hint::Keep>(to, words);
#endif
    if constexpr (BYTES == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
            :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
    } else if constexpr (BYTES == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    } else {
        asm volatile("st.global.u32 [%0], %1;" :: "l"(to), "r"(words[0]) : "memory");
    }
}

__device__ inline unsigned load_half(const void* from) {
    unsigned short half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(from) : "memory");
    return half;
}

__device__ inline void store_half(void* to, unsigned half) {
    asm volatile("st.global.u16 [%0], %1;" :: "l"(to), "h"((unsigned short)half) : "memory");
}

// Loads the first `count` elements of a pack one at a time; the rest are zeros.
template <class E>
__device__ inline Pack<E> load_elements(const E* from, int count) {
    Pack<E> pack = {};
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        if (i < count) {
            if constexpr (sizeof(E) == 4) load<4, Hint::EvictFirst>(from + i, &pack.words[i]);
            else pack.words[i / 2] |= load_half(from + i) << (16 * (i % 2));
        }
    }
    return pack;
}

template <class E>
__device__ inline void store_elements(E* to, const Pack<E>& pack, int count) {
    #pragma unroll
    for (int i = 0; i < PACK; ++i) {
        if (i < count) {
            if constexpr (sizeof(E) == 4) store<4>(to + i, &pack.words[i]);
            else store_half(to + i, pack.words[i / 2] >> (16 * (i % 2)));
        }
    }
}

// The end of a row. The packs of a row's threads may cover more columns than the row has. `left`
// counts the columns from a thread's first one to the end of the row: pack k has the first `left -
// k * STEP` of its PACK columns in the row, and none if that is zero or negative. A thread has no
// more packs than the row needs (plan.rs), so only its last pack can pass the end; the compiler
// drops the comparison from all others. Loads give zeros past the end, stores skip it. Two
// constants of the tile keep cases out of the code: IS_RAGGED (the packs cover more than the row)
// and HAS_TAIL (a pack has columns on both sides of the end).

// Columns from one pack of a thread to the next. Packs of adjacent threads are adjacent in memory.
constexpr int STEP = THREADS_PER_ROW * CLUSTER * PACK;

// Columns from a thread's first one to the end of the row; negative if the row ends earlier.
__device__ inline int columns_left(unsigned long long cols, unsigned first) { return int(cols) - int(first); }

// Whether pack k may reach past the end of the row.
__device__ constexpr bool may_pass_end(int k) { return IS_RAGGED && k == PACKS - 1; }

// Whether column i of pack k is in the row.
__device__ inline bool is_in_row(int k, int i, int left) {
    return !may_pass_end(k) || k * STEP + (HAS_TAIL ? i : 0) < left;
}

// Whether only the first columns of pack k are in the row.
__device__ inline bool has_part(int k, int left) { return HAS_TAIL && may_pass_end(k) && left - k * STEP < PACK; }

// A whole pack.
template <Hint HINT, class E>
__device__ inline Pack<E> load_whole(const E* from) {
    Pack<E> pack;
    #pragma unroll
    for (int byte = 0; byte < Pack<E>::BYTES; byte += WORD_ACCESS<E>) {
        load<WORD_ACCESS<E>, HINT>(reinterpret_cast<const char*>(from) + byte, &pack.words[byte / 4]);
    }
    return pack;
}

// Loads pack k of a thread from the address of its first column. Columns past the end of the row
// are zeros.
template <Hint HINT, class E>
__device__ inline Pack<E> load_pack(const E* first, int k, int left) {
    const E* from = first + k * STEP;
    if (!is_in_row(k, 0, left)) return {};
    if (IS_HALF_ACCESS<E> || has_part(k, left)) return load_elements(from, has_part(k, left) ? left - k * STEP : PACK);
    return load_whole<HINT>(from);
}

// Stores the columns of pack k that are in the row.
template <class E>
__device__ inline void store_pack(E* first, int k, int left, const Pack<E>& pack) {
    E* to = first + k * STEP;
    if (!is_in_row(k, 0, left)) return;
    if (IS_HALF_ACCESS<E> || has_part(k, left)) return store_elements(to, pack, has_part(k, left) ? left - k * STEP : PACK);
    #pragma unroll
    for (int byte = 0; byte < Pack<E>::BYTES; byte += WORD_ACCESS<E>) {
        store<WORD_ACCESS<E>>(reinterpret_cast<char*>(to) + byte, &pack.words[byte / 4]);
    }
}

// Loads pack k of the weight or the bias, if EXISTS. `first` is the thread's first column.
template <bool EXISTS>
__device__ inline Pack<W> load_parameter(const W* first, int k, int left) {
    if constexpr (EXISTS) return load_pack<Hint::ReadOnly>(first, k, left);
    else return {};
}

// The weights of a pack plus the offset (weight' of math.md); ones without a weight.
template <bool EXISTS = HAS_WEIGHT>
__device__ inline void unpack_weight(const Pack<W>& raw, float offset, float (&weight)[PACK]) {
    if constexpr (EXISTS) {
        unpack(raw, weight);
        if constexpr (HAS_WEIGHT_OFFSET) {
            #pragma unroll
            for (int i = 0; i < PACK; ++i) weight[i] += offset;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < PACK; ++i) weight[i] = 1.0f;
    }
}

// Starts an asynchronous copy of pack k to shared memory; `wait_copies` waits for it. Only the
// thread that started a copy reads the data, so no barrier is needed.
template <class E>
__device__ inline void start_copy(Pack<E>* slot, const E* first, int k, int left) {
#if __CUDA_ARCH__ >= 800
    if constexpr (!IS_HALF_ACCESS<E>) {
        const unsigned to = unsigned(__cvta_generic_to_shared(slot));
        const int left_bytes = (left - k * STEP) * int(sizeof(E));
        #pragma unroll
        for (int byte = 0; byte < Pack<E>::BYTES; byte += WORD_ACCESS<E>) {
            const char* from = reinterpret_cast<const char*>(first + k * STEP) + byte;
            // Columns past the end are zeroed, not read.
            const int bytes = !may_pass_end(k) ? WORD_ACCESS<E>
                            : HAS_TAIL ? max(0, min(left_bytes - byte, WORD_ACCESS<E>))
                            : left_bytes <= 0 ? 0
                            : WORD_ACCESS<E>;
            if constexpr (WORD_ACCESS<E> == 16) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to + byte), "l"(from), "r"(bytes) : "memory");
            } else {
                asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" :: "r"(to + byte), "l"(from), "r"(bytes), "n"(WORD_ACCESS<E>) : "memory");
            }
        }
        return;
    }
#endif
    *slot = load_pack<Hint::EvictFirst>(first, k, left);
}

__device__ inline void close_batch() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the PENDING latest batches are in flight.
template <int PENDING>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

// Kernels may overlap (programmatic dependent launch), but this kernel touches no memory until all
// earlier work is complete and visible.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as every block of this one runs. Only for kernels with few
// blocks: with thousands of short blocks, this instruction halves their rate.
__device__ inline void admit_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
