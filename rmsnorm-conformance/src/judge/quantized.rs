//! The expected result of a quantized call ([math](rmsnorm_spec::math), section 10.1). First the
//! scales are judged, by the interval that contains the largest result. Then the quantized values
//! are judged with the returned scales. The second step has no tolerance: for a given scale, a
//! result has one quantized value, or two if its interval contains a tie.

use std::ops::Range;

use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleType};
use rmsnorm_spec::reference::{round_to, round_to_code};
use rmsnorm_spec::{DType, NormSpec, Storage};

use super::bounds::TINY;
use super::truth::ForwardTruth;
use super::{Expected, Failure, Verdict, round_down, round_up};
use crate::Arithmetic;
use crate::case::data::Given;
use crate::run::memory::Bits;

/// The expected scales, amax and quantized values of a call, in addition to its [`ForwardTruth`].
#[derive(Debug)]
pub struct QuantizedTruth<'a> {
    quant: QuantSpec,
    rows: usize,
    cols: usize,
    given: Given,
    arithmetic: &'a Arithmetic,
    /// (rows, cols); the values to quantize.
    v: Vec<Option<Expected>>,
}

/// The largest magnitude of elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Amax {
    /// Some element is outside the domain of the arithmetic.
    Open,
    /// Some element has no bound, or may round to infinity: nothing can be proven.
    Unbounded,
    /// Some element is NaN.
    Nan,
    /// Smallest and largest possible value.
    Between(f64, f64),
}

impl<'a> QuantizedTruth<'a> {
    /// The expected result of a call with activations of type `dtype`. `rstd` is the stored rstd,
    /// if any.
    pub fn new(
        spec: &NormSpec,
        quant: QuantSpec,
        given: Given,
        truth: &ForwardTruth<'a>,
        (dtype, rstd): (DType, Option<&Bits>),
        arithmetic: &'a Arithmetic,
    ) -> Self {
        let rounded = |value: Expected| match quant.source {
            QuantSource::Rounded if !value.reference.is_nan() => {
                let (low, high) = value.interval_with_flush(dtype, arithmetic);
                Expected { low, high, ..value }
            }
            QuantSource::Rounded | QuantSource::F32 => value,
        };
        let v = truth.values_of_y(dtype, rstd).into_iter().map(|value| value.map(rounded)).collect();
        QuantizedTruth { quant, rows: spec.rows, cols: spec.cols, given, arithmetic, v }
    }

    /// The expected columnwise copy: the same for the transposed matrix.
    pub fn columnwise(&self) -> Self {
        let (rows, cols) = (self.rows, self.cols);
        let v = (0..cols).flat_map(|col| (0..rows).map(move |row| self.v[row * cols + col])).collect();
        QuantizedTruth { quant: self.quant.columnwise(), rows: cols, cols: rows, v, ..*self }
    }

    /// The elements that share each scale, and the index of the scale. A per-tensor scale exists
    /// even without elements.
    fn sets(&self) -> Vec<(Range<usize>, usize)> {
        let (rows, cols) = (self.rows, self.cols);
        let Some((width, groups)) = self.quant.scale.set_cols(cols).zip(self.quant.scale.groups(cols)) else {
            return vec![(0..rows * cols, 0)];
        };
        let of_group = |row: usize, group: usize| {
            let start = row * cols;
            let elements = start + group * width..start + ((group + 1) * width).min(cols);
            (elements, self.quant.layout.index(groups, row, group))
        };
        (0..rows).flat_map(|row| (0..groups).map(move |group| of_group(row, group))).collect()
    }

    fn amax(&self, elements: Range<usize>) -> Amax {
        let mut largest = Amax::Between(0.0, 0.0);
        for value in &self.v[elements] {
            largest = match (largest, value) {
                (Amax::Nan, _) => Amax::Nan,
                (_, Some(value)) if value.reference.is_nan() => Amax::Nan,
                (Amax::Open | Amax::Unbounded, _) | (_, None) => Amax::Open,
                (Amax::Between(low, high), Some(value)) => {
                    let most = value.low.abs().max(value.high.abs());
                    Amax::Between(low.max(value.low).max(-value.high), high.max(most))
                }
            };
        }
        match largest {
            Amax::Between(_, high) if high == f64::INFINITY => Amax::Unbounded,
            Amax::Between(..) | Amax::Nan | Amax::Open | Amax::Unbounded => largest,
        }
    }

