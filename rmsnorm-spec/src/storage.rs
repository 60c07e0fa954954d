//! The storage of tensor elements, at run time ([`Storage`]) and at compile time ([`AnyElement`]): the
//! dtypes of [`Element`](crate::Element), the codes of [`quant`](crate::quant), and E8M0 scales,
//! which are bytes.

use std::fmt;

use crate::quant::{CodeType, ScaleType};
use crate::{AnyIn, AnyOut, DType, NormBackend, bf16, f16};

pub use float8::{F8E4M3, F8E5M2};

/// The storage of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Storage {
    /// Floats.
    Float(DType),
    /// 8-bit codes of quantized results.
    Code(CodeType),
    /// Powers of two as bytes, `127 + exponent`: MX scales.
    E8m0,
}

impl Storage {
    /// Size of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Storage::Float(dtype) => dtype.size(),
            Storage::Code(_) | Storage::E8m0 => 1,
        }
    }

    /// The name used in errors, test names and files: the name of the dtype or the codes, or
    /// `e8m0`.
    pub const fn name(self) -> &'static str {
        match self {
            Storage::Float(dtype) => dtype.name(),
            Storage::Code(codes) => codes.name(),
            Storage::E8m0 => "e8m0",
        }
    }

    /// The storage of scales of that type.
    pub const fn of_scales(scales: ScaleType) -> Self {
        match scales {
            ScaleType::F32 => Storage::Float(DType::F32),
            ScaleType::E8m0 => Storage::E8m0,
        }
    }

    /// The dtype, for floats.
    pub const fn float(self) -> Option<DType> {
        match self {
            Storage::Float(dtype) => Some(dtype),
            Storage::Code(_) | Storage::E8m0 => None,
        }
    }
}

