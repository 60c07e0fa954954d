//! AVX2 with F16C.
//!
//! Every function is inlined into a stage body that `kernel` compiles for this instruction set and calls only on a
//! processor that has it: that discharges "feature" in each proof below.

use std::arch::x86_64::*;

use super::activations::MAGIC;
use super::codes::NAN;
use super::{Float8, Group, LANES, Simd, Work, compiled, each_of};

/// AVX2 with F16C.
pub(crate) struct Avx2;

/// f32 elements of a register.
const WIDTH: usize = 8;
const REGISTERS: usize = LANES / WIDTH;

type Lanes = [__m256; REGISTERS];
type Halves = [__m256i; 2];

macro_rules! each_register {
    ($i:ident => $e:expr) => {
        each_of!([0, 1, 2, 3], $i => $e)
    };
}

impl Simd for Avx2 {
    const IS_BATCHED: bool = true;

    type Lanes = Lanes;
    type Halves = Halves;
    type Bytes = __m256i;

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline(never)]
    unsafe fn call<W: Work>(work: W) -> W::Output<Self> {
        work.run::<Self>()
    }

    compiled! { "avx2,fma,f16c";
        fn splat(value: f32) -> Lanes {
            [_mm256_set1_ps(value); REGISTERS]
        }

        fn add(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm256_add_ps(a[i], b[i]))
        }

        fn sub(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm256_sub_ps(a[i], b[i]))
        }

        fn mul(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm256_mul_ps(a[i], b[i]))
        }

        fn div(a: Lanes, b: Lanes) -> Lanes {
            each_register!(i => _mm256_div_ps(a[i], b[i]))
        }

        fn clamp(values: Lanes, low: f32, high: f32) -> Lanes {
            // Both return their second operand if one is NaN.
            each_register!(i => _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), values[i])))
        }

        fn scale(values: Lanes, exponents: Lanes) -> Lanes {
            each_register!(i => {
                // In two steps, because the power may be too large or too small for an f32. Only the second one may round.
                let (magic, bias) = (_mm256_set1_ps(MAGIC), _mm256_set1_ps(MAGIC + 127.0));
                let half = _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(exponents[i], _mm256_set1_ps(0.5)), magic), magic);
                let rest = _mm256_sub_ps(exponents[i], half);
                let first = _mm256_slli_epi32::<23>(_mm256_castps_si256(_mm256_add_ps(half, bias)));
                let second = _mm256_slli_epi32::<23>(_mm256_castps_si256(_mm256_add_ps(rest, bias)));
                _mm256_mul_ps(_mm256_mul_ps(values[i], _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))
            })
        }

        fn select_negative(of: Lanes, yes: Lanes, no: Lanes) -> Lanes {
            each_register!(i => _mm256_blendv_ps(no[i], yes[i], of[i]))
        }

        fn max_magnitude(magnitudes: Lanes, values: Lanes) -> Lanes {
            each_register!(i => {
                let value = _mm256_and_si256(_mm256_castps_si256(values[i]), _mm256_set1_epi32(i32::MAX));
                _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(magnitudes[i]), value))
            })
        }

        fn fold_max(magnitudes: Lanes) -> f32 {
            let bits = each_register!(i => _mm256_castps_si256(magnitudes[i]));
            let eight = _mm256_max_epu32(_mm256_max_epu32(bits[0], bits[1]), _mm256_max_epu32(bits[2], bits[3]));
            let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b0100_1110>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b1011_0001>(two));
            f32::from_bits(_mm_cvtsi128_si32(one).cast_unsigned())
        }

        fn fold(lanes: Lanes) -> f32 {
            fold_register(_mm256_add_ps(_mm256_add_ps(lanes[0], lanes[2]), _mm256_add_ps(lanes[1], lanes[3])))
        }

        fn load(from: &[f32; LANES]) -> Lanes {
            // SAFETY:
            // - bounds: i < REGISTERS, so WIDTH elements from i * WIDTH lie inside the array.
            each_register!(i => unsafe { _mm256_loadu_ps(from.as_ptr().add(i * WIDTH)) })
        }

        fn load_halves(from: &[u16; LANES]) -> Halves {
            // SAFETY:
            // - bounds: the array is two registers long.
            unsafe { [_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from.as_ptr().add(16).cast())] }
        }

        fn load_part(from: &[f32]) -> Lanes {
            // SAFETY:
            // - bounds: only lanes with bits in the mask are read, which are the elements of the slice.
            each_register!(i => unsafe {
                _mm256_maskload_ps(from.as_ptr().wrapping_add(i * WIDTH), first_lanes(from.len(), i))
            })
        }

        fn load_halves_part(from: &[u16]) -> Halves {
            let (pairs, last) = from.as_chunks::<2>();
            let last = _mm256_set1_epi32(last.first().map_or(0, |&last| last.into()));
            each_of!([0, 1], i => {
                // SAFETY:
                // - bounds: only lanes with bits in the mask are read, which are the pairs of the slice;
                // - alignment: any is allowed.
                let words = unsafe {
                    _mm256_maskload_epi32(from.as_ptr().cast::<i32>().wrapping_add(i * WIDTH), first_lanes(pairs.len(), i))
                };
                let next = _mm256_andnot_si256(first_lanes(pairs.len(), i), first_lanes(pairs.len() + 1, i));
                _mm256_or_si256(words, _mm256_and_si256(next, last))
            })
        }

        fn first(lanes: Lanes, len: usize) -> Lanes {
            each_register!(i => _mm256_and_ps(lanes[i], _mm256_castsi256_ps(first_lanes(len, i))))
        }

        fn widen_f16(halves: Halves) -> Lanes {
            each_register!(i => _mm256_cvtph_ps(eight(halves, i)))
        }

        fn narrow_f16(lanes: Lanes) -> Halves {
            let eights = each_register!(i => _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(lanes[i]));
            [_mm256_set_m128i(eights[1], eights[0]), _mm256_set_m128i(eights[3], eights[2])]
        }

        fn widen_bf16(halves: Halves) -> Lanes {
            each_register!(i => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight(halves, i)))))
        }
    }

    // The functions below call others that are compiled so. As one they would be too long to be inlined.

    #[inline(always)]
    fn narrow_bf16(lanes: Lanes) -> Halves {
        // SAFETY:
        // - feature: see the module.
        unsafe {
            let words = each_register!(i => bf16_in_low_words(lanes[i]));
            [pack(words[0], words[1]), pack(words[2], words[3])]
        }
    }

    #[inline(always)]
    fn encode_float(lanes: Lanes, format: &Float8) -> __m256i {
        // SAFETY:
        // - feature: see the module.
        unsafe { pack_bytes(each_register!(i => encode_register(lanes[i], format))) }
    }

    #[inline(always)]
    fn encode_int8(lanes: Lanes) -> __m256i {
        // SAFETY:
        // - feature: see the module.
        unsafe { pack_bytes(each_register!(i => encode_register_int8(lanes[i]))) }
    }

    #[inline(always)]
    unsafe fn store<const STREAM: bool>(to: &mut Group<f32>, lanes: Lanes) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { put::<STREAM, _, _>(to, bits(lanes)) }
    }

    #[inline(always)]
    unsafe fn store_halves<const STREAM: bool>(to: &mut Group<u16>, halves: Halves) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { put::<STREAM, _, _>(to, halves) }
    }

    #[inline(always)]
    unsafe fn store_bytes<const STREAM: bool>(to: &mut Group<u8>, bytes: __m256i) {
        // SAFETY:
        // - feature: see the module;
        // - alignment, ordering: the caller's obligations.
        unsafe { put::<STREAM, _, _>(to, [bytes]) }
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

/// All bits in 32 words, and none in 32 more.
const MASKS: [i32; 2 * LANES] = {
    let mut masks = [0; 2 * LANES];
    let mut lane = 0;
    while lane < LANES {
        masks[lane] = -1;
        lane += 1;
    }
    masks
};

/// All bits of those lanes of register `i` that are among the first `len`, of at most 32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn first_lanes(len: usize, i: usize) -> __m256i {
    let at = LANES - len.min(LANES) + i * WIDTH;
    // SAFETY:
    // - bounds: i < REGISTERS, so at most 32 + 24 words come before the eight that are read.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(at).cast()) }
}