    /// Lower bound of the largest magnitude of all elements; 0 if nothing is known.
    pub fn least_amax(&self) -> f64 {
        match self.amax(0..self.v.len()) {
            Amax::Between(low, _) => low,
            Amax::Open | Amax::Unbounded | Amax::Nan => 0.0,
        }
    }

    /// Smallest and largest possible scale for an amax in `low..=high`.
    fn scales_of(&self, low: f64, high: f64) -> (f64, f64) {
        let quant = &self.quant;
        let low = if self.arithmetic.flushes_subnormals && low < TINY { 0.0 } else { low };
        let clamped = |amax: f64| amax.max(f64::from(quant.amax_floor)).min(f64::from(quant.amax_ceiling));
        if let (ScaleType::F32, false) = (quant.scale_type(), self.is_power_of_two()) {
            let w = self.arithmetic.quotient_error;
            let quotient = |amax: f64, w: f64| (amax / f64::from(quant.codes.largest()) * (1.0 + w)).max(TINY);
            let (low, high) = (clamped(low), clamped(high));
            return match (low == 0.0, high == 0.0) {
                (true, true) => (1.0, 1.0),
                // If the results may all be zero, the scale is 1, or as small as the results.
                (true, false) => (TINY, quotient(high, w).max(1.0)),
                (false, _) => (quotient(low, -w), quotient(high, w)),
            };
        }
        // The scale follows from an f32 in the interval, because the computed amax is an f32.
        let (least, most) = (round_up(low, DType::F32), round_down(high, DType::F32));
        let (least, most) =
            if least <= most { (least, most) } else { (round_to(low, DType::F32), round_to(high, DType::F32)) };
        let scale = |amax: f64| f64::from(quant.scale(amax as f32));
        let may_be_zero = clamped(least) == 0.0 && clamped(most) > 0.0 && quant.scale_type() == ScaleType::F32;
        if may_be_zero { (TINY, scale(most).max(1.0)) } else { (scale(least), scale(most)) }
    }

    fn is_power_of_two(&self) -> bool {
        matches!(self.quant.scale, ScaleKind::Block { is_power_of_two: true, .. } | ScaleKind::Mx { .. })
    }

    /// Judges scales, and the zeros between them.
    pub fn judge_scales(&self, got: &Bits) -> Verdict {
        let len = self.quant.scales_len(self.rows, self.cols).unwrap_or(0);
        let mut judged = Judged::new(got, len);
        let mut is_padding = vec![true; len];
        for (elements, place) in self.sets() {
            is_padding[place] = false;
            let is_power = !self.is_power_of_two() || is_power_of_two(got, place);
            judged.is_of_largest(place, self.amax(elements), is_power, |low, high| self.scales_of(low, high));
        }
        for place in (0..len).filter(|&place| is_padding[place]) {
            judged.has_bits(place, 0);
        }
        judged.verdict
    }

    /// Judges amax: the largest magnitude, or the old value if that is larger and the call folds
    /// into it.
    pub fn judge_amax(&self, got: &Bits) -> Verdict {
        let mut judged = Judged::new(got, 1);
        let before = if self.quant.folds_amax { self.given.amax } else { 0.0 };
        judged.is_of_largest(0, self.amax(0..self.v.len()), true, |low, high| {
            let low = if self.arithmetic.flushes_subnormals && low < TINY { 0.0 } else { low };
            (low.max(before), high.max(before))
        });
        judged.verdict
    }

    /// Judges quantized values with the scales that the call returned or was given.
    pub fn judge_codes(&self, got: &Bits, scales: Option<&Bits>) -> Verdict {
        let mut judged = Judged::new(got, self.v.len());
        for (elements, place) in self.sets() {
            let (scale, amax) = match scales {
                // With a given scale, each result is judged alone.
                None => (self.given.scale, Amax::Between(0.0, 0.0)),
                Some(scales) if place < scales.bits.len() => (scales.value(place), self.amax(elements.clone())),
                Some(_) => (f64::NAN, Amax::Between(0.0, 0.0)),
            };
            for index in elements {
                match (amax, self.v[index]) {
                    (Amax::Open | Amax::Nan, _) | (_, None) => judged.verdict.open += 1,
                    (Amax::Unbounded, _) => judged.proves_nothing(),
                    (Amax::Between(..), Some(value)) if value.reference.is_nan() => match self.quant.codes {
                        CodeType::Int8 => judged.has_bits(index, 0),
                        CodeType::E4m3 | CodeType::E5m2 => judged.is_nan(index),
                    },
                    (Amax::Between(..), Some(value)) => {
                        let (least, most) = self.codes_of((value.low, value.high), scale);
                        judged.verdict.vacuous |= value.is_unbounded();
                        judged.is_between(index, (value.reference / scale, least, most), true);
                    }
                }
            }
        }
        judged.verdict
    }

