//! Acceptance intervals: an output passes if `rnd(ref - E) <= got <= rnd(ref + E)`. No tolerances.
//!
//! `ref` is the f64 reference, `E` its bound from [`bounds`], `rnd` the rounding of the backend's
//! store ([math](rmsnorm_spec::math), section 6). An f32 output is not rounded here, because its
//! bound includes the last rounding.

pub(crate) mod arithmetic;
pub mod bounds;
pub(crate) mod gate;
pub(crate) mod quantized;
pub(crate) mod trial;
pub(crate) mod truth;
pub(crate) mod weight_first;

use rmsnorm_spec::reference::round_to;
use rmsnorm_spec::{DType, Element, f16};

use crate::judge::bounds::{SECOND_ORDER, TINY};
use crate::run::memory::{Bits, decode, encode};
use crate::{Arithmetic, NonFinite, StoreRounding};

/// An element outside its acceptance interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failure {
    /// Its index in the judged tensor.
    pub index: usize,
    /// The value of the output.
    pub got: f64,
    /// The bits of the output, zero-extended.
    pub got_bits: u32,
    /// The exact value, not rounded.
    pub reference: f64,
    /// The lower end of the acceptance interval.
    pub low: f64,
    /// The upper end of the acceptance interval.
    pub high: f64,
}

/// The result of judging a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Elements compared.
    pub checked: usize,
    /// Elements outside of their intervals. An element missing in `got`, `reference` or `error`
    /// counts as a failure.
    pub failures: usize,
    /// The element farthest outside its interval, the first of several. NaN is farther than any
    /// number.
    pub worst: Option<Failure>,
    /// Largest `|got - ref| / E` over finite outputs, for bounds neither zero nor infinite. For
    /// 16-bit outputs, the error of the store is subtracted first: half the distance between the
    /// two values around the reference, or the whole distance under
    /// [`StoreRounding::EitherNeighbour`].
    pub budget: f64,
    /// Whether some element with a finite reference has an infinite bound, or one of `|ref| + max
    /// |ref|` or more, so that its acceptance proves nothing. If all references are zero, only an
    /// infinite bound counts.
    pub vacuous: bool,
    /// 16-bit outputs that differ from the reference rounded to nearest even. A quality measure,
    /// not a failure.
    pub misrounded: usize,
    /// Elements without a required value: in rows outside the domain of the arithmetic, or in rows
    /// with a non-finite input.
    pub open: usize,
}

impl Verdict {
    /// Whether every element was compared and is inside its interval, and this proves something.
    pub const fn is_pass(&self) -> bool {
        self.failures == 0 && !self.vacuous && self.open == 0
    }

    /// Counts an element outside its interval.
    fn fail(&mut self, failure: Failure) {
        self.failures += 1;
        if self.worst.is_none_or(|worst| failure.distance() > worst.distance()) {
            self.worst = Some(failure);
        }
    }
}

impl Failure {
    /// The distance from the interval. NaN is farther than any number.
    fn distance(&self) -> f64 {
        let distance = (self.low - self.got).max(self.got - self.high);
        if distance.is_nan() { f64::INFINITY } else { distance }
    }
}

/// Judges a tensor, element by element. The three slices have the same length.
///
/// - Without a bound (infinite, or NaN although the reference is finite), everything is accepted.
/// - A finite reference admits an interval around it, and zero of either sign if a subnormal may be
///   flushed to zero. NaN is outside every interval.
/// - A NaN reference admits only NaN. An infinite reference admits the same infinity and NaN,
///   because a path to an infinite result may contain `inf - inf`. Under [`NonFinite::Unspecified`]
///   both admit everything.
pub fn judge<E: Element>(got: &[E], reference: &[f64], error: &[f64], arithmetic: &Arithmetic) -> Verdict {
    let expected = reference.iter().zip(error).map(|(&reference, &error)| Some(Expected::new(reference, error)));
    let missing = reference.len().abs_diff(error.len());
    let verdict = judge_expected(&Bits::of(got), &expected.collect::<Vec<_>>(), arithmetic);
    Verdict { failures: verdict.failures + missing, ..verdict }
}

