//! The values of tensors: a fixed pattern, so that the check knows every input element without a
//! download.

use rmsnorm_core::conformance::testing::{Bits, value};
use rmsnorm_core::{DType, Element, bf16, f16};

/// The period of the pattern, in elements. It is a prime: no row length divides it, so rows differ.
const PERIOD: usize = 1_048_583;

/// The test kit's values. They vary, since constant tensors could favour one branch or hide the
/// cost of subnormals.
///
/// Every tensor repeats the pattern, beginning at a different element.
#[derive(Clone, Debug)]
pub(super) struct Pattern(Bits);

impl Pattern {
    pub(super) fn new(dtype: DType) -> Self {
        Pattern(values(dtype, 0, 0..PERIOD))
    }

    /// The period of a tensor with `len` elements: all of it if it is shorter than a period.
    pub(super) fn period(&self, tensor: usize, len: usize) -> Bits {
        self.tensor(tensor, len.min(PERIOD))
    }

    /// The tensor of this number, with `len` elements.
    pub(super) fn tensor(&self, tensor: usize, len: usize) -> Bits {
        let bits = self.0.bits.iter().cycle().skip(first(tensor)).take(len).copied().collect();
        Bits { storage: self.0.storage, bits }
    }

    /// An element of the tensor of this number.
    pub(super) fn value(&self, tensor: usize, index: usize) -> f64 {
        self.0.value((first(tensor) + index) % PERIOD)
    }
}

/// The test kit's values at these indices; each seed has different values.
pub(super) fn values(dtype: DType, seed: u64, places: impl Iterator<Item = usize>) -> Bits {
    fn of<E: Element>(seed: u64, places: impl Iterator<Item = usize>) -> Bits {
        Bits::of(&places.map(|place| value::<E>(seed, place)).collect::<Vec<_>>())
    }
    match dtype {
        DType::F32 => of::<f32>(seed, places),
        DType::F16 => of::<f16>(seed, places),
        DType::Bf16 => of::<bf16>(seed, places),
    }
}

/// The element of the pattern at which a tensor begins. Tensors with successive numbers begin far
/// apart.
const fn first(tensor: usize) -> usize {
    tensor * 104_729 % PERIOD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_what_value_says_and_differ() {
        let pattern = Pattern::new(DType::Bf16);
        let (a, b) = (pattern.tensor(1, 2 * PERIOD + 5), pattern.tensor(2, 100));
        for index in [0, 1, 99, PERIOD - 1, PERIOD, 2 * PERIOD + 4] {
            assert_eq!(a.value(index), pattern.value(1, index));
        }
        assert_eq!(a.bits.len(), 2 * PERIOD + 5);
        assert_ne!(a.bits[..100], b.bits);
        assert!(a.values().iter().all(|value| value.abs() <= 2.0));
        let period = pattern.period(1, a.bits.len()).bits;
        assert!(a.bits.chunks(period.len()).all(|repeated| *repeated == period[..repeated.len()]));
        assert_eq!(pattern.period(2, 100), b);
    }
}
