//! AVX-512 F, BW, VL and DQ.
//!
//! Every function is inlined into a stage body that `kernel` compiles for this instruction set and calls only on a
//! processor that has it: that discharges "feature" in each proof below.

use std::arch::x86_64::*;

use super::avx2::{Avx2, fold_register};
use super::codes::NAN;
use super::{Float8, Group, LANES, Simd, Work, compiled, each_of};

/// AVX-512 F, BW, VL and DQ.
pub(crate) struct Avx512;

/// f32 elements of a register.
const WIDTH: usize = 16;
const REGISTERS: usize = LANES / WIDTH;

type Lanes = [__m512; REGISTERS];

macro_rules! each_register {
    ($i:ident => $e:expr) => {
        each_of!([0, 1], $i => $e)
    };
}

impl Simd for Avx512 {
    const IS_BATCHED: bool = true;

    type Lanes = Lanes;
    type Halves = __m512i;
    type Bytes = __m256i;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline(never)]
    unsafe fn call<W: Work>(work: W) -> W::Output<Self> {
        work.run::<Self>()
    }

    compiled! { "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq";
        fn splat(value: f32) -> Lanes {
            [_mm512_set1_ps(value); REGISTERS]
        }

        fn add(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm512_add_ps(a[i], b[i]))
        }

        fn sub(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm512_sub_ps(a[i], b[i]))
        }

        fn mul(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm512_mul_ps(a[i], b[i]))
        }

        fn div(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm512_div_ps(a[i], b[i]))
        }

        fn clamp(values: Lanes, low: f32, high: f32) -> Lanes {
            // Both return their second operand if one is NaN.
            each_register!(i => _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), values[i])))
        }

        fn scale(values: Lanes, exponents: Lanes) -> Lanes {
            each_register!(i => _mm512_scalef_ps(values[i], exponents[i]))
        }

        fn select_negative(of: Lanes, yes: Lanes, no: Lanes) -> Lanes {
            each_register!(i => {
                _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(of[i])), no[i], yes[i])
            })
        }

        fn max_magnitude(magnitudes: Lanes, values: Lanes) -> Lanes {
            each_register!(i => {
                let value = _mm512_and_si512(_mm512_castps_si512(values[i]), _mm512_set1_epi32(i32::MAX));
                _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(magnitudes[i]), value))
            })
        }

        fn fold_max(magnitudes: Lanes) -> f32 {
            let sixteen = _mm512_max_epu32(_mm512_castps_si512(magnitudes[0]), _mm512_castps_si512(magnitudes[1]));
            f32::from_bits(_mm512_reduce_max_epu32(sixteen))
        }

        fn fold(lanes: Lanes) -> f32 {
            let sixteen = _mm512_add_ps(lanes[0], lanes[1]);
            let halves = [_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)];
            fold_register(_mm256_add_ps(halves[0], halves[1]))
        }

        fn load(from: &[f32; LANES]) -> Lanes {
            // SAFETY:
            // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
            each_register!(i => unsafe { _mm512_loadu_ps(from.as_ptr().add(i * WIDTH)) })
        }

        fn load_halves(from: &[u16; LANES]) -> __m512i {
            // SAFETY:
            // - bounds: the register is as long as the array.
            unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
        }

        fn load_part(from: &[f32]) -> Lanes {
            // SAFETY:
            // - bounds: only lanes with bits in the mask are read, which are the elements of the slice.
            each_register!(i => unsafe {
                _mm512_maskz_loadu_ps(first_lanes(from.len(), i), from.as_ptr().wrapping_add(i * WIDTH))
            })
        }

        fn load_halves_part(from: &[u16]) -> __m512i {
            // SAFETY:
            // - bounds: only lanes with bits in the mask are read, which are the elements of the slice.
            unsafe { _mm512_maskz_loadu_epi16(first_bits(from.len()), from.as_ptr().cast()) }
        }

        fn first(lanes: Lanes, len: usize) -> Lanes {
            each_register!(i => _mm512_maskz_mov_ps(first_lanes(len, i), lanes[i]))
        }

        fn widen_f16(halves: __m512i) -> Lanes {
            each_register!(i => _mm512_cvtph_ps(sixteen(halves, i)))
        }

        fn narrow_f16(lanes: Lanes) -> __m512i {
            let [low, high] = each_register!(i => _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(lanes[i]));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }

        fn widen_bf16(halves: __m512i) -> Lanes {
            each_register!(i => {
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(sixteen(halves, i))))
            })
        }

        fn narrow_bf16(lanes: Lanes) -> __m512i {
            let [low, high] = each_register!(i => bf16_in_high_words(lanes[i]));
            // SAFETY:
            // - bounds: the index register is as long as HIGH_WORDS.
            let index = unsafe { _mm512_loadu_si512(HIGH_WORDS.as_ptr().cast()) };
            _mm512_permutex2var_epi16(low, index, high)
        }

        fn encode_int8(lanes: Lanes) -> __m256i {
            let [low, high] = each_register!(i => {
                let least = _mm512_max_ps(lanes[i], _mm512_set1_ps(-128.0));
                let within = _mm512_min_ps(least, _mm512_set1_ps(127.0));
                let is_number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(lanes[i], lanes[i]);
                _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(is_number, within))
            });
            _mm256_set_m128i(high, low)
        }
    }

    #[inline(always)]
    fn encode_float(lanes: Lanes, format: &Float8) -> __m256i {
        // SAFETY:
        // - feature: see the module.
        unsafe {
            let [low, high] = each_register!(i => encode_register(lanes[i], format));
            _mm256_set_m128i(high, low)
        }
    }

    #[inline(always)]
    unsafe fn store<const STREAM: bool>(to: &mut Group<f32>, lanes: Lanes) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { put::<STREAM, _, _>(to, bits(lanes)) }
    }

    #[inline(always)]
    unsafe fn store_halves<const STREAM: bool>(to: &mut Group<u16>, halves: __m512i) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { put::<STREAM, _, _>(to, [halves]) }
    }

    #[inline(always)]
    unsafe fn store_bytes<const STREAM: bool>(to: &mut Group<u8>, bytes: __m256i) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { Avx2::store_bytes::<STREAM>(to, bytes) }
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