/// Judges a tensor. An element that is `None` in `expected` has no required value.
fn judge_expected(got: &Bits, expected: &[Option<Expected>], arithmetic: &Arithmetic) -> Verdict {
    // Only floats are judged by intervals. `quantized` judges quantized values and scales.
    let Some(dtype) = got.storage.float() else {
        return Verdict { failures: got.bits.len().max(expected.len()), ..Verdict::default() };
    };
    let finite = expected.iter().flatten().map(|expected| expected.reference.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f64::max);
    let mut verdict = Verdict { failures: got.bits.len().abs_diff(expected.len()), ..Verdict::default() };
    for (index, (&got_bits, expected)) in got.bits.iter().zip(expected).enumerate() {
        let Some(expected) = expected else {
            verdict.open += 1;
            continue;
        };
        let value = decode(got_bits, dtype);
        verdict.checked += 1;
        verdict.vacuous |= expected.is_vacuous(largest);
        verdict.budget = verdict.budget.max(expected.used_budget(value, dtype, arithmetic));
        verdict.misrounded += usize::from(expected.is_misrounded(value, dtype));
        if expected.admits(value, dtype, arithmetic) {
            continue;
        }
        let ((low, high), reference) = (expected.interval(dtype, arithmetic), expected.reference);
        verdict.fail(Failure { index, got: value, got_bits, reference, low, high });
    }
    verdict
}