/// Writes registers side by side, past the cache if `STREAM`.
///
/// # Safety
/// As [`Simd::store`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn put<const STREAM: bool, T, const N: usize>(to: &mut Group<T>, registers: [__m256i; N]) {
    const { assert!(size_of::<Group<T>>() == size_of::<[__m256i; N]>(), "registers are a group") }
    for (i, register) in registers.into_iter().enumerate() {
        // SAFETY:
        // - alignment, ordering: the caller's obligations;
        // - bounds: the group is as long as the registers.
        unsafe {
            let to = to.as_mut_ptr().cast::<__m256i>().add(i);
            if STREAM { _mm256_stream_si256(to, register) } else { _mm256_storeu_si256(to, register) }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bits(lanes: Lanes) -> [__m256i; REGISTERS] {
    each_register!(i => _mm256_castps_si256(lanes[i]))
}

/// The sum of 8 lanes in the tree of [`Simd::fold`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn fold_register(register: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(register), _mm256_extractf128_ps::<1>(register));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Values `8 * i` to `8 * i + 7`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn eight(halves: Halves, i: usize) -> __m128i {
    let register = halves[i / 2];
    if i.is_multiple_of(2) { _mm256_castsi256_si128(register) } else { _mm256_extracti128_si256::<1>(register) }
}

/// The low words of 16 elements, in order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pack(low: __m256i, high: __m256i) -> __m256i {
    // Packing works within 128-bit halves of the registers; the permutation restores the order of the quarters.
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
}