    /// The smallest and the largest quantized value of a result in `low..=high`. NaN if the scale
    /// is not a positive finite number.
    fn codes_of(&self, (low, high): (f64, f64), scale: f64) -> (f64, f64) {
        if !(scale > 0.0 && scale.is_finite()) {
            return (f64::NAN, f64::NAN);
        }
        // Division by a power of two is exact if scales are powers of two by definition, or if the
        // quotient error is at most that of IEEE.
        let is_near = self.arithmetic.quotient_error <= Arithmetic::IEEE.quotient_error;
        let is_exact = self.is_power_of_two() || is_near && (scale as f32).to_bits() & 0x007f_ffff == 0;
        let w = if is_exact { 0.0 } else { self.arithmetic.quotient_error };
        let lost = self.arithmetic.flush_loss(1.0) / scale;
        let (low, high) = (low / scale, high / scale);
        let least = low - low.abs() * w - if low.abs() * scale < TINY { lost } else { 0.0 };
        let most = high + high.abs() * w + if high.abs() * scale < TINY { lost } else { 0.0 };
        (round_to_code(least, self.quant.codes), round_to_code(most, self.quant.codes))
    }

    /// Checks that the transposed values equal the quantized values, byte for byte.
    pub fn judge_transposed(&self, got: &Bits, codes: &Bits) -> Verdict {
        let mut judged = Judged::new(got, self.v.len());
        for row in 0..self.rows {
            for col in 0..self.cols {
                judged.has_bits(col * self.rows + row, codes.bits.get(row * self.cols + col).copied().unwrap_or(0));
            }
        }
        judged.verdict
    }
}

/// Whether the scale at an index is a power of two. An E8M0 byte always is.
fn is_power_of_two(got: &Bits, place: usize) -> bool {
    got.storage == Storage::E8m0 || got.bits.get(place).is_none_or(|bits| bits & 0x007f_ffff == 0)
}

/// A verdict under construction.
struct Judged<'g> {
    got: &'g Bits,
    verdict: Verdict,
}

impl<'g> Judged<'g> {
    fn new(got: &'g Bits, len: usize) -> Self {
        Judged { got, verdict: Verdict { failures: got.bits.len().abs_diff(len), ..Verdict::default() } }
    }

    /// Counts an element that would be accepted with any value.
    fn proves_nothing(&mut self) {
        self.verdict.open += 1;
        self.verdict.vacuous = true;
    }

    /// Checks that `is` holds for the bits and the value of the element, if there is one.
    fn expect(&mut self, index: usize, (reference, low, high): (f64, f64, f64), is: impl FnOnce(u32, f64) -> bool) {
        let Some(&got_bits) = self.got.bits.get(index) else { return };
        let got = self.got.value(index);
        self.verdict.checked += 1;
        if !is(got_bits, got) {
            self.verdict.fail(Failure { index, got, got_bits, reference, low, high });
        }
    }

    /// Checks an element that follows from the largest magnitude of others, and has the right form.
    fn is_of_largest(&mut self, index: usize, amax: Amax, has_form: bool, range: impl FnOnce(f64, f64) -> (f64, f64)) {
        match amax {
            Amax::Open => self.verdict.open += 1,
            Amax::Unbounded => self.proves_nothing(),
            Amax::Nan => self.is_nan(index),
            Amax::Between(low, high) => {
                let (low, high) = range(low, high);
                self.is_between(index, (low, low, high), has_form);
            }
        }
    }

    fn is_nan(&mut self, index: usize) {
        self.expect(index, (f64::NAN, f64::NAN, f64::NAN), |_, got| got.is_nan());
    }

    fn has_bits(&mut self, index: usize, expected: u32) {
        let value = Bits { storage: self.got.storage, bits: vec![expected] }.value(0);
        // The reference of exact bits must be finite, because a NaN reference means that NaN is
        // required.
        let value = if value.is_nan() { 0.0 } else { value };
        self.expect(index, (value, value, value), |bits, _| bits == expected);
    }

    /// Checks that the element is between both ends and has the right form.
    fn is_between(&mut self, index: usize, (reference, low, high): (f64, f64, f64), has_form: bool) {
        let reference = if reference.is_nan() { 0.0 } else { reference };
        self.expect(index, (reference, low, high), |_, got| has_form && low <= got && got <= high);
    }
}
