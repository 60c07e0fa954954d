//! exp and the activations of gates: math.md, section 11. Only operations that round the same on
//! every instruction set, so that the bits are the same, too.

use rmsnorm_spec::Activation;

use super::Simd;

/// ln 2 in two parts. The first has 16 bits, so that its product with a power's exponent is exact.
const LN_2: [f32; 2] = [f32::from_bits(0x3f31_7200), f32::from_bits(0x35bf_be8e)];

/// `(e^r - 1 - r) / r^2` as a polynomial, from the highest power down.
const TAIL: [f32; 5] = [0.001_403_604_9, 0.008_372_285, 0.041_665_55, 0.166_664_88, 0.5];

/// The sum of this and an integer below 2^22 has the integer in its lowest bits.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// `e^x`. Overflow gives infinity; NaN stays NaN.
#[inline(always)]
fn exp<S: Simd>(x: S::Lanes) -> S::Lanes {
    // Beyond these, results are 0 and infinity.
    let x = S::clamp(x, -104.0, 89.0);
    let n = rounded::<S>(times::<S>(x, std::f32::consts::LOG2_E));
    let r = S::sub(S::sub(x, times::<S>(n, LN_2[0])), times::<S>(n, LN_2[1]));
    let mut tail = S::splat(TAIL[0]);
    for coefficient in &TAIL[1..] {
        tail = S::add(S::mul(tail, r), S::splat(*coefficient));
    }
    let power = S::add(S::splat(1.0), S::add(r, S::mul(S::mul(r, r), tail)));
    S::scale(power, n)
}

/// Not a closure, because that is compiled without the instruction set.
#[inline(always)]
fn times<S: Simd>(values: S::Lanes, factor: f32) -> S::Lanes {
    S::mul(values, S::splat(factor))
}

/// The nearest integers.
#[inline(always)]
fn rounded<S: Simd>(values: S::Lanes) -> S::Lanes {
    S::sub(S::add(values, S::splat(MAGIC)), S::splat(MAGIC))
}

/// sigmoid(z) and sigmoid(-z).
#[inline(always)]
fn sigmoids<S: Simd>(z: S::Lanes) -> [S::Lanes; 2] {
    let one = S::splat(1.0);
    // Of -|z|, so that nothing overflows and small results keep their digits. A NaN keeps its sign,
    // because the product of two different NaN depends on the order of operands.
    let small = exp::<S>(S::select_negative(z, z, S::sub(S::splat(0.0), z)));
    let sum = S::add(one, small);
    [S::div(S::select_negative(z, small, one), sum), S::div(S::select_negative(z, one, small), sum)]
}

