//! AVX2 with F16C.
//!
//! Every function is inlined into a stage body that `kernel` compiles for this instruction set and calls only on a
//! processor that has it: that discharges "feature" in each proof below.

use std::arch::x86_64::*;

use super::{Group, LANES, Simd};

/// AVX2 with F16C.
pub(crate) struct Avx2;

/// f32 in a register.
const WIDTH: usize = 8;
const REGISTERS: usize = LANES / WIDTH;

/// `[e(0), e(1), ..]`, one for each register. A closure would not do: it is compiled without the instruction set, and
/// the intrinsics in it would become calls.
macro_rules! each_register {
    ($i:ident => $e:expr) => {
        [
            {
                let $i = 0;
                $e
            },
            {
                let $i = 1;
                $e
            },
            {
                let $i = 2;
                $e
            },
            {
                let $i = 3;
                $e
            },
        ]
    };
}

impl Simd for Avx2 {
    type Lanes = [__m256; REGISTERS];
    type Halves = [__m256i; 2];

    #[inline(always)]
    fn splat(value: f32) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        [unsafe { _mm256_set1_ps(value) }; REGISTERS]
    }

    #[inline(always)]
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm256_add_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm256_sub_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm256_mul_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn fold(lanes: Self::Lanes) -> f32 {
        // SAFETY:
        // - feature: see the module.
        unsafe { fold_register(_mm256_add_ps(_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3]))) }
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module;
        // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
        each_register!(i => unsafe { _mm256_loadu_ps(from.as_ptr().add(i * WIDTH)) })
    }

    #[inline(always)]
    fn store(to: &mut Group<f32>, lanes: Self::Lanes) {
        for (i, register) in lanes.into_iter().enumerate() {
            // SAFETY:
            // - feature: see the module;
            // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr().cast::<f32>().add(i * WIDTH), register) }
        }
    }

    #[inline(always)]
    unsafe fn stream(to: &mut Group<f32>, lanes: Self::Lanes) {
        for (i, register) in lanes.into_iter().enumerate() {
            // SAFETY:
            // - feature: see the module;
            // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array;
            // - alignment: the caller's obligation;
            // - ordering: the caller's obligation.
            unsafe { _mm256_stream_ps(to.as_mut_ptr().cast::<f32>().add(i * WIDTH), register) }
        }
    }

    #[inline(always)]
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        // SAFETY:
        // - feature: see the module;
        // - bounds: the array is two registers long.
        unsafe { [_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from.as_ptr().add(16).cast())] }
    }

    #[inline(always)]
    fn store_halves(to: &mut Group<u16>, halves: Self::Halves) {
        for (i, register) in halves.into_iter().enumerate() {
            // SAFETY:
            // - feature: see the module;
            // - bounds: i < 2, so the 16 elements from i * 16 lie inside the array.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().add(i * 16).cast(), register) }
        }
    }

    #[inline(always)]
    unsafe fn stream_halves(to: &mut Group<u16>, halves: Self::Halves) {
        for (i, register) in halves.into_iter().enumerate() {
            // SAFETY:
            // - feature: see the module;
            // - bounds: i < 2, so the 16 elements from i * 16 lie inside the array;
            // - alignment: the caller's obligation;
            // - ordering: the caller's obligation.
            unsafe { _mm256_stream_si256(to.as_mut_ptr().add(i * 16).cast(), register) }
        }
    }

    #[inline(always)]
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm256_cvtph_ps(eight(halves, i)) })
    }

    #[inline(always)]
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        // SAFETY:
        // - feature: see the module.
        let eights = each_register!(i => unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(lanes[i]) });
        // SAFETY:
        // - feature: see the module.
        unsafe { [_mm256_set_m128i(eights[1], eights[0]), _mm256_set_m128i(eights[3], eights[2])] }
    }

    #[inline(always)]
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight(halves, i))))
        })
    }

    #[inline(always)]
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves {
        let words = each_register!(i => bf16_in_low_words(lanes[i]));
        [pack(words[0], words[1]), pack(words[2], words[3])]
    }

    #[inline(always)]
    fn fence() {
        // SAFETY:
        // - feature: sfence is part of SSE, which x86-64 guarantees.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY:
        // - feature: prefetch is part of SSE, which x86-64 guarantees;
        // - memory: it is a hint that accesses nothing, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// The sum of 8 lanes in the tree of [`Simd::fold`].
#[inline(always)]
pub(super) fn fold_register(register: __m256) -> f32 {
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX2 or AVX-512.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(register), _mm256_extractf128_ps::<1>(register));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// Values 8 i to 8 i + 7.
#[inline(always)]
fn eight(halves: [__m256i; 2], i: usize) -> __m128i {
    let register = halves[i / 2];
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX2.
    unsafe {
        if i.is_multiple_of(2) { _mm256_castsi256_si128(register) } else { _mm256_extracti128_si256::<1>(register) }
    }
}

/// The low words of 16 elements, in order.
#[inline(always)]
fn pack(low: __m256i, high: __m256i) -> __m256i {
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX2.
    unsafe {
        // Packing works within 128-bit halves of the registers; the permutation puts the quarters in order.
        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
    }
}

/// Rounds to nearest even in integers; a NaN keeps its upper bits and becomes quiet.
#[inline(always)]
fn bf16_in_low_words(lanes: __m256) -> __m256i {
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX2.
    unsafe {
        let bits = _mm256_castps_si256(lanes);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lanes, lanes));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan))
    }
}