/// The range of a computed value before its store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub(crate) reference: f64,
    /// -inf and inf without a bound; both ends equal the reference if it is not finite.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Expected {
    pub(crate) fn new(reference: f64, error: f64) -> Expected {
        if error == f64::INFINITY || (error.is_nan() && reference.is_finite()) {
            Expected::unbounded(reference)
        } else if reference.is_finite() {
            Expected { reference, low: reference - error, high: reference + error }
        } else {
            Expected { reference, low: reference, high: reference }
        }
    }

    pub(crate) fn unbounded(reference: f64) -> Expected {
        Expected { reference, low: f64::NEG_INFINITY, high: f64::INFINITY }
    }

    /// The range of `y` if `x_hat` is rounded before the weight
    /// ([`CastOrder::BeforeWeight`](rmsnorm_spec::CastOrder::BeforeWeight)). `weight` includes its
    /// offset. Rounding is monotone, so the computed `x_hat` is in its acceptance interval. The
    /// following steps are monotone, too, so the two ends, widened by the roundings of these steps,
    /// bound `y` before its store. The reported reference is the exact product of the rounded
    /// `x_hat` and the weight, plus the bias.
    fn before_weight(
        x_hat: Expected,
        (weight, has_offset): (f64, bool),
        bias: Option<f64>,
        dtype: DType,
        arithmetic: &Arithmetic,
    ) -> Expected {
        let x_hat_rounded = match dtype {
            DType::F32 => x_hat.reference,
            DType::F16 | DType::Bf16 => round_to(x_hat.reference, dtype),
        };
        let reference = x_hat_rounded * weight + bias.unwrap_or(0.0);
        if x_hat.is_unbounded() {
            return Expected::unbounded(reference);
        }
        if !reference.is_finite() {
            return Expected { reference, low: reference, high: reference };
        }
        let (low, high) = x_hat.interval_with_flush(dtype, arithmetic);
        let u = arithmetic.unit_roundoff;
        let products = (low * weight, high * weight);
        let product = Expected { reference, low: products.0.min(products.1), high: products.0.max(products.1) };
        let product = if has_offset { product.widened(u) } else { product };
        // The weight may be flushed to zero, and so may the terms of a sum with an offset.
        let flushed = if has_offset || weight.abs() < TINY {
            3.0 * arithmetic.flush_loss(low.abs().max(high.abs()))
        } else {
            0.0
        };
        let product = Expected { low: product.low - flushed, high: product.high + flushed, ..product }.rounded(u);
        match bias {
            None => product,
            Some(bias) => {
                let flushed = if bias != 0.0 && bias.abs() < TINY { arithmetic.flush_loss(1.0) } else { 0.0 };
                let (low, high) = (product.low + bias - flushed, product.high + bias + flushed);
                Expected { reference, low, high }.rounded(u)
            }
        }
    }

    /// The range of `x_hat` from that of `h - mean`, if `rstd` is rounded to `dtype` before it
    /// multiplies ([`CastOrder::RstdFirst`](rmsnorm_spec::CastOrder::RstdFirst)). The rounding is
    /// monotone, so the rounded `rstd` lies between the rounded ends. A rounded `rstd` may be
    /// infinite.
    fn times_rounded(self, rstd: Expected, dtype: DType, arithmetic: &Arithmetic) -> Expected {
        let rounded = if rstd.reference.is_finite() { round_to(rstd.reference, dtype) } else { rstd.reference };
        let reference = self.reference * rounded;
        let (least, most) = rstd.interval_with_flush(dtype, arithmetic);
        let may_vanish = self.low <= 0.0 && self.high >= 0.0 && self.low < self.high;
        // An infinity times what may be zero may be NaN or an infinity of either sign.
        let is_open = most.is_infinite() && (least != most || may_vanish);
        if self.is_unbounded() || rstd.is_unbounded() || is_open {
            return Expected::unbounded(reference);
        }
        if !reference.is_finite() {
            return Expected { reference, low: reference, high: reference };
        }
        let ends = [self.low * least, self.low * most, self.high * least, self.high * most];
        let low = ends.into_iter().fold(f64::INFINITY, f64::min);
        let high = ends.into_iter().fold(f64::NEG_INFINITY, f64::max);
        Expected { reference, low, high }.rounded(arithmetic.unit_roundoff)
    }

    /// The range with both ends moved outwards by a relative error and by an underflow.
    fn widened(self, relative: f64) -> Expected {
        let margin = |end: f64| end.abs() * relative * SECOND_ORDER + TINY;
        Expected { low: self.low - margin(self.low), high: self.high + margin(self.high), ..self }
    }

    /// The range after an f32 operation rounded its values. An end that f32 represents exactly is
    /// kept: the product of two 16-bit values is exact, and often is half way between two values of
    /// its dtype.
    pub(crate) fn rounded(self, unit_roundoff: f64) -> Expected {
        let is_exact = |end: f64| round_to(end, DType::F32) == end && (end == 0.0 || end.abs() >= TINY);
        let widened = self.widened(unit_roundoff);
        let end = |end: f64, widened: f64| if is_exact(end) { end } else { widened };
        Expected { low: end(self.low, widened.low), high: end(self.high, widened.high), ..self }
    }

    pub(crate) fn is_unbounded(&self) -> bool {
        self.low == f64::NEG_INFINITY && self.high == f64::INFINITY
    }

    /// The ends after the rounding of the store; both are the reference if it is infinite or NaN.
    fn interval(&self, dtype: DType, arithmetic: &Arithmetic) -> (f64, f64) {
        let [low, high]: [fn(f64, DType) -> f64; 2] = match (dtype, arithmetic.store) {
            (DType::F32, StoreRounding::NearestEven | StoreRounding::EitherNeighbour) => [overflowed; 2],
            (DType::F16 | DType::Bf16, StoreRounding::NearestEven) => [round_to; 2],
            (DType::F16 | DType::Bf16, StoreRounding::EitherNeighbour) => [round_down, round_up],
        };
        (low(self.low, dtype), high(self.high, dtype))
    }

    /// The interval, extended to zero if a value in it may be flushed to zero.
    fn interval_with_flush(&self, dtype: DType, arithmetic: &Arithmetic) -> (f64, f64) {
        let (low, high) = self.interval(dtype, arithmetic);
        if self.may_flush(dtype, arithmetic) { (low.min(0.0), high.max(0.0)) } else { (low, high) }
    }

    fn may_flush(&self, dtype: DType, arithmetic: &Arithmetic) -> bool {
        let smallest = smallest_normal(dtype);
        arithmetic.flushes_subnormals && self.low < smallest && self.high > -smallest
    }

    fn admits(&self, got: f64, dtype: DType, arithmetic: &Arithmetic) -> bool {
        if self.is_unbounded() {
            return true;
        }
        if !self.reference.is_finite() {
            return match arithmetic.non_finite {
                NonFinite::Ieee => got.is_nan() || got == self.reference,
                NonFinite::Unspecified => true,
            };
        }
        let (low, high) = self.interval(dtype, arithmetic);
        (low <= got && got <= high) || (got == 0.0 && self.may_flush(dtype, arithmetic))
    }

    fn error(&self) -> f64 {
        (self.high - self.reference).max(self.reference - self.low)
    }

    fn is_vacuous(&self, largest: f64) -> bool {
        self.reference.is_finite()
            && (self.is_unbounded() || (largest > 0.0 && self.error() >= self.reference.abs() + largest))
    }

    /// The used fraction of the bound; 0 if the output or the bound is not finite, or the bound is
    /// zero.
    fn used_budget(&self, got: f64, dtype: DType, arithmetic: &Arithmetic) -> f64 {
        let error = self.error();
        if !(error.is_finite() && error > 0.0 && got.is_finite()) {
            return 0.0;
        }
        let store = match (dtype, arithmetic.store) {
            (DType::F32, StoreRounding::NearestEven | StoreRounding::EitherNeighbour) => 0.0,
            (DType::F16 | DType::Bf16, StoreRounding::NearestEven) => spacing(self.reference, dtype) / 2.0,
            (DType::F16 | DType::Bf16, StoreRounding::EitherNeighbour) => spacing(self.reference, dtype),
        };
        ((got - self.reference).abs() - store).max(0.0) / error
    }

    fn is_misrounded(&self, got: f64, dtype: DType) -> bool {
        dtype != DType::F32 && self.reference.is_finite() && got != round_to(self.reference, dtype)
    }
}

