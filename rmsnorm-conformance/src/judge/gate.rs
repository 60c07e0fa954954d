//! The errors of a gate: [math](rmsnorm_spec::math), sections 5.6 and 11.3.

use rmsnorm_spec::reference::{activate, activation_slope, round_to};
use rmsnorm_spec::{Activation, DType, Gate};

use super::Expected;
use super::bounds::{TINY, overflows};
use crate::Arithmetic;

/// The gate of a call.
#[derive(Clone, Copy, Debug)]
pub struct Gated<'a> {
    /// Its activation and its place.
    pub gate: Gate,
    /// `z` of equation (19). (rows, cols)
    pub z: &'a [f64],
    /// The dtype that [`CastOrder::BeforeWeight`](rmsnorm_spec::CastOrder::BeforeWeight) rounds the
    /// norm to, before the gate multiplies it: the wider one of `y` and the weight.
    pub wide: DType,
}

impl Gated<'_> {
    /// The f32 products with `act(z)`: their exact values, and their errors.
    pub(crate) fn products(&self, values: &[f64], arithmetic: &Arithmetic) -> (Vec<f64>, Vec<f64>) {
        let product = |(value, z): (&f64, &f64)| {
            let factor = activated(self.gate.activation, *z, arithmetic);
            let Computed { value, error } = factor.times(Computed::given(*value, arithmetic), arithmetic);
            (value, error)
        };
        values.iter().zip(self.z).map(product).unzip()
    }

    /// The range of `y` before it is stored, from the range of the norm; `rounds` says whether the
    /// norm is rounded between.
    pub(crate) fn scale(&self, index: usize, norm: Expected, rounds: bool, arithmetic: &Arithmetic) -> Expected {
        let is_rounded = rounds && self.wide != DType::F32 && norm.reference.is_finite() && !norm.is_unbounded();
        let norm = if is_rounded {
            let (low, high) = norm.interval_with_flush(self.wide, arithmetic);
            Expected { reference: round_to(norm.reference, self.wide), low, high }
        } else {
            norm
        };
        activated(self.gate.activation, self.z[index], arithmetic).scale(norm, arithmetic)
    }
}

/// An f32 value: the exact value, and the largest error of the computed one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    pub value: f64,
    pub error: f64,
}

impl Computed {
    /// An input, which may be flushed to zero.
    pub fn given(value: f64, arithmetic: &Arithmetic) -> Computed {
        Computed { value, error: arithmetic.flush_loss(1.0) }
    }

    /// The f32 product. It has no bound if it may overflow, because it may be a factor itself.
    pub fn times(self, other: Computed, arithmetic: &Arithmetic) -> Computed {
        let (value, u) = (self.value * other.value, arithmetic.unit_roundoff);
        let inherited = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error;
        let error = inherited + u * (value.abs() + inherited) + TINY;
        let is_open = overflows(value.abs()) || [self.error, other.error].contains(&f64::INFINITY);
        Computed { value, error: if is_open { f64::INFINITY } else { error } }
    }

    /// The f32 sum with 1. `value` is the exact sum.
    fn plus_one(self, arithmetic: &Arithmetic) -> Computed {
        let value = 1.0 + self.value;
        Computed { value, error: self.error + arithmetic.unit_roundoff * (value.abs() + self.error) }
    }

    /// The range of an f32 product with a value in a range, before it is stored.
    pub fn scale(self, value: Expected, arithmetic: &Arithmetic) -> Expected {
        let reference = value.reference * self.value;
        let may_vanish = value.low <= 0.0 && value.high >= 0.0;
        let is_open = if self.value.is_finite() { self.error == f64::INFINITY } else { may_vanish };
        if value.is_unbounded() || is_open {
            return Expected::unbounded(reference);
        }
        if !reference.is_finite() {
            return Expected { reference, low: reference, high: reference };
        }
        let flushed = if value.low.abs().min(value.high.abs()) < TINY { arithmetic.flush_loss(1.0) } else { 0.0 };
        let factors = [self.value - self.error, self.value + self.error];
        let ends = [value.low - flushed, value.high + flushed].map(|end| factors.map(|factor| end * factor));
        let ends = ends.as_flattened();
        let low = ends.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Expected { reference, low, high }.rounded(arithmetic.unit_roundoff)
    }
}

/// `sigmoid(z)`, from `exp(-|z|)`.
fn sigmoid(z: f64, arithmetic: &Arithmetic) -> Computed {
    let value = activate(Activation::Sigmoid, z);
    let of_exp = activate(Activation::Sigmoid, -z) * (arithmetic.exp_error)(z.abs());
    // At an infinite z the exp is exact, and its relative error may not be finite.
    if z.is_infinite() {
        return Computed { value, error: TINY };
    }
    Computed { value, error: value * (of_exp + arithmetic.unit_roundoff + arithmetic.quotient_error) + TINY }
}

