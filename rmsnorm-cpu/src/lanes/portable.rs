//! The instructions that the compilation target guarantees (SSE2 on x86-64, NEON on aarch64), as
//! loops that the compiler vectorises. On x86-64, where nearly every processor has AVX2, long operations are
//! functions of their own: inlined, they took most of the crate's time to compile.

use std::mem::MaybeUninit;

use super::activations::MAGIC;
use super::codes::NAN;
use super::{Float8, Group, LANES, Simd};

/// No instruction set beyond the target's.
pub(crate) struct Portable;

#[inline(always)]
fn map2<A: Copy, B: Copy, C>(a: &[A; LANES], b: &[B; LANES], f: impl Fn(A, B) -> C) -> [C; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

macro_rules! lane_by_lane {
    ($($name:ident = $op:tt),*) => {
        $(#[inline(always)]
        fn $name(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
            map2(&a, &b, |a, b| a $op b)
        })*
    };
}

impl Simd for Portable {
    const IS_BATCHED: bool = false;

    type Lanes = [f32; LANES];
    type Halves = [u16; LANES];
    type Bytes = [u8; LANES];

    #[inline(always)]
    fn splat(value: f32) -> Self::Lanes {
        [value; LANES]
    }

    lane_by_lane! { add = +, sub = -, mul = *, div = / }

    #[inline(always)]
    fn clamp(values: Self::Lanes, low: f32, high: f32) -> Self::Lanes {
        values.map(|value| value.clamp(low, high))
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn scale(values: Self::Lanes, exponents: Self::Lanes) -> Self::Lanes {
        let power = |exponent: f32| f32::from_bits((exponent + (MAGIC + 127.0)).to_bits() << 23);
        // In two steps, because the power may be too large or too small for an f32. Only the second one may round.
        map2(&values, &exponents, |value, exponent| {
            let half = (exponent * 0.5 + MAGIC) - MAGIC;
            (value * power(half)) * power(exponent - half)
        })
    }

    #[inline(always)]
    fn select_negative(of: Self::Lanes, yes: Self::Lanes, no: Self::Lanes) -> Self::Lanes {
        std::array::from_fn(|lane| if of[lane].is_sign_negative() { yes[lane] } else { no[lane] })
    }

    #[inline(always)]
    fn max_magnitude(magnitudes: Self::Lanes, values: Self::Lanes) -> Self::Lanes {
        map2(&magnitudes, &values, |a, b| f32::from_bits(a.to_bits().max(b.to_bits() & 0x7fff_ffff)))
    }

    #[inline(always)]
    fn fold_max(magnitudes: Self::Lanes) -> f32 {
        f32::from_bits(magnitudes.into_iter().map(f32::to_bits).fold(0, u32::max))
    }

    #[inline(always)]
    fn fold(mut lanes: Self::Lanes) -> f32 {
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self::Lanes {
        *from
    }

    #[inline(always)]
    unsafe fn store<const STREAM: bool>(to: &mut Group<f32>, lanes: Self::Lanes) {
        *to = lanes.map(MaybeUninit::new);
    }

    #[inline(always)]
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        *from
    }

    #[inline(always)]
    unsafe fn store_halves<const STREAM: bool>(to: &mut Group<u16>, halves: Self::Halves) {
        *to = halves.map(MaybeUninit::new);
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        halves.map(f16_to_f32)
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        lanes.map(f16_from_f32)
    }

    #[inline(always)]
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes {
        halves.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    /// Integer arithmetic, which vectorises. A NaN keeps its upper bits and becomes quiet.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves {
        lanes.map(|value| {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            ((if value.is_nan() { bits | 0x0040_0000 } else { rounded }) >> 16) as u16
        })
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn encode_float(lanes: Self::Lanes, format: &Float8) -> Self::Bytes {
        lanes.map(|value| {
            let bits = value.to_bits();
            let magnitude = (bits & 0x7fff_ffff).min(format.largest);
            // A carry correctly increases the exponent.
            let half = (1 << (format.shift - 1)) - 1 + (magnitude >> format.shift & 1);
            let normal = ((magnitude + half) >> format.shift).wrapping_sub(format.offset);
            let subnormal = (f32::from_bits(magnitude) + format.magic).to_bits().wrapping_sub(format.magic.to_bits());
            let code = if magnitude < format.min_normal { subnormal } else { normal };
            let code = if value.is_nan() { NAN } else { code };
            (code | bits >> 24 & 0x80) as u8
        })
    }

    /// An addition that leaves the integer in the lowest bits, because rounding functions do not
    /// vectorise without SSE4.1.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    fn encode_int8(lanes: Self::Lanes) -> Self::Bytes {
        lanes.map(|value| {
            let code = (value.clamp(-128.0, 127.0) + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as u8;
            if value.is_nan() { 0 } else { code }
        })
    }

    #[inline(always)]
    unsafe fn store_bytes<const STREAM: bool>(to: &mut Group<u8>, bytes: Self::Bytes) {
        *to = bytes.map(MaybeUninit::new);
    }

    #[inline(always)]
    fn fence() {}

    #[inline(always)]
    fn prefetch(_address: *const u8) {}
}

/// Exact. Has no branches, so that it vectorises; the crate `half` tests processor features for
/// every element.
#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    // Moving the bits leaves the exponent 112 too small. The product corrects it, also for
    // subnormals.
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let is_infinite_or_nan = half & 0x7c00 == 0x7c00;
    let exponent = if is_infinite_or_nan { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | exponent | u32::from(half & 0x8000) << 16)
}

/// To nearest, ties to even; a NaN keeps its upper bits and becomes quiet. Has no branches, like
/// [`f16_to_f32`].
#[inline(always)]
fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits() & 0x7fff_ffff;
    let magnitude = f32::from_bits(bits);
    // Below 2^-14 f16 values are spaced 2^-24, like f32 values from 0.5 on. So this sum rounds
    // correctly.
    let subnormal = (magnitude + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (bits >> 13) & 1;
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let nan = 0x7e00 | (bits >> 13) & 0x3ff;
    let rounded = if magnitude < 6.103_515_6e-5 { subnormal } else { normal };
    // From the midpoint of the largest f16 and the next power of two on, infinity is nearer.
    let finite = if magnitude < 65520.0 { rounded } else { 0x7c00 };
    let unsigned = if magnitude.is_nan() { nan } else { finite };
    unsigned as u16 | (value.to_bits() >> 16) as u16 & 0x8000
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{bf16, f16};

    use super::*;

    /// Compares every f16 bit for bit; a NaN keeps its bits.
    #[test]
    fn every_half_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (half, got) = (f16::from_bits(bits), f16_to_f32(bits));
            let expected = if half.is_nan() {
                f32::from_bits(u32::from(bits & 0x8000) << 16 | 0x7f80_0000 | u32::from(bits & 0x3ff) << 13)
            } else {
                half.to_f32()
            };
            assert_eq!(got.to_bits(), expected.to_bits(), "{bits:#06x}");
        }
    }

    /// Calls `check` for each 16-bit value, the midpoint to the next value away from zero, their
    /// f32 neighbours, and the extreme f32 values.
    fn for_all_roundings(halfway: impl Fn(u16) -> f32, value: impl Fn(u16) -> f32, mut check: impl FnMut(f32)) {
        for bits in 0..=0x7fffu16 {
            for near in [value(bits), halfway(bits)].into_iter().filter(|near| near.is_finite()) {
                for near in [near.next_down(), near, near.next_up()] {
                    check(near);
                    check(-near);
                }
            }
        }
        [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-40].into_iter().for_each(check);
    }

    #[test]
    fn values_are_rounded_to_the_nearest_half() {
        let value = |bits| f16::from_bits(bits).to_f32();
        // As if a value followed the largest f16.
        let next = |bits| if bits == 0x7bff { 65536.0 } else { value(bits + 1) };
        for_all_roundings(
            |bits| (value(bits) + next(bits)) / 2.0,
            value,
            |near| assert_eq!(f16_from_f32(near), f16::from_f32(near).to_bits(), "{near:e}"),
        );
        for payload in [0x7f80_0001u32, 0x7fc0_0000, 0x7fa5_4321, 0x7fff_ffff] {
            for sign in [0, 0x8000_0000] {
                let got = f16_from_f32(f32::from_bits(payload | sign));
                let kept = 0x7e00 | (payload >> 13 & 0x3ff) as u16 | (sign >> 16) as u16;
                assert_eq!(got, kept, "{payload:#x}");
            }
        }
    }

    #[test]
    fn values_are_rounded_to_the_nearest_bf16() {
        let value = |bits| bf16::from_bits(bits).to_f32();
        let halfway = |bits| f32::from_bits(u32::from(bits) << 16 | 0x8000);
        for_all_roundings(halfway, value, |near| {
            let got = <Portable as Simd>::narrow_bf16([near; LANES]);
            assert_eq!(got, [bf16::from_f32(near).to_bits(); LANES], "{near:e}");
            assert_eq!(<Portable as Simd>::widen_bf16(got), [bf16::from_bits(got[0]).to_f32(); LANES]);
        });
        let got = <Portable as Simd>::narrow_bf16([f32::from_bits(0xff80_0001); LANES]);
        assert_eq!(got, [0xffc0; LANES], "a NaN stays one, and quiet");
    }
}
