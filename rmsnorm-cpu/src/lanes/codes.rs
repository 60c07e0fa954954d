//! Conversion of 32 results to 32 codes: math.md (Q5). Normal codes use integer arithmetic,
//! subnormal ones an addition that rounds.

use rmsnorm_spec::quant::CodeType;

use super::{ALIGNMENT, LANES, Out, Piece, Simd, Stores};

/// An 8-bit floating-point format, as conversions need it. `rmsnorm_spec::quant` has the same
/// numbers, and tests compare every lane with its conversion. The format is data, so that a stage
/// body contains the conversion once.
#[derive(Clone, Copy)]
pub(crate) struct Float8 {
    /// Bits of an f32's significand that a code drops.
    pub(super) shift: u32,
    /// The bits of the smallest f32 that is a normal code.
    pub(super) min_normal: u32,
    /// The excess of the exponent, at its place in a code.
    pub(super) offset: u32,
    /// The bits of the largest code's value.
    pub(super) largest: u32,
    /// A number with a last bit equal to the smallest code. Adding it to a value below the smallest
    /// normal code rounds the value to a code.
    pub(super) magic: f32,
}

/// OCP's E4M3.
const E4M3: Float8 =
    Float8 { shift: 20, min_normal: 0x3c80_0000, offset: 120 << 3, largest: 0x43e0_0000, magic: 16384.0 };

/// OCP's E5M2.
const E5M2: Float8 =
    Float8 { shift: 21, min_normal: 0x3880_0000, offset: 112 << 2, largest: 0x4760_0000, magic: 128.0 };

/// The code of NaN.
pub(super) const NAN: u32 = 0x7f;

/// Equation (Q5), for results divided by their scale.
#[inline(always)]
pub(super) fn encode<S: Simd>(quotients: S::Lanes, codes: CodeType) -> S::Bytes {
    let format = match codes {
        CodeType::E4m3 => &E4M3,
        CodeType::E5m2 => &E5M2,
        CodeType::Int8 => return S::encode_int8(quotients),
    };
    S::encode_float(quotients, format)
}

/// Converts 32 results divided by their scale.
#[inline(always)]
pub(crate) fn encode_into<S: Simd>(to: &mut [u8; LANES], quotients: S::Lanes, codes: CodeType) {
    // SAFETY:
    // - through the cache there are no obligations.
    unsafe { S::store_bytes::<false>(Out::from(&mut to[..]).group(0), encode::<S>(quotients, codes)) }
}

/// Converts results divided by their scale, and stores those inside the piece. Stores past the
/// cache work as in [`store_or_stream`](super::store_or_stream), with half a cache line per piece.
#[inline(always)]
pub(crate) fn store_codes<S: Simd, P: Piece>(
    to: &mut Out<'_, u8>,
    piece: P,
    quotients: S::Lanes,
    codes: CodeType,
    stores: Stores<'_>,
) {
    let bytes = encode::<S>(quotients, codes);
    let is_aligned = to.address().wrapping_add(piece.start()).is_multiple_of(ALIGNMENT / 2);
    // SAFETY:
    // - alignment: `is_aligned` where the store is past the cache;
    // - ordering: `stores` borrows a `Fenced`, which does not leave this thread and fences when it is dropped; no stage
    //   body forgets it.
    unsafe {
        if !P::IS_FULL {
            let mut all = [0; LANES];
            S::store_bytes::<false>(Out::from(&mut all[..]).group(0), bytes);
            to.part(piece.start(), piece.len()).copy_from_slice(&all[..piece.len()]);
        } else if stores.streaming && is_aligned {
            S::store_bytes::<true>(to.group(piece.start()), bytes);
        } else {
            S::store_bytes::<false>(to.group(piece.start()), bytes);
        }
    }
}