/// Writes registers side by side, past the cache if `STREAM`.
///
/// # Safety
/// As [`Simd::store`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn put<const STREAM: bool, T, const N: usize>(to: &mut Group<T>, registers: [__m512i; N]) {
    const { assert!(size_of::<Group<T>>() == size_of::<[__m512i; N]>(), "registers are a group") }
    for (i, register) in registers.into_iter().enumerate() {
        // SAFETY:
        // - alignment, ordering: the caller's obligations;
        // - bounds: the group is as long as the registers.
        unsafe {
            let to = to.as_mut_ptr().cast::<__m512i>().add(i);
            if STREAM { _mm512_stream_si512(to, register) } else { _mm512_storeu_si512(to, register) }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn bits(lanes: Lanes) -> [__m512i; REGISTERS] {
    each_register!(i => _mm512_castps_si512(lanes[i]))
}

/// The positions of the upper words in the elements of two registers.
const HIGH_WORDS: [u16; LANES] = {
    let mut positions = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        positions[lane] = 2 * lane as u16 + 1;
        lane += 1;
    }
    positions
};

/// A bit for each of the first `len` lanes, of at most 32.
#[inline(always)]
fn first_bits(len: usize) -> u32 {
    ((1u64 << len) - 1) as u32
}

/// The bits of register `i`.
#[inline(always)]
fn first_lanes(len: usize, i: usize) -> u16 {
    (first_bits(len) >> (i * WIDTH)) as u16
}

/// Values `16 * i` to `16 * i + 15`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn sixteen(halves: __m512i, i: usize) -> __m256i {
    if i == 0 { _mm512_castsi512_si256(halves) } else { _mm512_extracti64x4_epi64::<1>(halves) }
}

/// Rounds to nearest even with integer arithmetic. A NaN keeps its upper bits and becomes quiet.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn bf16_in_high_words(lanes: __m512) -> __m512i {
    let bits = _mm512_castps_si512(lanes);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes, lanes);
    _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000))
}

/// The same integer in every lane.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn splat(bits: u32) -> __m512i {
    _mm512_set1_epi32(bits.cast_signed())
}

/// Codes of sixteen values.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn encode_register(values: __m512, format: &Float8) -> __m128i {
    let shift = _mm_cvtsi32_si128(format.shift.cast_signed());
    let bits = _mm512_castps_si512(values);
    let magnitude = _mm512_min_epu32(_mm512_and_si512(bits, splat(0x7fff_ffff)), splat(format.largest));
    let odd = _mm512_and_si512(_mm512_srl_epi32(magnitude, shift), splat(1));
    let half = _mm512_add_epi32(odd, splat((1 << (format.shift - 1)) - 1));
    let normal = _mm512_srl_epi32(_mm512_add_epi32(magnitude, half), shift);
    let normal = _mm512_sub_epi32(normal, splat(format.offset));
    let magic = _mm512_set1_ps(format.magic);
    let sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), magic);
    let subnormal = _mm512_sub_epi32(_mm512_castps_si512(sum), _mm512_castps_si512(magic));
    let is_subnormal = _mm512_cmplt_epu32_mask(magnitude, splat(format.min_normal));
    let code = _mm512_mask_mov_epi32(normal, is_subnormal, subnormal);
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    let code = _mm512_mask_mov_epi32(code, is_nan, splat(NAN));
    // Each in the lowest byte of its lane.
    let lanes = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32::<24>(bits), splat(0x80)));
    _mm512_cvtepi32_epi8(lanes)
}
