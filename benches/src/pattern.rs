//! The values of tensors: a fixed pattern, so that the judge knows any element without asking the device for it.

use rmsnorm_core::Element;
use rmsnorm_core::conformance::testing::values;

/// Elements until the pattern repeats. A prime: no row length divides it, so rows differ.
const PERIOD: usize = 1_048_583;

/// The test kit's values: a constant tensor would flatter a branch or a denormal.
///
/// Every tensor is the pattern from an element of its own on, again and again.
#[derive(Clone, Debug)]
pub(super) struct Pattern<T>(Vec<T>);

impl<T: Element> Pattern<T> {
    pub(super) fn new() -> Self {
        Pattern(values(0, PERIOD))
    }

    /// What repeats in the tensor of that number; less if it has fewer elements than that.
    pub(super) fn period(&self, tensor: usize, len: usize) -> Vec<T> {
        self.tensor(tensor, len.min(PERIOD))
    }

    /// The tensor of that number, with this many elements.
    pub(super) fn tensor(&self, tensor: usize, len: usize) -> Vec<T> {
        let mut elements = Vec::with_capacity(len);
        let mut start = first(tensor);
        while elements.len() < len {
            let end = PERIOD.min(start + len - elements.len());
            elements.extend_from_slice(&self.0[start..end]);
            start = 0;
        }
        elements
    }

    /// An element of that tensor.
    pub(super) fn value(&self, tensor: usize, index: usize) -> f64 {
        f64::from(self.0[(first(tensor) + index) % PERIOD].to_f32())
    }
}

/// Where in the pattern a tensor begins; far apart for neighbours.
const fn first(tensor: usize) -> usize {
    tensor * 104_729 % PERIOD
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_core::bf16;

    #[test]
    fn tensors_are_what_value_says_and_differ() {
        let pattern = Pattern::<bf16>::new();
        let (a, b) = (pattern.tensor(1, 2 * PERIOD + 5), pattern.tensor(2, 100));
        for index in [0, 1, 99, PERIOD - 1, PERIOD, 2 * PERIOD + 4] {
            assert_eq!(f64::from(a[index].to_f32()), pattern.value(1, index));
        }
        assert_eq!(a.len(), 2 * PERIOD + 5);
        assert_ne!(a[..100], b[..]);
        assert!(a.iter().all(|value| value.to_f32().abs() <= 2.0));
        let period = pattern.period(1, a.len());
        assert!(a.chunks(period.len()).all(|repeated| *repeated == period[..repeated.len()]));
        assert_eq!(pattern.period(2, 100), b);
    }
}
