//! A generator of values. A value depends only on its seed and index, so each one can be recomputed
//! alone.

use rmsnorm_spec::{Element, Tensor};

/// One step of splitmix64.
pub fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 64 random bits for the element `index`: splitmix64, moved to that position.
pub fn bits(seed: u64, index: usize) -> u64 {
    splitmix(splitmix(seed).wrapping_add(index as u64))
}

/// 64 random bits for an element of a tensor.
pub(crate) fn draw(seed: u64, tensor: Tensor, index: usize) -> u64 {
    bits(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ tensor as u64, index)
}

/// Element `index` of the [`values`] of a seed.
pub fn value<E: Element>(seed: u64, index: usize) -> E {
    // Uses all 64 bits, so that an f32 near zero has as many significant bits as one near 2.
    let uniform = bits(seed, index) as i64 as f64 / (1u64 << 62) as f64;
    E::from_f32(uniform as f32)
}

/// `len` values between -2 and 2 without structure, different for each seed.
pub fn values<E: Element>(seed: u64, len: usize) -> Vec<E> {
    (0..len).map(|index| value(seed, index)).collect()
}

/// The exact values of elements, as input for the reference.
pub fn exact<E: Element>(elements: &[E]) -> Vec<f64> {
    elements.iter().map(|element| f64::from(element.to_f32())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_spec::bf16;

    #[test]
    fn splitmix_matches_its_published_first_outputs() {
        assert_eq!(splitmix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn values_are_the_same_every_time_and_others_for_each_seed() {
        let first = values::<bf16>(1, 100);
        assert_eq!(first, values::<bf16>(1, 200)[..100]);
        assert_eq!(first[7], value(1, 7));
        assert_ne!(first, values::<bf16>(2, 100));
    }

    /// Uniform values have mean 0 and variance 4/3. Neighbouring elements and seeds are unrelated.
    #[test]
    fn values_are_uniform_and_unrelated() {
        let (one, two) = (exact(&values::<f32>(1, 100_000)), exact(&values::<f32>(2, 100_000)));
        let average = |products: &mut dyn Iterator<Item = f64>| products.sum::<f64>() / 100_000.0;
        assert!(one.iter().all(|value| value.abs() <= 2.0));
        assert!(one.iter().any(|value| value.abs() > 1.999) && one.iter().any(|value| value.abs() < 1e-3));
        for (what, got, expected) in [
            ("the mean", average(&mut one.iter().copied()), 0.0),
            ("the variance", average(&mut one.iter().map(|x| x * x)), 4.0 / 3.0),
            ("neighbours", average(&mut one.windows(2).map(|pair| pair[0] * pair[1])), 0.0),
            ("seeds", average(&mut one.iter().zip(&two).map(|(x, y)| x * y)), 0.0),
        ] {
            // For 100000 values, five standard deviations are at most 0.022.
            assert!((got - expected).abs() < 0.022, "{what}: {got}");
        }
    }
}
