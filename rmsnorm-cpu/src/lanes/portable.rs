//! What the compilation target guarantees (SSE2 on x86-64, NEON on aarch64), by loops that the compiler vectorises.

use super::{LANES, Simd};

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
    fn store(to: &mut [f32; LANES], lanes: Self::Lanes) {
        *to = lanes;
    }

    #[inline(always)]
    fn stream(to: &mut [f32; LANES], lanes: Self::Lanes) {
        *to = lanes;
    }

    #[inline(always)]
    fn load_halves(from: &[u16; LANES]) -> Self::Halves {
        *from
    }

    #[inline(always)]
    fn store_halves(to: &mut [u16; LANES], halves: Self::Halves) {
        *to = halves;
    }

    #[inline(always)]
    fn stream_halves(to: &mut [u16; LANES], halves: Self::Halves) {
        *to = halves;
    }

    #[inline(always)]
    fn widen_f16(halves: Self::Halves) -> Self::Lanes {
        halves.map(|bits| rmsnorm_spec::f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn narrow_f16(lanes: Self::Lanes) -> Self::Halves {
        lanes.map(|value| rmsnorm_spec::f16::from_f32(value).to_bits())
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
