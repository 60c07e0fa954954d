//! The element types of tensors, at run time ([`DType`], [`DTypes`] for a call) and at compile time
//! ([`Element`]).
//!
//! This is the only list of dtypes in Rust. No `match` on [`DType`] in the workspace has a wildcard
//! arm, so a new dtype breaks the build at every place that needs work.

use std::fmt;

use crate::{AnyElement, Error};

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

/// The three dtypes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DTypes {
    /// `T`: y, dy, a gate, and also x and dx, unless [`Forward::cast`](crate::Forward::cast) and
    /// [`Backward::cast`](crate::Backward::cast) give these the dtype `R`.
    pub activation: DType,
    /// `W`: weight, bias, dweight and dbias.
    pub weight: DType,
    /// `R`: the residual stream: residual, residual_out, dresidual_out, dresidual and backward's x.
    pub residual: DType,
}

impl DTypes {
    /// The valid mixes, for which kernels exist: the weight and the residual stream each have the
    /// activations' dtype or f32.
    pub const ALL: [DTypes; 9] = [
        DTypes::uniform(DType::F32),
        DTypes::uniform(DType::F16),
        DTypes::uniform(DType::F16).widened(false, true),
        DTypes::uniform(DType::F16).widened(true, false),
        DTypes::uniform(DType::F16).widened(true, true),
        DTypes::uniform(DType::Bf16),
        DTypes::uniform(DType::Bf16).widened(false, true),
        DTypes::uniform(DType::Bf16).widened(true, false),
        DTypes::uniform(DType::Bf16).widened(true, true),
    ];

    /// The mixes of calls whose y has another dtype than their x, which is of the residual stream:
    /// four of [`ALL`](Self::ALL), and two that no other call has.
    pub const CASTS: [DTypes; 6] = [
        DTypes::uniform(DType::F16).widened(false, true),
        DTypes::uniform(DType::F16).widened(true, true),
        DTypes::uniform(DType::Bf16).widened(false, true),
        DTypes::uniform(DType::Bf16).widened(true, true),
        DTypes { residual: DType::F16, ..DTypes::uniform(DType::F32) },
        DTypes { residual: DType::Bf16, ..DTypes::uniform(DType::F32) },
    ];

    /// All tensors of one dtype.
    pub const fn uniform(dtype: DType) -> Self {
        DTypes { activation: dtype, weight: dtype, residual: dtype }
    }

    /// With an f32 weight if `weight`, and an f32 residual stream if `residual`.
    pub const fn widened(self, weight: bool, residual: bool) -> Self {
        DTypes {
            activation: self.activation,
            weight: if weight { DType::F32 } else { self.weight },
            residual: if residual { DType::F32 } else { self.residual },
        }
    }

    /// The dtypes of three types, valid or not.
    pub const fn of<T: Element, W: Element, R: Element>() -> Self {
        DTypes { activation: T::DTYPE, weight: W::DTYPE, residual: R::DTYPE }
    }

    /// Checks that the mix is valid.
    ///
    /// # Errors
    /// `Unsupported` if the dtype of the weight or of the residual stream is neither f32 nor the
    /// activations'.
    pub fn check(self) -> Result<(), Error> {
        for (arg, dtype) in [("weight and bias", self.weight), ("the residual stream", self.residual)] {
            if dtype != self.activation && dtype != DType::F32 {
                let rule = format!("{arg} must be f32 or of the activations' dtype {}, got {dtype}", self.activation);
                return Err(Error::Unsupported { rule });
            }
        }
        Ok(())
    }

    /// Checks the mix of a call that adds nothing to the residual stream: the stream may then have
    /// 16 bits while the activations are f32.
    ///
    /// # Errors
    /// `Unsupported` if the weight has a dtype that [`check`](Self::check) refuses, or if x and y
    /// have two different dtypes of 16 bits.
    pub fn check_cast(self) -> Result<(), Error> {
        let DTypes { activation, residual, .. } = self;
        DTypes { residual: activation, ..self }.check()?;
        if [activation, DType::F32].contains(&residual) || activation == DType::F32 {
            return Ok(());
        }
        let rule = format!("x and y must have one dtype, or one of them f32, got x {residual} and y {activation}");
        Err(Error::Unsupported { rule })
    }
}

/// Prints activations, weight, residual stream: `bf16,f32,bf16`.
impl fmt::Display for DTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.activation, self.weight, self.residual)
    }
}

