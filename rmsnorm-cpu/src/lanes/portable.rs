//! What the compilation target guarantees (SSE2 on x86-64, NEON on aarch64), by loops that the compiler vectorises.

use std::mem::MaybeUninit;

use super::{Group, LANES, Simd};

/// No instruction set beyond the target's.
pub(crate) struct Portable;

#[inline(always)]
fn map2<A: Copy, B: Copy, C>(a: &[A; LANES], b: &[B; LANES], f: impl Fn(A, B) -> C) -> [C; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Simd for Portable {
    type Lanes = [f32; LANES];
    type Halves = [u16; LANES];

    #[inline(always)]
    fn splat(value: f32) -> Self::Lanes {
        [value; LANES]
    }

    #[inline(always)]
    fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(&a, &b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(&a, &b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        map2(&a, &b, |a, b| a * b)
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
    fn store(to: &mut Group<f32>, lanes: Self::Lanes) {
        *to = lanes.map(MaybeUninit::new);
    }

    #[inline(always)]
    unsafe fn stream(to: &mut Group<f32>, lanes: Self::Lanes) {
        *to = lanes.map(MaybeUninit::new);
    }

    #[inline(always)]
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        *from
    }

    #[inline(always)]
    fn store_halves(to: &mut Group<u16>, halves: Self::Halves) {
        *to = halves.map(MaybeUninit::new);
    }

    #[inline(always)]
    unsafe fn stream_halves(to: &mut Group<u16>, halves: Self::Halves) {
        *to = halves.map(MaybeUninit::new);
    }

    #[inline(always)]
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        halves.map(f16_to_f32)
    }

    #[inline(always)]
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        lanes.map(f16_from_f32)
    }

    #[inline(always)]
    fn widen_bf16(halves: Self::Halves) -> Self::Lanes {
        halves.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    /// In integers, which vectorises; a NaN keeps its upper bits and becomes quiet.
    #[inline(always)]
    fn narrow_bf16(lanes: Self::Lanes) -> Self::Halves {
        lanes.map(|value| {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            ((if value.is_nan() { bits | 0x0040_0000 } else { rounded }) >> 16) as u16
        })
    }

    #[inline(always)]
    fn fence() {}

    #[inline(always)]
    fn prefetch(_address: *const u8) {}
}

/// Exact. Without branches, so that it vectorises: the crate `half` asks for processor features at every element.
#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    // The exponent is 112 too small when the bits are moved into place; the product makes up for it, for subnormals too.
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let is_infinite_or_nan = half & 0x7c00 == 0x7c00;
    let exponent = if is_infinite_or_nan { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | exponent | u32::from(half & 0x8000) << 16)
}

/// To nearest, ties to even; a NaN keeps its upper bits and becomes quiet. Without branches, as [`f16_to_f32`].
#[inline(always)]
fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits() & 0x7fff_ffff;
    let magnitude = f32::from_bits(bits);
    // Below 2^-14 halves are spaced 2^-24: so are f32 from 0.5 on, and the sum rounds as a store would.
    let subnormal = (magnitude + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (bits >> 13) & 1;
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let nan = 0x7e00 | (bits >> 13) & 0x3ff;
    let rounded = if magnitude < 6.103_515_6e-5 { subnormal } else { normal };
    // From halfway between the largest half and the next power of two on, infinity is nearer.
    let finite = if magnitude < 65520.0 { rounded } else { 0x7c00 };
    let unsigned = if magnitude.is_nan() { nan } else { finite };
    unsigned as u16 | (value.to_bits() >> 16) as u16 & 0x8000
}