impl From<DType> for Storage {
    fn from(dtype: DType) -> Self {
        Storage::Float(dtype)
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of a tensor's elements, for views.
///
/// Sealed, as [`Element`](crate::Element): kernels exist for these types only.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an element type of tensors",
    label = "must be f32, f16, bf16, F8E4M3, F8E5M2, i8 or u8"
)]
pub trait AnyElement: sealed::Sealed + bytemuck::Pod + fmt::Debug + Send + Sync + 'static {
    /// The same type, as data.
    const STORAGE: Storage;

    /// The bit pattern, zero-extended.
    fn bits(self) -> u32;

    /// The value with that bit pattern; bits above the type's width are ignored.
    fn from_bits(bits: u32) -> Self;

    /// A view that says its type.
    fn any_in<B: NormBackend + ?Sized>(view: B::In<'_, Self>) -> AnyIn<'_, B>;

    /// A view that says its type.
    fn any_out<B: NormBackend + ?Sized>(view: B::Out<'_, Self>) -> AnyOut<'_, B>;

    /// The view, if it is of this type.
    fn in_of<B: NormBackend + ?Sized>(view: AnyIn<'_, B>) -> Option<B::In<'_, Self>>;

    /// The view, if it is of this type.
    fn out_of<B: NormBackend + ?Sized>(view: AnyOut<'_, B>) -> Option<B::Out<'_, Self>>;
}

/// The type of codes: [`F8E4M3`], [`F8E5M2`] or [`i8`].
///
/// The types name bytes; candle and cudarc use the same types. [`CodeType`] converts values.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a type of codes", label = "must be F8E4M3, F8E5M2 or i8")]
pub trait Code: AnyElement {
    /// The same type, as data.
    const CODES: CodeType;
}

macro_rules! stored {
    ($($type:ty: $any:ident, $storage:expr, $bits:expr, $from_bits:expr;)*) => {
        $(impl AnyElement for $type {
            const STORAGE: Storage = $storage;
            fn bits(self) -> u32 {
                u32::from($bits(self))
            }
            fn from_bits(bits: u32) -> Self {
                let [low, high, _, _] = bits.to_le_bytes();
                $from_bits(bits, u16::from_le_bytes([low, high]), low)
            }
            fn any_in<B: NormBackend + ?Sized>(view: B::In<'_, Self>) -> AnyIn<'_, B> {
                AnyIn::$any(view)
            }
            fn any_out<B: NormBackend + ?Sized>(view: B::Out<'_, Self>) -> AnyOut<'_, B> {
                AnyOut::$any(view)
            }
            fn in_of<B: NormBackend + ?Sized>(view: AnyIn<'_, B>) -> Option<B::In<'_, Self>> {
                if let AnyIn::$any(view) = view { Some(view) } else { None }
            }
            fn out_of<B: NormBackend + ?Sized>(view: AnyOut<'_, B>) -> Option<B::Out<'_, Self>> {
                if let AnyOut::$any(view) = view { Some(view) } else { None }
            }
        }
        impl sealed::Sealed for $type {})*
    };
}

stored! {
    f32: F32, Storage::Float(DType::F32), f32::to_bits, |bits, _, _| f32::from_bits(bits);
    f16: F16, Storage::Float(DType::F16), f16::to_bits, |_, bits, _| f16::from_bits(bits);
    bf16: Bf16, Storage::Float(DType::Bf16), bf16::to_bits, |_, bits, _| bf16::from_bits(bits);
    F8E4M3: E4m3, Storage::Code(CodeType::E4m3), |code: F8E4M3| code.to_bits(), |_, _, bits| F8E4M3::from_bits(bits);
    F8E5M2: E5m2, Storage::Code(CodeType::E5m2), |code: F8E5M2| code.to_bits(), |_, _, bits| F8E5M2::from_bits(bits);
    i8: Int8, Storage::Code(CodeType::Int8), i8::cast_unsigned, |_, _, bits: u8| bits.cast_signed();
    u8: E8m0, Storage::E8m0, u8::from, |_, _, bits| bits;
}

macro_rules! code {
    ($($type:ty: $codes:expr;)*) => {
        $(impl Code for $type {
            const CODES: CodeType = $codes;
        })*
    };
}

code! {
    F8E4M3: CodeType::E4m3;
    F8E5M2: CodeType::E5m2;
    i8: CodeType::Int8;
}

mod sealed {
    pub trait Sealed {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_storage_and_its_bits() {
        fn check<E: AnyElement>(storage: Storage, name: &str, one: u32) {
            assert_eq!((E::STORAGE, storage.name(), storage.size()), (storage, name, size_of::<E>()));
            // Bits above the width of the type are ignored.
            let above = if size_of::<E>() == 4 { 0 } else { 0xabcd_0000 };
            assert_eq!(E::from_bits(one | above).bits(), one, "{name}");
            assert_eq!(storage.to_string(), name);
        }
        for dtype in DType::ALL {
            assert_eq!((Storage::from(dtype).float(), Storage::from(dtype).name()), (Some(dtype), dtype.name()));
        }
        check::<f32>(Storage::Float(DType::F32), "f32", 0x3fc0_0000);
        check::<f16>(Storage::Float(DType::F16), "f16", 0x3e00);
        check::<bf16>(Storage::Float(DType::Bf16), "bf16", 0x3fc0);
        check::<F8E4M3>(Storage::Code(CodeType::E4m3), "e4m3", 0xb9);
        check::<F8E5M2>(Storage::Code(CodeType::E5m2), "e5m2", 0xbd);
        check::<i8>(Storage::Code(CodeType::Int8), "int8", 0x83);
        check::<u8>(Storage::E8m0, "e8m0", 0xfe);
        assert_eq!([Storage::Code(CodeType::E4m3).float(), Storage::E8m0.float()], [None; 2]);
    }

    /// The types have the formats of this crate's conversions.
    #[test]
    fn codes_of_a_type_are_those_of_its_format() {
        fn check<C: Code>(value: impl Fn(C) -> f32) {
            for code in 0..=u32::from(u8::MAX) {
                let (got, expected) = (value(C::from_bits(code)), C::CODES.decode(code as u8));
                assert!(got == expected || got.is_nan() && expected.is_nan(), "{code:#x} in {}: {got}", C::CODES);
            }
            assert_eq!(C::STORAGE, Storage::Code(C::CODES));
        }
        check::<F8E4M3>(|code| code.to_f32());
        check::<F8E5M2>(|code| code.to_f32());
        check::<i8>(f32::from);
    }
}
