//! The element types of tensors, at run time ([`DType`]) and at compile time ([`Element`]).
//!
//! This is the only list of dtypes in Rust. No `match` on [`DType`] in the workspace has a wildcard arm, so that a new
//! dtype breaks the build wherever work is due.

use std::fmt;

pub use half::{bf16, f16};

/// The element type of a tensor, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE binary32: 24 significant bits.
    F32,
    /// IEEE binary16: 11 significant bits, largest finite value 65504.
    F16,
    /// bfloat16: the upper half of a binary32, 8 significant bits.
    Bf16,
}

impl DType {
    /// Every dtype, in the order of declaration.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    /// Size of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// The name used in kernels, test names, bench ids and files: `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }

    /// The dtype of that [`name`](Self::name), if there is one.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The element type of a tensor, as a type: [`f32`], [`struct@f16`] or [`bf16`].
///
/// Sealed: kernels exist for these three only, and a foreign implementation could not be honoured.
#[diagnostic::on_unimplemented(
    message = "there are kernels for f32, f16 and bf16, and none for `{Self}`",
    label = "not an element type of rmsnorm"
)]
pub trait Element: sealed::Sealed + bytemuck::Pod + PartialEq + fmt::Debug + Default + Send + Sync + 'static {
    /// The same type, as data.
    const DTYPE: DType;

    /// The exact value in f32.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even; overflow gives an infinity, NaN stays NaN.
    fn from_f32(value: f32) -> Self;

    /// The bit pattern, zero-extended.
    fn bits(self) -> u32;

    /// The value with that bit pattern; bits above the type's width are ignored.
    fn from_bits(bits: u32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

macro_rules! sixteen_bit_element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
            fn to_f32(self) -> f32 {
                <$type>::to_f32(self)
            }
            fn from_f32(value: f32) -> Self {
                <$type>::from_f32(value)
            }
            fn bits(self) -> u32 {
                u32::from(self.to_bits())
            }
            fn from_bits(bits: u32) -> Self {
                let [low, high, _, _] = bits.to_le_bytes();
                <$type>::from_bits(u16::from_le_bytes([low, high]))
            }
        }
    };
}
sixteen_bit_element!(f16, DType::F16);
sixteen_bit_element!(bf16, DType::Bf16);

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files, reports and ids have these names.
    #[test]
    fn dtypes_have_their_names_sizes_and_bits() {
        let expected = [(DType::F32, "f32", 4), (DType::F16, "f16", 2), (DType::Bf16, "bf16", 2)];
        assert_eq!(DType::ALL.map(|dtype| (dtype, dtype.name(), dtype.size())), expected);
        for (dtype, name, _) in expected {
            assert_eq!((DType::from_name(name), dtype.to_string().as_str()), (Some(dtype), name));
        }
        assert_eq!((DType::from_name("F32"), DType::from_name("")), (None, None));
        assert_eq!((f32::DTYPE, f16::DTYPE, bf16::DTYPE), (DType::F32, DType::F16, DType::Bf16));
        // 1.5 in each format; what is above the width of a type is ignored.
        let bits = (Element::bits(1.5f32), Element::bits(f16::from_f32(1.5)), Element::bits(bf16::from_f32(1.5)));
        assert_eq!(bits, (0x3fc0_0000, 0x3e00, 0x3fc0));
        assert_eq!(<f16 as Element>::from_bits(0xabcd_3e00), f16::from_f32(1.5));
        assert_eq!(<bf16 as Element>::from_bits(0xabcd_3fc0), bf16::from_f32(1.5));
        let halves = (<f16 as Element>::from_f32(1e6), <bf16 as Element>::from_f32(1.0 + 1.0 / 256.0));
        assert_eq!(halves, (f16::INFINITY, bf16::ONE), "overflow gives infinity, a tie the even neighbour");
    }
}