/// `act(z)` of equation (19).
pub(crate) fn activated(activation: Activation, z: f64, arithmetic: &Arithmetic) -> Computed {
    let sigmoid = sigmoid(z, arithmetic);
    match activation {
        Activation::Sigmoid => sigmoid,
        Activation::Silu => sigmoid.times(Computed::given(z, arithmetic), arithmetic),
    }
}

/// `act'(z)` of equations (20) and (21).
pub(crate) fn slope(activation: Activation, z: f64, arithmetic: &Arithmetic) -> Computed {
    let [rising, falling] = [z, -z].map(|z| sigmoid(z, arithmetic));
    let factor = match activation {
        Activation::Sigmoid => falling,
        Activation::Silu => falling.times(Computed::given(z, arithmetic), arithmetic).plus_one(arithmetic),
    };
    let Computed { error, .. } = rising.times(factor, arithmetic);
    Computed { value: activation_slope(activation, z), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// act and act' as math.md 11 says, in f32, with an exp that is wrong by `share` of its claim.
    fn computed(activation: Activation, z: f32, share: f64) -> [f32; 2] {
        let sigmoid = |z: f32| {
            let exact = f64::from(-z.abs()).exp();
            let t = (exact * (1.0 + share * (Arithmetic::IEEE.exp_error)(f64::from(z.abs())))) as f32;
            if z < 0.0 { t / (1.0 + t) } else { 1.0 / (1.0 + t) }
        };
        match activation {
            Activation::Sigmoid => [sigmoid(z), sigmoid(z) * sigmoid(-z)],
            Activation::Silu => [z * sigmoid(z), sigmoid(z) * (1.0 + z * sigmoid(-z))],
        }
    }

    /// What f32 makes of an activation lies within its bound, and uses some of it.
    #[test]
    fn activations_are_within_their_bounds_and_use_them() {
        for activation in Activation::ALL {
            let mut used = [0.0f64; 2];
            for step in -30_000..30_000 {
                let z = step as f32 * 0.0039;
                for share in [-0.8, 0.0, 0.8] {
                    let bounds = [activated, slope].map(|of| of(activation, f64::from(z), &Arithmetic::IEEE));
                    for ((got, bound), used) in computed(activation, z, share).into_iter().zip(bounds).zip(&mut used) {
                        let share = (f64::from(got) - bound.value).abs() / bound.error;
                        assert!(share <= 1.0, "{activation:?} at {z}: {got} and {bound:?}");
                        *used = used.max(share);
                    }
                }
            }
            assert!(used.iter().all(|used| *used > 0.5), "{activation:?}: {used:?}");
        }
    }

    /// Also where the relative error of exp grows with z without a limit.
    #[test]
    fn sigmoid_of_an_infinite_gate_is_bounded() {
        let arithmetic =
            Arithmetic { exp_error: |z| (3.0 + 2.0 * z) * Arithmetic::IEEE.unit_roundoff, ..Arithmetic::IEEE };
        for (z, value) in [(f64::INFINITY, 1.0), (f64::NEG_INFINITY, 0.0)] {
            let sigmoid = activated(Activation::Sigmoid, z, &arithmetic);
            assert!(sigmoid.value == value && sigmoid.error < 1e-6, "{sigmoid:?}");
        }
    }

    #[test]
    fn infinite_factor_leaves_a_value_about_zero_open_and_no_other() {
        let infinite = activated(Activation::Silu, f64::INFINITY, &Arithmetic::IEEE);
        let range = |reference, error| infinite.scale(Expected::new(reference, error), &Arithmetic::IEEE);
        assert!(range(0.0, 1e-7).is_unbounded());
        let far = range(-2.0, 1e-7);
        assert_eq!((far.low, far.high), (f64::NEG_INFINITY, f64::NEG_INFINITY));
        assert!(range(f64::NAN, 0.0).reference.is_nan());
    }

    #[test]
    fn exact_zero_stays_exact_and_a_range_keeps_its_order() {
        let factor = activated(Activation::Silu, -1.0, &Arithmetic::IEEE);
        let zero = factor.scale(Expected::new(0.0, 0.0), &Arithmetic::IEEE);
        assert_eq!((zero.low, zero.high), (0.0, 0.0));
        let around = factor.scale(Expected::new(1.0, 2.0), &Arithmetic::IEEE);
        assert!(around.low < -0.8 && around.high > 0.26, "{around:?}");
    }
}