/// Rounds to nearest even with integer arithmetic. A NaN keeps its upper bits and becomes quiet.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bf16_in_low_words(lanes: __m256) -> __m256i {
    let bits = _mm256_castps_si256(lanes);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(lanes, lanes));
    _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan))
}

/// The same integer in every lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn splat(bits: u32) -> __m256i {
    _mm256_set1_epi32(bits.cast_signed())
}

/// Codes of eight values, each in the lowest byte of its lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn encode_register(values: __m256, format: &Float8) -> __m256i {
    let shift = _mm_cvtsi32_si128(format.shift.cast_signed());
    let bits = _mm256_castps_si256(values);
    let magnitude = _mm256_min_epu32(_mm256_and_si256(bits, splat(0x7fff_ffff)), splat(format.largest));
    let odd = _mm256_and_si256(_mm256_srl_epi32(magnitude, shift), splat(1));
    let half = _mm256_add_epi32(odd, splat((1 << (format.shift - 1)) - 1));
    let normal = _mm256_srl_epi32(_mm256_add_epi32(magnitude, half), shift);
    let normal = _mm256_sub_epi32(normal, splat(format.offset));
    let magic = _mm256_set1_ps(format.magic);
    let sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), magic);
    let subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_castps_si256(magic));
    let is_subnormal = _mm256_cmpgt_epi32(splat(format.min_normal), magnitude);
    let code = _mm256_blendv_epi8(normal, subnormal, is_subnormal);
    let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
    let code = _mm256_blendv_epi8(code, splat(NAN), is_nan);
    _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32::<24>(bits), splat(0x80)))
}

/// The same as integers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn encode_register_int8(values: __m256) -> __m256i {
    let least = _mm256_max_ps(values, _mm256_set1_ps(-128.0));
    let integers = _mm256_cvtps_epi32(_mm256_min_ps(least, _mm256_set1_ps(127.0)));
    let is_number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(values, values));
    // Only the lowest byte: packing would saturate a negative integer.
    _mm256_and_si256(_mm256_and_si256(integers, is_number), _mm256_set1_epi32(0xff))
}

/// The lowest bytes of 32 lanes, in order. No lane is above 255.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pack_bytes(lanes: [__m256i; REGISTERS]) -> __m256i {
    let low = _mm256_packus_epi32(lanes[0], lanes[1]);
    let high = _mm256_packus_epi32(lanes[2], lanes[3]);
    // Packing works within halves: groups of four bytes come out as 0 2 4 6 1 3 5 7.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order)
}