/// Runs `$body` with three names for the types of a valid mix of dtypes, such as the mix of a
/// [`Checked`](crate::Checked) call.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{DType, DTypes, with_types};
/// let dtypes = DTypes::uniform(DType::Bf16).widened(true, false);
/// let sizes = with_types!(dtypes; T, W, R => [size_of::<T>(), size_of::<W>(), size_of::<R>()]);
/// assert_eq!(sizes, [2, 4, 2]);
/// ```
#[macro_export]
macro_rules! with_types {
    ($dtypes:expr; $t:ident, $w:ident, $r:ident => $body:expr) => {{
        let dtypes: $crate::DTypes = $dtypes;
        let f32 = $crate::DType::F32;
        match (dtypes.activation, dtypes.weight == f32, dtypes.residual == f32) {
            ($crate::DType::F32, _, true) => $crate::with_types!(@ $t f32, $w f32, $r f32, $body),
            ($crate::DType::F32, _, false) if dtypes.residual == $crate::DType::F16 => {
                $crate::with_types!(@ $t f32, $w f32, $r $crate::f16, $body)
            }
            ($crate::DType::F32, _, false) => $crate::with_types!(@ $t f32, $w f32, $r $crate::bf16, $body),
            ($crate::DType::F16, false, false) => $crate::with_types!(@ $t $crate::f16, $w $crate::f16, $r $crate::f16, $body),
            ($crate::DType::F16, false, true) => $crate::with_types!(@ $t $crate::f16, $w $crate::f16, $r f32, $body),
            ($crate::DType::F16, true, false) => $crate::with_types!(@ $t $crate::f16, $w f32, $r $crate::f16, $body),
            ($crate::DType::F16, true, true) => $crate::with_types!(@ $t $crate::f16, $w f32, $r f32, $body),
            ($crate::DType::Bf16, false, false) => {
                $crate::with_types!(@ $t $crate::bf16, $w $crate::bf16, $r $crate::bf16, $body)
            }
            ($crate::DType::Bf16, false, true) => $crate::with_types!(@ $t $crate::bf16, $w $crate::bf16, $r f32, $body),
            ($crate::DType::Bf16, true, false) => $crate::with_types!(@ $t $crate::bf16, $w f32, $r $crate::bf16, $body),
            ($crate::DType::Bf16, true, true) => $crate::with_types!(@ $t $crate::bf16, $w f32, $r f32, $body),
        }
    }};
    (@ $t:ident $activation:ty, $w:ident $weight:ty, $r:ident $residual:ty, $body:expr) => {{
        type $t = $activation;
        type $w = $weight;
        type $r = $residual;
        $body
    }};
}

/// Runs `$body` with a name for the type of a dtype.
///
/// # Example
/// ```
/// # use rmsnorm_spec::{DType, with_type};
/// assert_eq!(with_type!(DType::Bf16; T => size_of::<T>()), 2);
/// ```
#[macro_export]
macro_rules! with_type {
    ($dtype:expr; $t:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => $crate::with_type!(@ $t f32, $body),
            $crate::DType::F16 => $crate::with_type!(@ $t $crate::f16, $body),
            $crate::DType::Bf16 => $crate::with_type!(@ $t $crate::bf16, $body),
        }
    };
    (@ $t:ident $type:ty, $body:expr) => {{
        type $t = $type;
        $body
    }};
}

/// The element type of a tensor, as a type: [`f32`], [`struct@f16`] or [`bf16`].
///
/// Sealed: kernels exist for these three types only.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a dtype of rmsnorm", label = "must be f32, f16 or bf16")]
pub trait Element: AnyElement + PartialEq + Default {
    /// The same type, as data.
    const DTYPE: DType;

    /// The exact value in f32.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even; overflow gives an infinity, NaN stays NaN.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
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
        }
    };
}
sixteen_bit_element!(f16, DType::F16);
sixteen_bit_element!(bf16, DType::Bf16);

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
        // 1.5 in each format.
        let bits =
            (AnyElement::bits(1.5f32), AnyElement::bits(f16::from_f32(1.5)), AnyElement::bits(bf16::from_f32(1.5)));
        assert_eq!(bits, (0x3fc0_0000, 0x3e00, 0x3fc0));
        assert_eq!((Element::to_f32(-2.5f32), <f32 as Element>::from_f32(1.5)), (-2.5, 1.5));
        let halves = (<f16 as Element>::from_f32(1e6), <bf16 as Element>::from_f32(1.0 + 1.0 / 256.0));
        assert_eq!(halves, (f16::INFINITY, bf16::ONE), "overflow gives infinity, a tie the even neighbour");
    }

    /// A valid mix becomes its types; other mixes are refused.
    #[test]
    fn every_valid_mix_comes_with_its_types_and_no_other() {
        let names = |dtypes| crate::with_types!(dtypes; T, W, R => DTypes::of::<T, W, R>());
        for activation in DType::ALL {
            for weight in DType::ALL {
                for residual in DType::ALL {
                    let dtypes = DTypes { activation, weight, residual };
                    let is_valid = [weight, residual].iter().all(|d| [activation, DType::F32].contains(d));
                    assert_eq!(dtypes.check().ok().map(|()| names(dtypes)), is_valid.then_some(dtypes), "{dtypes}");
                    assert_eq!(DTypes::ALL.contains(&dtypes), is_valid, "{dtypes}");
                    // With another dtype of x, one of x and y is f32.
                    let is_cast = activation != residual && [activation, residual].contains(&DType::F32);
                    let is_valid = [activation, DType::F32].contains(&weight) && (is_cast || activation == residual);
                    assert_eq!(
                        dtypes.check_cast().ok().map(|()| names(dtypes)),
                        is_valid.then_some(dtypes),
                        "{dtypes}"
                    );
                    assert_eq!(DTypes::CASTS.contains(&dtypes), is_valid && is_cast, "{dtypes}");
                }
            }
        }
        let mixed = DTypes::uniform(DType::F16).widened(true, false);
        assert_eq!(mixed.to_string(), "f16,f32,f16");
    }
}