/// An end of an f32 interval, rounded only if it is beyond the largest f32.
fn overflowed(end: f64, dtype: DType) -> f64 {
    if end.abs() > f64::from(f32::MAX) { round_to(end, dtype) } else { end }
}

/// The largest value of `dtype` that is not above `value`.
fn round_down(value: f64, dtype: DType) -> f64 {
    let nearest = round_to(value, dtype);
    if nearest > value { -next_up(-nearest, dtype) } else { nearest }
}

/// The smallest value of `dtype` that is not below `value`.
fn round_up(value: f64, dtype: DType) -> f64 {
    -round_down(-value, dtype)
}

/// The distance between the two values of `dtype` around `value`. If `value` is one, the distance
/// to the next larger magnitude.
fn spacing(value: f64, dtype: DType) -> f64 {
    let below = round_down(value.abs(), dtype);
    next_up(below, dtype) - below
}

/// The next larger value of `dtype`. `value` must be a value of `dtype`, and neither NaN nor
/// positive infinity. Bits without the sign have the order of the magnitudes.
fn next_up(value: f64, dtype: DType) -> f64 {
    let bits = encode(value, dtype);
    let next = if value < 0.0 { bits - 1 } else { bits + 1 };
    decode(if value == 0.0 { 1 } else { next }, dtype)
}

