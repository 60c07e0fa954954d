//! AVX-512 F, BW, VL and DQ.
//!
//! Every function is inlined into a stage body that `kernel` compiles for this instruction set and calls only on a
//! processor that has it: that discharges "feature" in each proof below.

use std::arch::x86_64::*;

use super::avx2::{Avx2, fold_register};
use super::{Group, LANES, Simd};

/// AVX-512 F, BW, VL and DQ.
pub(crate) struct Avx512;

/// f32 in a register.
const WIDTH: usize = 16;
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
        ]
    };
}

impl Simd for Avx512 {
    type Lanes = [__m512; REGISTERS];
    type Halves = __m512i;

    #[inline(always)]
    fn splat(value: f32) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        [unsafe { _mm512_set1_ps(value) }; REGISTERS]
    }

    #[inline(always)]
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm512_add_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm512_sub_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm512_mul_ps(a[i], b[i]) })
    }

    #[inline(always)]
    fn fold(lanes: Self::Lanes) -> f32 {
        // SAFETY:
        // - feature: see the module.
        unsafe {
            let sixteen = _mm512_add_ps(lanes[0], lanes[1]);
            let halves = [_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)];
            fold_register(_mm256_add_ps(halves[0], halves[1]))
        }
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module;
        // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
        each_register!(i => unsafe { _mm512_loadu_ps(from.as_ptr().add(i * WIDTH)) })
    }

    #[inline(always)]
    fn store(to: &mut Group<f32>, lanes: Self::Lanes) {
        for (i, register) in lanes.into_iter().enumerate() {
            // SAFETY:
            // - feature: see the module;
            // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr().cast::<f32>().add(i * WIDTH), register) }
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
            unsafe { _mm512_stream_ps(to.as_mut_ptr().cast::<f32>().add(i * WIDTH), register) }
        }
    }

    #[inline(always)]
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        // SAFETY:
        // - feature: see the module;
        // - bounds: the register is as long as the array.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_halves(to: &mut Group<u16>, halves: Self::Halves) {
        // SAFETY:
        // - feature: see the module;
        // - bounds: the register is as long as the array.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), halves) }
    }

    #[inline(always)]
    unsafe fn stream_halves(to: &mut Group<u16>, halves: Self::Halves) {
        // SAFETY:
        // - feature: see the module;
        // - bounds: the register is as long as the array;
        // - alignment: the caller's obligation;
        // - ordering: the caller's obligation.
        unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), halves) }
    }

    #[inline(always)]
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe { _mm512_cvtph_ps(sixteen(halves, i)) })
    }

    #[inline(always)]
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        // SAFETY:
        // - feature: see the module.
        unsafe {
            let [low, high] = each_register!(i => _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(lanes[i]));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }

    #[inline(always)]
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes {
        // SAFETY:
        // - feature: see the module.
        each_register!(i => unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(sixteen(halves, i))))
        })
    }

    #[inline(always)]
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves {
        let [low, high] = each_register!(i => bf16_in_high_words(lanes[i]));
        // SAFETY:
        // - feature: see the module;
        // - bounds: the index register is as long as HIGH_WORDS.
        unsafe {
            let index = _mm512_loadu_si512(HIGH_WORDS.as_ptr().cast());
            _mm512_permutex2var_epi16(low, index, high)
        }
    }

    #[inline(always)]
    fn fence() {
        Avx2::fence();
    }

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY:
        // - feature: prefetch is part of SSE, which x86-64 guarantees;
        // - memory: it is a hint that accesses nothing, so any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// The positions of the upper words of two registers' elements.
const HIGH_WORDS: [u16; LANES] = {
    let mut positions = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        positions[lane] = 2 * lane as u16 + 1;
        lane += 1;
    }
    positions
};

/// Values 16 i to 16 i + 15.
#[inline(always)]
fn sixteen(halves: __m512i, i: usize) -> __m256i {
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX-512.
    unsafe { if i == 0 { _mm512_castsi512_si256(halves) } else { _mm512_extracti64x4_epi64::<1>(halves) } }
}

/// Rounds to nearest even in integers; a NaN keeps its upper bits and becomes quiet.
#[inline(always)]
fn bf16_in_high_words(lanes: __m512) -> __m512i {
    // SAFETY:
    // - feature: every caller is inlined into a stage body for AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(lanes);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes, lanes);
        _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}