/// act(z) of equation (19) and its slope.
#[inline(always)]
pub(crate) fn activate<S: Simd>(activation: Activation, z: S::Lanes) -> [S::Lanes; 2] {
    let [sigmoid, opposite] = sigmoids::<S>(z);
    match activation {
        Activation::Silu => [S::mul(z, sigmoid), S::mul(sigmoid, S::add(S::splat(1.0), S::mul(z, opposite)))],
        Activation::Sigmoid => [sigmoid, S::mul(sigmoid, opposite)],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rmsnorm_conformance::testing::swept;

    use super::*;
    use crate::lanes::{self, Full, LANES, Mix, Out};
    use crate::stages::Stage;
    use crate::{Isa, kernel};

    const U: f64 = 1.0 / (1u64 << 24) as f64;
    const LEAST: f64 = f32::from_bits(1) as f64;

    /// The values of all functions here, for neighbours.
    struct Table {
        x: Vec<f32>,
        /// exp, sigmoid, its slope, silu, its slope.
        results: [Vec<f32>; 5],
    }

    impl Stage for Table {
        #[inline(always)]
        fn run<S: Simd, M: Mix>(&mut self) {
            for (i, x) in self.x.as_chunks::<LANES>().0.iter().enumerate() {
                let x = S::load(x);
                let [sigmoid, sigmoid_slope] = activate::<S>(Activation::Sigmoid, x);
                let [silu, silu_slope] = activate::<S>(Activation::Silu, x);
                let all = [exp::<S>(x), sigmoid, sigmoid_slope, silu, silu_slope];
                for (to, lanes) in self.results.iter_mut().zip(all) {
                    lanes::store::<S, f32, _>(&mut Out::from(to.as_mut_slice()), Full { start: i * LANES }, lanes);
                }
            }
        }
    }

    impl Table {
        fn new(isa: Isa, x: &[f32]) -> Self {
            let mut table = Table { x: x.to_vec(), results: [(); 5].map(|()| vec![0.0; x.len()]) };
            kernel::any(isa, &mut table);
            table
        }

        fn bits(&self) -> Vec<u32> {
            // Which NaN it is may depend on the order of operands.
            self.results.iter().flatten().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
        }
    }

    /// The results in f64, and the bounds of math.md, section 11.
    fn expected(z: f64) -> [(f64, f64); 5] {
        let (exp, small) = (z.exp(), (-z.abs()).exp());
        let [low, high] = [small / (1.0 + small), 1.0 / (1.0 + small)];
        let [s, t] = if z < 0.0 { [low, high] } else { [high, low] };
        let slope = s * (1.0 + z * t);
        [
            (exp, 1.7 * U * exp + LEAST / 2.0),
            (s, if z < 0.0 { 3.7 } else { 2.4 } * U * s + LEAST),
            (s * t, 7.1 * U * s * t + 2.0 * LEAST),
            (z * s, 4.7 * U * (z * s).abs() + 128.0 * LEAST),
            (slope, U * (5.7 * slope.abs() + 4.7 * (z * s * t).abs()) + 256.0 * LEAST),
        ]
    }

    /// Neighbours: all f32 with the upper 22 bits of `chunk`.
    fn neighbours(chunk: u32) -> Vec<f32> {
        (chunk << 10..=chunk << 10 | 0x3ff).map(f32::from_bits).collect()
    }

    /// Neighbours of the limits of overflow, of subnormal results and of the ranges of powers of
    /// two: the same number of f32 on either side.
    fn about_limits() -> impl Iterator<Item = Vec<f32>> {
        let powers = (-151i16..130).map(|n| (f32::from(n) + 0.5) * std::f32::consts::LN_2);
        let limits = [88.722_84, 89.0, -87.336_55, -103.278_93, -103.972_08, -104.0, -1.278_46];
        let about = |x: f32| (x.to_bits() - 512..x.to_bits() + 512).map(f32::from_bits).collect();
        powers.chain(limits).map(about)
    }

    #[test]
    fn results_are_within_their_bounds_and_equal_on_every_instruction_set() {
        let all: Vec<u32> = (0..1 << 22).collect();
        // The first chunk of each exponent is always taken.
        let chunks: BTreeSet<u32> = swept(&all, 16_001, |chunk| chunk >> 13).into_iter().collect();
        for x in chunks.into_iter().map(neighbours).chain(about_limits()) {
            let table = Table::new(Isa::Portable, &x);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert!(table.bits() == Table::new(isa, &x).bits(), "{isa} near {}", x[0]);
            }
            for (i, &x) in x.iter().enumerate() {
                for (which, (value, bound)) in expected(f64::from(x)).into_iter().enumerate() {
                    let got = f64::from(table.results[which][i]);
                    let is_right = match (value.is_finite(), got.is_finite()) {
                        (true, true) => (got - value).abs() <= bound,
                        // Half way to the neighbour that the largest f32 would have.
                        (true, false) => got == f64::INFINITY && value + bound >= f64::from(f32::MAX) * (1.0 + U / 2.0),
                        (false, _) => got == value || value.is_nan() && got.is_nan(),
                    };
                    assert!(is_right, "function {which} of {x:e}: {got:e}, not {value:e}");
                }
            }
            let exp = &table.results[0];
            for pair in exp.windows(2) {
                let is_ordered = if x[0].is_sign_negative() { pair[0] >= pair[1] } else { pair[0] <= pair[1] };
                assert!(is_ordered || pair[1].is_nan(), "exp near {:e} is not monotone: {pair:?}", x[0]);
            }
        }
    }
}
