//! 32 results as 32 codes: math.md (Q5), by the integers of a result and one addition that rounds.

use rmsnorm_spec::quant::CodeType;

use super::{ALIGNMENT, LANES, Out, Piece, Simd, Stores};

/// A format of floating point with 8 bits, as conversions need it. The same numbers are in `rmsnorm_spec::quant`, whose conversion
/// every lane is compared with. Data, so that a stage body has the conversion once.
#[derive(Clone, Copy)]
pub(crate) struct Float8 {
    /// Bits of an f32's significand that a code has not.
    pub(super) shift: u32,
    /// The bits of the smallest f32 that is a normal code.
    pub(super) min_normal: u32,
    /// What the exponent is too large by, in a code's place.
    pub(super) offset: u32,
    /// The bits of the largest code's value.
    pub(super) largest: u32,
    /// Its last bit is the smallest code: added to less than a normal code it rounds to codes.
    pub(super) magic: f32,
}

/// OCP's E4M3.
const E4M3: Float8 =
    Float8 { shift: 20, min_normal: 0x3c80_0000, offset: 120 << 3, largest: 0x43e0_0000, magic: 16384.0 };

/// OCP's E5M2.
const E5M2: Float8 =
    Float8 { shift: 21, min_normal: 0x3880_0000, offset: 112 << 2, largest: 0x4760_0000, magic: 128.0 };

/// What NaN becomes.
pub(super) const NAN: u32 = 0x7f;

/// (Q5), of results that were divided by their scale.
#[inline(always)]
pub(super) fn encode<S: Simd>(quotients: S::Lanes, codes: CodeType) -> S::Bytes {
    let format = match codes {
        CodeType::E4m3 => &E4M3,
        CodeType::E5m2 => &E5M2,
        CodeType::Int8 => return S::encode_int8(quotients),
    };
    S::encode_float(quotients, format)
}

/// Converts 32 results that were divided by their scale.
#[inline(always)]
pub(crate) fn encode_into<S: Simd>(to: &mut [u8; LANES], quotients: S::Lanes, codes: CodeType) {
    S::store_bytes(Out::from(&mut to[..]).group(0), encode::<S>(quotients, codes));
}

/// Converts results that were divided by their scale, and stores those within the piece; past the cache as
/// [`store_or_stream`](super::store_or_stream) does, by halves of a cache line.
#[inline(always)]
pub(crate) fn store_codes<S: Simd, P: Piece>(
    to: &mut Out<'_, u8>,
    piece: P,
    quotients: S::Lanes,
    codes: CodeType,
    stores: Stores<'_>,
) {
    let bytes = encode::<S>(quotients, codes);
    let address = to.address().wrapping_add(piece.start());
    if !P::IS_FULL {
        let mut all = [0; LANES];
        S::store_bytes(Out::from(&mut all[..]).group(0), bytes);
        to.part(piece.start(), piece.len()).copy_from_slice(&all[..piece.len()]);
    } else if stores.streaming && address.is_multiple_of(ALIGNMENT / 2) {
        // SAFETY:
        // - alignment: checked above;
        // - ordering: `stores` borrows a `Fenced`, which does not leave this thread and fences when it is dropped; no stage
        //   body forgets it.
        unsafe { S::stream_bytes(to.group(piece.start()), bytes) }
    } else {
        S::store_bytes(to.group(piece.start()), bytes);
    }
}