/// The smallest normal value of `dtype`.
pub(crate) fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F32 | DType::Bf16 => f64::from(f32::MIN_POSITIVE),
        DType::F16 => f64::from(f16::MIN_POSITIVE.to_f32()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_spec::bf16;

    const EITHER: Arithmetic =
        Arithmetic { store: StoreRounding::EitherNeighbour, flushes_subnormals: true, ..Arithmetic::IEEE };
    fn interval(reference: f64, error: f64, dtype: DType, arithmetic: &Arithmetic) -> (f64, f64) {
        Expected::new(reference, error).interval(dtype, arithmetic)
    }

    fn accepts(got: f64, reference: f64, error: f64, dtype: DType, arithmetic: &Arithmetic) -> bool {
        Expected::new(reference, error).admits(got, dtype, arithmetic)
    }

    const UNSPECIFIED: Arithmetic = Arithmetic { non_finite: NonFinite::Unspecified, ..Arithmetic::IEEE };

    /// Every finite value of a 16-bit dtype, in ascending order, with one zero.
    fn ladder<E: Element>() -> Vec<f64> {
        let mut values: Vec<f64> = (0..=0xffff_u32).map(|bits| f64::from(E::from_bits(bits).to_f32())).collect();
        values.retain(|value| value.is_finite() && (*value != 0.0 || value.is_sign_positive()));
        values.sort_by(f64::total_cmp);
        values
    }

    fn ladders() -> [(DType, Vec<f64>); 2] {
        [(DType::F16, ladder::<f16>()), (DType::Bf16, ladder::<bf16>())]
    }

    #[test]
    fn directed_rounding_agrees_with_every_neighbour() {
        for (dtype, values) in ladders() {
            for pair in values.windows(2) {
                let (low, high) = (pair[0], pair[1]);
                for value in [low, high] {
                    assert_eq!((round_down(value, dtype), round_up(value, dtype)), (value, value), "{dtype} {value:e}");
                }
                for between in [0.001, 0.5, 0.999].map(|share| low + (high - low) * share) {
                    assert_eq!(
                        (round_down(between, dtype), round_up(between, dtype)),
                        (low, high),
                        "{dtype} {between:e}"
                    );
                    assert_eq!(spacing(between, dtype), high - low, "{dtype} {between:e}");
                }
            }
        }
    }

    #[test]
    fn directed_rounding_of_f32_agrees_with_std() {
        for value in [1.0 + 1e-9, -1.0 - 1e-9, 1e-45, 1e-50, -1e-50, 3.0e38, 1.0 / 3.0] {
            let (low, high) = (round_down(value, DType::F32), round_up(value, DType::F32));
            assert!(low < value && value < high, "{value:e}");
            assert_eq!((low as f32).next_up(), high as f32, "{value:e}");
        }
    }

    #[test]
    fn directed_rounding_beyond_the_range_stops_at_the_largest_value() {
        for (dtype, values) in ladders() {
            let largest = values[values.len() - 1];
            for value in [largest * 1.0001, largest * 1.5, 1e300] {
                assert_eq!((round_down(value, dtype), round_up(value, dtype)), (largest, f64::INFINITY), "{dtype}");
                assert_eq!(
                    (round_down(-value, dtype), round_up(-value, dtype)),
                    (f64::NEG_INFINITY, -largest),
                    "{dtype}"
                );
            }
        }
    }

    #[test]
    fn interval_without_error_is_the_correctly_rounded_value() {
        for (dtype, values) in ladders() {
            for pair in values.windows(2) {
                let reference = pair[0] + (pair[1] - pair[0]) * 0.4;
                assert_eq!(interval(reference, 0.0, dtype, &Arithmetic::IEEE), (pair[0], pair[0]), "{dtype}");
                assert_eq!(interval(reference, 0.0, dtype, &EITHER), (pair[0], pair[1]), "{dtype}");
            }
        }
    }

    #[test]
    fn interval_admits_the_second_neighbour_only_across_the_midpoint() {
        let (one, next) = (1.0, 1.0 + 2f64.powi(-7));
        let middle = 0.5 * (one + next);
        assert_eq!(interval(middle - 1e-6, 0.9e-6, DType::Bf16, &Arithmetic::IEEE), (one, one));
        assert_eq!(interval(middle - 1e-6, 1.1e-6, DType::Bf16, &Arithmetic::IEEE), (one, next));
    }

    #[test]
    fn f32_gets_no_rounding_beyond_its_bound() {
        let (reference, error) = (1.0, 1e-8);
        assert_eq!(interval(reference, error, DType::F32, &Arithmetic::IEEE), (reference - error, reference + error));
        assert!(!accepts(f64::from(1.0_f32.next_up()), reference, error, DType::F32, &Arithmetic::IEEE));
    }

    #[test]
    fn f16_subnormals_are_judged_on_their_own_grid() {
        let step = 2f64.powi(-24);
        assert!(accepts(3.0 * step, 3.2 * step, 0.1 * step, DType::F16, &Arithmetic::IEEE));
        assert!(!accepts(4.0 * step, 3.2 * step, 0.1 * step, DType::F16, &Arithmetic::IEEE));
        assert!(accepts(4.0 * step, 3.2 * step, 0.1 * step, DType::F16, &EITHER));
        assert!(accepts(0.0, 0.4 * step, 0.0, DType::F16, &Arithmetic::IEEE));
        assert!(!accepts(0.0, 3.2 * step, 0.1 * step, DType::F16, &Arithmetic::IEEE));
    }

    #[test]
    fn overflow_is_accepted_exactly_where_the_end_rounds_to_infinity() {
        let infinity = f64::INFINITY;
        // 65520 is half way between the largest f16 and the next power of two; ties round to
        // infinity.
        for (reference, error, finite, infinite) in [
            (65510.0, 9.0, true, false),
            (65510.0, 10.0, true, true),
            (65530.0, 9.0, false, true),
            (65530.0, 11.0, true, true),
            (70000.0, 1.0, false, true),
        ] {
            assert_eq!(accepts(65504.0, reference, error, DType::F16, &Arithmetic::IEEE), finite, "{reference}");
            assert_eq!(accepts(infinity, reference, error, DType::F16, &Arithmetic::IEEE), infinite, "{reference}");
            assert_eq!(accepts(-infinity, -reference, error, DType::F16, &Arithmetic::IEEE), infinite, "{reference}");
            assert!(!accepts(-infinity, reference, error, DType::F16, &Arithmetic::IEEE), "{reference}");
        }
        assert!(accepts(infinity, 4e38, 1e31, DType::F32, &Arithmetic::IEEE));
        assert!(!accepts(infinity, 3.4e38, 1e31, DType::F32, &Arithmetic::IEEE));
    }

    #[test]
    fn zero_is_accepted_for_a_subnormal_only_where_they_may_be_flushed() {
        for (dtype, smallest) in [(DType::F16, 2f64.powi(-14)), (DType::F32, 2f64.powi(-126))] {
            for reference in [0.9 * smallest, -0.9 * smallest] {
                assert!(!accepts(0.0, reference, 0.01 * smallest, dtype, &Arithmetic::IEEE), "{dtype}");
                assert!(accepts(-0.0, reference, 0.01 * smallest, dtype, &EITHER), "{dtype}");
            }
            assert!(!accepts(0.0, 1.1 * smallest, 0.01 * smallest, dtype, &EITHER), "{dtype}");
        }
    }

    #[test]
    fn the_sign_of_zero_does_not_matter() {
        assert!(accepts(-0.0, 0.0, 0.0, DType::F32, &Arithmetic::IEEE));
        assert!(accepts(0.0, -0.0, 0.0, DType::Bf16, &Arithmetic::IEEE));
    }

    #[test]
    fn nan_is_accepted_for_nan_and_infinities_only() {
        let (nan, infinity, ieee) = (f64::NAN, f64::INFINITY, &Arithmetic::IEEE);
        assert!(!accepts(nan, 1.0, 1e30, DType::F32, ieee));
        assert!(accepts(nan, nan, nan, DType::F16, ieee));
        assert!(!accepts(1.0, nan, 1.0, DType::F16, ieee));
        assert!(accepts(infinity, infinity, nan, DType::F16, ieee) && accepts(nan, infinity, 1.0, DType::F16, ieee));
        assert!(
            !accepts(-infinity, infinity, 1.0, DType::F16, ieee) && !accepts(65504.0, infinity, 1.0, DType::F16, ieee)
        );
        assert!(
            accepts(1.0, nan, 1.0, DType::F16, &UNSPECIFIED) && accepts(1.0, infinity, 1.0, DType::F16, &UNSPECIFIED)
        );
        assert!(!accepts(nan, 1.0, 1.0, DType::F16, &UNSPECIFIED), "a finite row stays finite everywhere");
    }

    #[test]
    fn without_a_bound_everything_is_accepted_and_vacuous() {
        for got in [0.0_f32, f32::NAN, f32::INFINITY] {
            for error in [f64::INFINITY, f64::NAN] {
                let verdict = judge(&[got], &[1.0], &[error], &Arithmetic::IEEE);
                assert_eq!((verdict.failures, verdict.vacuous, verdict.budget), (0, true, 0.0));
            }
        }
        assert!(accepts(1.0, f64::NAN, f64::INFINITY, DType::F32, &Arithmetic::IEEE));
    }

    #[test]
    fn verdict_counts_failures_and_keeps_the_farthest() {
        let got = [1.0_f32, 2.5, 3.0, 5.0, 5.0];
        let verdict = judge(&got, &[1.0, 2.0, 3.0, 4.0, 5.0], &[0.0, 1.0, 0.1, 0.5, 0.1], &Arithmetic::IEEE);
        let worst = Failure { index: 3, got: 5.0, got_bits: 5f32.to_bits(), reference: 4.0, low: 3.5, high: 4.5 };
        let expected = Verdict { checked: 5, failures: 1, worst: Some(worst), budget: 2.0, ..Verdict::default() };
        assert_eq!(verdict, expected);
        let with_nan = judge(&[9.0, f32::NAN], &[1.0, 1.0], &[0.1, 0.1], &Arithmetic::IEEE);
        assert_eq!(with_nan.worst.map(|failure| failure.index), Some(1));
    }

    #[test]
    fn verdict_counts_missing_elements_as_failures() {
        assert_eq!(judge::<f32>(&[1.0], &[1.0, 1.0], &[0.1, 0.1], &Arithmetic::IEEE).failures, 1);
        assert_eq!(judge::<f32>(&[1.0, 1.0], &[1.0, 1.0], &[0.1], &Arithmetic::IEEE).failures, 2);
    }

    #[test]
    fn verdict_is_vacuous_where_the_bound_exceeds_the_tensor() {
        let vacuous =
            |reference: [f64; 2], error| judge(&[0.0_f32; 2], &reference, &[0.0, error], &Arithmetic::IEEE).vacuous;
        assert!(vacuous([3.0, 1.0], 4.0));
        assert!(!vacuous([3.0, 1.0], 3.9));
        assert!(!vacuous([0.0, 0.0], 1e-30));
    }

    #[test]
    fn budget_of_16_bit_outputs_forgives_the_store() {
        let ulp = 2f64.powi(-7);
        let budget = |got: f64, reference: f64, arithmetic| {
            judge(&[bf16::from_f64(got)], &[reference], &[0.01 * ulp], arithmetic).budget
        };
        assert_eq!(budget(1.0, 1.0 + 0.5 * ulp, &Arithmetic::IEEE), 0.0);
        assert!((budget(1.0, 1.0 + 0.505 * ulp, &Arithmetic::IEEE) - 0.5).abs() < 1e-9);
        assert_eq!(budget(1.0, 1.0 + 0.9 * ulp, &EITHER), 0.0);
    }

    #[test]
    fn misrounded_counts_neighbours_of_the_nearest() {
        let got = [1.0, 1.0 + 2f64.powi(-7)].map(bf16::from_f64);
        assert_eq!(judge(&got, &[1.001, 1.001], &[1.0, 1.0], &Arithmetic::IEEE).misrounded, 1);
        assert_eq!(judge(&[1.0_f32], &[1.001], &[1.0], &Arithmetic::IEEE).misrounded, 0);
    }

    /// The range of x_hat, the weight and whether it has an offset, the bias.
    type Scaled = (Expected, (f64, bool), Option<f64>);

    fn before_weight_interval(element: &Scaled, dtype: DType, arithmetic: &Arithmetic) -> (f64, f64) {
        let &(x_hat, weight, bias) = element;
        Expected::before_weight(x_hat, weight, bias, dtype, arithmetic).interval(dtype, arithmetic)
    }

    fn judge_before_weight<E: Element>(got: &[E], elements: &[Scaled], arithmetic: &Arithmetic) -> Verdict {
        let expected =
            |&(x_hat, weight, bias): &Scaled| Some(Expected::before_weight(x_hat, weight, bias, E::DTYPE, arithmetic));
        judge_expected(&Bits::of(got), &elements.iter().map(expected).collect::<Vec<_>>(), arithmetic)
    }

    fn before_weight(x_hat: f64, x_hat_error: f64, weight: f64, bias: Option<f64>) -> Scaled {
        (Expected::new(x_hat, x_hat_error), (weight, false), bias)
    }

    #[test]
    fn before_weight_tells_the_cast_orders_apart() {
        // 1.004 rounds to 1.0078125; times 3 that is a tie, which rounds to the even 3.03125.
        // Unrounded it is 3.012.
        let element = before_weight(1.004, 1e-7, 3.0, None);
        assert_eq!(before_weight_interval(&element, DType::Bf16, &Arithmetic::IEEE), (3.03125, 3.03125));
        assert_eq!(judge_before_weight(&[bf16::from_f64(3.015625)], &[element], &Arithmetic::IEEE).failures, 1);
        assert_eq!(interval(1.004 * 3.0, 1e-6, DType::Bf16, &Arithmetic::IEEE), (3.015625, 3.015625));
    }

    #[test]
    fn before_weight_admits_a_flushed_bias_where_subnormals_are_flushed() {
        let flushing = Arithmetic { flushes_subnormals: true, ..Arithmetic::IEEE };
        // 2^-126 + 2^-127, both exact.
        let element = before_weight(1.0, 0.0, TINY, Some(TINY / 2.0));
        let got = [bf16::from_f64(TINY)];
        assert_eq!(judge_before_weight(&got, &[element], &flushing).failures, 0);
        assert_eq!(judge_before_weight(&got, &[element], &Arithmetic::IEEE).failures, 1);
    }

    #[test]
    fn before_weight_admits_both_roundings_of_x_hat_at_a_midpoint() {
        let ulp = 2f64.powi(-7);
        for (weight, low, high) in [(4.0, 4.0, 4.0 + 4.0 * ulp), (-4.0, -4.0 - 4.0 * ulp, -4.0)] {
            let element = before_weight(1.0 + 0.5 * ulp, 1e-7, weight, None);
            assert_eq!(before_weight_interval(&element, DType::Bf16, &Arithmetic::IEEE), (low, high));
        }
    }

    #[test]
    fn before_weight_in_f32_is_the_plain_interval_with_its_roundings() {
        let element = (Expected::new(1.5, 1e-7), (2.0, true), Some(0.25));
        let (low, high) = before_weight_interval(&element, DType::F32, &Arithmetic::IEEE);
        let u = Arithmetic::IEEE.unit_roundoff;
        let error = 2e-7 + 2.0 * 3.0 * u + 3.25 * u;
        assert!(((high - 3.25) / error - 1.0).abs() < 2e-3 && ((3.25 - low) / error - 1.0).abs() < 2e-3);
    }

    #[test]
    fn before_weight_passes_on_what_has_no_bound_or_no_value() {
        let judge_one = |element| judge_before_weight(&[f16::ZERO], &[element], &Arithmetic::IEEE);
        assert!(judge_one(before_weight(1.0, f64::INFINITY, 0.0, None)).vacuous);
        assert_eq!(judge_one(before_weight(f64::NAN, 0.0, 1.0, None)).failures, 1);
        assert_eq!(judge_one(before_weight(0.0, 0.0, 1.0, None)).failures, 0);
    }

    #[test]
    fn one_bound_that_proves_nothing_makes_a_verdict_vacuous_wherever_it_is() {
        for place in 0..3 {
            let mut error = [0.0; 3];
            error[place] = f64::INFINITY;
            assert!(judge(&[1.0f32; 3], &[1.0; 3], &error, &Arithmetic::IEEE).vacuous, "element {place}");
        }
        assert!(!judge(&[1.0f32; 3], &[1.0; 3], &[0.0; 3], &Arithmetic::IEEE).vacuous);
    }
}
