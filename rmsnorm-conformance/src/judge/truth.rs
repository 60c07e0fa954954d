//! The expected result of a call: the f64 reference, its bounds, and the requirement for each row
//! or column.
//!
//! A forward reference starts from the exact inputs, a backward reference from the statistics that
//! the call was given.

use rmsnorm_spec::reference::{self, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs};
use rmsnorm_spec::{DType, Element, GradReduction, Norm, NormSpec, ResidualPlacement, Slot, Tensor};

use super::{Expected, judge_expected};
use crate::judge::Verdict;
use crate::judge::bounds::{self, BackwardBounds, ForwardBounds, InputErrors, Model, Statistics, TINY};
use crate::judge::gate::{Computed, Gated, activated, slope};
use crate::judge::weight_first::{WeightFirst, weight_first};
use crate::pieces::math::PieceMath;
use crate::pieces::residual::Residual;
use crate::pieces::residual_after::ResidualAfter;
use crate::run::memory::Bits;
use crate::{Arithmetic, NonFinite};

/// The requirement for a row (of each group of columns), or for a column of a weight gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// The acceptance interval.
    Interval,
    /// NaN where the reference is NaN.
    Nan,
    /// Nothing, because the arithmetic is outside its domain.
    Nothing,
}

/// The expected result of a forward call.
#[derive(Debug)]
pub struct ForwardTruth<'a> {
    spec: NormSpec,
    inputs: ForwardInputs<'a>,
    x_dtype: DType,
    arithmetic: &'a Arithmetic,
    /// The reference. Only h is rounded to its output's dtype.
    pub outputs: ForwardOutputs,
    /// Bounds of the difference between a computed result and the reference.
    pub bounds: ForwardBounds,
    due: Vec<Due>,
    /// Whether the call computed x as a sum of parts. The sum has one exact value and may have been
    /// stored.
    is_sum: bool,
    gated: Option<Gated<'a>>,
}

impl<'a> ForwardTruth<'a> {
    /// The judged outputs, in the order of reports: an output comes after the outputs it depends
    /// on.
    pub(crate) const OUTPUTS: [Tensor; 4] = [Tensor::ResidualOut, Tensor::Mean, Tensor::Rstd, Tensor::Y];

    /// The expected result for `inputs`, with x of type `x_dtype`. If the residual is added after
    /// the norm, this covers the sum and the statistics of x. The next norm needs another
    /// `ForwardTruth`, whose x is the stored sum.
    ///
    /// If additions may round to either neighbour, the sum of x and a residual is not determined by
    /// them. Then `residual_out` (rows, cols), the sum that the backend stored, must be given, and
    /// y is judged by it.
    pub fn new(
        spec: &NormSpec,
        inputs: ForwardInputs<'a>,
        x_dtype: DType,
        residual_out: Option<&[f64]>,
        model: Model<'a>,
    ) -> Self {
        ForwardTruth::gated(spec, inputs, None, x_dtype, residual_out, model)
    }

    /// As [`new`](Self::new), for a call with a gate. `outputs.y` is the norm without the gate.
    pub fn gated(
        spec: &NormSpec,
        inputs: ForwardInputs<'a>,
        gated: Option<Gated<'a>>,
        x_dtype: DType,
        residual_out: Option<&[f64]>,
        model: Model<'a>,
    ) -> Self {
        let arithmetic = model.arithmetic;
        let is_before = spec.residual_placement == ResidualPlacement::Before;
        let of_x = gated.filter(|gated| gated.gate.slot == Slot::Before);
        let product = of_x.map(|gated| gated.products(inputs.x, arithmetic));
        let h_dtype = match &product {
            Some(_) => DType::F32,
            None => inputs.residual.filter(|_| is_before).map_or(x_dtype, |(_, dtype)| dtype),
        };
        let given = match residual_out {
            Some(h) if is_before && inputs.residual.is_some() && !arithmetic.adds_to_nearest() => {
                ForwardInputs { x: h, residual: None, weight: inputs.weight, bias: inputs.bias }
            }
            Some(_) | None => inputs,
        };
        // The weight has been in h.
        let weighted = weight_first(spec, inputs.weight).map(|weight| weight.products(inputs.x, x_dtype, arithmetic));
        let weight = inputs.weight.filter(|_| weighted.is_none());
        let made = product.as_ref().or(weighted.as_ref());
        let (h, errors) = made.map_or((given.x, None), |(h, errors)| (&h[..], Some(&errors[..])));
        let given = ForwardInputs { x: h, weight, ..given };
        let outputs = reference::forward(spec, &given);
        let bounds = bounds::forward(spec, &given, (h_dtype, errors), &outputs, model);
        let z = gated.map(|gated| gated.z);
        let due = (0..spec.rows * spec.groups).map(|row| forward_due(spec, &outputs, z, row, arithmetic)).collect();
        let inputs = ForwardInputs { weight, ..inputs };
        ForwardTruth { spec: *spec, inputs, x_dtype, arithmetic, outputs, bounds, due, is_sum: false, gated }
    }

    /// The expected result of a call whose `x` is the sum of several parts. `inputs` has the sum as
    /// x, with the sum's dtype, and no residual.
    pub fn of_sum(
        spec: &NormSpec,
        inputs: ForwardInputs<'a>,
        (x_dtype, sum_dtype): (DType, DType),
        model: Model<'a>,
    ) -> Self {
        ForwardTruth { x_dtype, is_sum: true, ..ForwardTruth::new(spec, inputs, sum_dtype, None, model) }
    }

    /// Judges a whole output of the call. For a tensor that this truth does not cover, every
    /// element fails.
    pub fn judge<E: Element>(&self, tensor: Tensor, got: &[E]) -> Verdict {
        self.judge_bits(tensor, &Bits::of(got))
    }

    /// As [`judge`](Self::judge), for an output whose dtype is known only at run time.
    pub fn judge_bits(&self, tensor: Tensor, got: &Bits) -> Verdict {
        let (outputs, bounds) = (&self.outputs, &self.bounds);
        let dtype = got.storage.float();
        let expected = match dtype.filter(|_| Self::OUTPUTS.contains(&tensor)) {
            // Not an output of this call. Quantized values and the next norm have other truths.
            None => Vec::new(),
            Some(_) if tensor == Tensor::ResidualOut => self.residual_out(),
            Some(_) if tensor == Tensor::Mean => plain(&outputs.mean, &bounds.mean),
            Some(_) if tensor == Tensor::Rstd => plain(&outputs.rstd, &bounds.rstd),
            Some(dtype) => self.y(dtype),
        };
        let width = if tensor.is_matrix() { self.spec.cols / self.spec.groups } else { 1 };
        judge_due(got, expected, &self.due, width, self.arithmetic)
    }

    fn residual_out(&self) -> Vec<Expected> {
        let (x, arithmetic) = (self.inputs.x, self.arithmetic);
        // The nearest value, exactly: rounding the sum of two 16-bit values to f32 first does not
        // change the result.
        let exact = || self.outputs.h.iter().map(|&h| Expected::new(h, 0.0)).collect();
        match self.inputs.residual {
            None if self.is_sum => exact(),
            None => Vec::new(),
            Some((residual, _)) if self.spec.residual_placement == ResidualPlacement::After => {
                let sum = |(norm, &residual)| ResidualAfter::bound(norm, residual, arithmetic);
                self.y(self.x_dtype).into_iter().zip(residual).map(sum).collect()
            }
            Some(_) if arithmetic.adds_to_nearest() => exact(),
            Some((residual, _)) => {
                let sum = |(&x, &residual)| Residual::bound(Expected::new(x, 0.0), residual, arithmetic);
                x.iter().zip(residual).map(sum).collect()
            }
        }
    }

    /// The range of each y before it is stored, for activations of type `dtype`: `None` if it may
    /// be anything; its reference is NaN if it is NaN. `rstd` is the stored rstd, if any.
    pub(crate) fn values_of_y(&self, dtype: DType, rstd: Option<&Bits>) -> Vec<Option<Expected>> {
        let value = |(i, expected): (usize, Expected)| {
            let (row, col) = (i / (self.spec.cols / self.spec.groups), i % self.spec.cols);
            let Expected { reference, low, high } = expected;
            let is_nan = || Some(Expected::new(f64::NAN, 0.0));
            let is_exact = || {
                let is_weight = rstd.is_some_and(|rstd| self.is_exactly_the_weight(i, rstd.value(row)));
                self.is_exactly_the_bias(i, col) || is_weight
            };
            match self.due[row] {
                Due::Nan if reference.is_nan() => is_nan(),
                Due::Nan | Due::Nothing => None,
                Due::Interval if reference.is_nan() => {
                    let may_be_any = expected.is_unbounded() || self.arithmetic.non_finite == NonFinite::Unspecified;
                    if may_be_any { None } else { is_nan() }
                }
                // It may exceed f32, and an infinity has no quantized value.
                Due::Interval if low.abs().max(high.abs()) > f64::from(f32::MAX) && !expected.is_unbounded() => None,
                Due::Interval if is_exact() => Some(Expected { reference, low: reference, high: reference }),
                Due::Interval if self.arithmetic.flushes_subnormals && reference.abs() < TINY => {
                    Some(Expected { reference, low: low.min(0.0), high: high.max(0.0) })
                }
                Due::Interval => Some(expected),
            }
        };
        self.y(dtype).into_iter().enumerate().map(value).collect()
    }

    /// Whether a factor of the product is zero, so that the product is exact. The bounds always
    /// include an underflow term, which would admit any quantized value if the scale is tiny.
    fn is_exactly_the_bias(&self, index: usize, col: usize) -> bool {
        let is_bounded = self.bounds.x_hat[index].is_finite();
        let weight = reference::effective_weight(&self.spec, self.inputs.weight, col);
        let is_bias = is_bounded && (weight == 0.0 || self.spec.norm != Norm::Layer && self.outputs.h[index] == 0.0);
        // A gate multiplies the bias, with an error unless it is zero.
        is_bias && (self.gate_after().is_none() || self.outputs.y[index] == 0.0)
    }

    /// Whether y is exactly the weight or its negative: then x_hat is 1 or -1, because h is 1 or -1
    /// and the stored `rstd` is 1. `rstd` is checked, because a device need not compute exactly 1.
    fn is_exactly_the_weight(&self, index: usize, rstd: f64) -> bool {
        let is_one = rstd == 1.0 && self.outputs.h[index].abs() == 1.0;
        let is_plain = self.spec.weight_offset == 0.0 && self.inputs.bias.is_none() && self.gated.is_none();
        is_one && self.spec.norm != Norm::Layer && is_plain
    }

    fn gate_after(&self) -> Option<Gated<'a>> {
        self.gated.filter(|gated| gated.gate.slot == Slot::After)
    }

    /// y. If x_hat is rounded before the weight, it is rounded to `dtype`.
    fn y(&self, dtype: DType) -> Vec<Expected> {
        let rounds = self.spec.cast_order.rounds_x_hat();
        let norm = if rounds { self.before_weight(dtype) } else { plain(&self.outputs.y, &self.bounds.y) };
        let Some(gated) = self.gate_after() else { return norm };
        let scale = |(index, norm)| gated.scale(index, norm, rounds, self.arithmetic);
        norm.into_iter().enumerate().map(scale).collect()
    }

    fn before_weight(&self, dtype: DType) -> Vec<Expected> {
        let ForwardInputs { weight, bias, .. } = self.inputs;
        let has_offset = weight.is_some() && self.spec.weight_offset != 0.0;
        let element = |(i, x_hat): (usize, Expected)| {
            let col = i % self.spec.cols;
            let weight = (reference::effective_weight(&self.spec, weight, col), has_offset);
            Expected::before_weight(x_hat, weight, bias.map(|bias| bias[col]), dtype, self.arithmetic)
        };
        self.x_hat(dtype).into_iter().enumerate().map(element).collect()
    }

    /// x_hat before its own rounding, of an rstd that is rounded to `dtype` if the cast order says
    /// so.
    fn x_hat(&self, dtype: DType) -> Vec<Expected> {
        let ForwardOutputs { h, mean, rstd, x_hat, .. } = &self.outputs;
        if !self.spec.cast_order.rounds_rstd() || dtype == DType::F32 {
            return plain(x_hat, &self.bounds.x_hat);
        }
        let width = self.spec.cols / self.spec.groups;
        let element = |((i, h), error): ((usize, &f64), &f64)| {
            let group = i / width;
            let rstd = Expected::new(rstd[group], self.bounds.rstd[group]);
            Expected::new(h - mean[group], *error).times_rounded(rstd, dtype, self.arithmetic)
        };
        h.iter().enumerate().zip(&self.bounds.deviation).map(element).collect()
    }
}

fn forward_due(
    spec: &NormSpec,
    outputs: &ForwardOutputs,
    gate: Option<&[f64]>,
    row: usize,
    arithmetic: &Arithmetic,
) -> Due {
    let width = spec.cols / spec.groups;
    let is_finite = |values: &[f64]| values[row * width..][..width].iter().all(|value| value.is_finite());
    if !is_finite(&outputs.h) {
        return tainted(arithmetic);
    }
    // A gate that is not finite spoils its own element alone.
    if arithmetic.non_finite == NonFinite::Unspecified && !gate.is_none_or(is_finite) {
        return Due::Nothing;
    }
    // The sums of this row overflow f32, with a factor of two for the rounding of partial sums.
    let squares = (outputs.var[row] + outputs.mean[row] * outputs.mean[row]) * spec.norm.divisor(width) as f64;
    if squares > f64::from(f32::MAX) / 2.0 { Due::Nothing } else { Due::Interval }
}

/// The requirement for a row with a non-finite input.
fn tainted(arithmetic: &Arithmetic) -> Due {
    match arithmetic.non_finite {
        NonFinite::Ieee => Due::Nan,
        NonFinite::Unspecified => Due::Nothing,
    }
}

/// The expected result of a backward call.
#[derive(Debug)]
pub struct BackwardTruth {
    /// Columns of a group.
    width: usize,
    arithmetic: Arithmetic,
    /// The reference, not rounded to the dtypes of the outputs.
    pub outputs: BackwardOutputs,
    /// Bounds of the difference between a computed result and the reference.
    pub bounds: BackwardBounds,
    /// The gradient of the gate, if there is one, and its error. (rows, cols)
    dgate: (Vec<f64>, Vec<f64>),
    rows_due: Vec<Due>,
}

impl BackwardTruth {
    /// The judged outputs, in the order of reports.
    pub(crate) const OUTPUTS: [Tensor; 5] =
        [Tensor::Dx, Tensor::Dresidual, Tensor::Dweight, Tensor::Dbias, Tensor::Dgate];

    /// The expected result for `inputs`, with gradients summed as `reduction` says.
    ///
    /// With given statistics, a column of dweight or dbias does not depend on other columns. To
    /// judge only these, `spec` and `inputs` may have some of the columns; dx is then meaningless.
    ///
    /// A weight before the norm needs [`gated`](Self::gated), which knows the dtype of `x`.
    pub fn new(
        spec: &NormSpec,
        inputs: &BackwardInputs<'_>,
        statistics: Statistics<'_>,
        reduction: GradReduction,
        model: Model<'_>,
    ) -> Self {
        BackwardTruth::gated(spec, inputs, None, DType::F32, statistics, reduction, model)
    }

    /// As [`new`](Self::new), for a call with a gate, and with the bias of forward if the gate is
    /// after the norm. A weight before the norm rounds to `x_dtype`.
    pub fn gated(
        spec: &NormSpec,
        inputs: &BackwardInputs<'_>,
        gated: Option<(Gated<'_>, Option<&[f64]>)>,
        x_dtype: DType,
        statistics: Statistics<'_>,
        reduction: GradReduction,
        model: Model<'_>,
    ) -> Self {
        let arithmetic = summed_as(reduction, model.arithmetic);
        let model = Model { arithmetic: &arithmetic, ..model };
        if let Some(weight) = weight_first(spec, inputs.weight) {
            let (h, errors) = weight.products(inputs.x, x_dtype, &arithmetic);
            let inputs_of_norm = BackwardInputs { x: &h, weight: None, ..*inputs };
            let norm = BackwardTruth::of_h(spec, &inputs_of_norm, Some(&errors), gated, statistics, model);
            return norm.before(weight, inputs.x, model);
        }
        BackwardTruth::of_h(spec, inputs, None, gated, statistics, model)
    }

    /// The same without a weight before the norm. `x_errors` are those of an `x` that is a result
    /// itself.
    fn of_h(
        spec: &NormSpec,
        inputs: &BackwardInputs<'_>,
        x_errors: Option<&[f64]>,
        gated: Option<(Gated<'_>, Option<&[f64]>)>,
        statistics: Statistics<'_>,
        model: Model<'_>,
    ) -> Self {
        let arithmetic = *model.arithmetic;
        let width = spec.cols / spec.groups;
        let of_norm = |inputs: &BackwardInputs<'_>, errors: InputErrors<'_>, z: Option<&[f64]>| {
            let outputs = reference::backward(spec, inputs);
            let bounds = bounds::backward(spec, inputs, errors, &outputs, statistics, model);
            let due = |row| backward_due(width, inputs, z, row, &arithmetic);
            let rows_due = (0..spec.rows * spec.groups).map(due).collect();
            BackwardTruth { width, arithmetic, outputs, bounds, dgate: Default::default(), rows_due }
        };
        let Some((gated, bias)) = gated else {
            return of_norm(inputs, InputErrors { x: x_errors, ..InputErrors::default() }, None);
        };
        let Gated { gate, z, .. } = gated;
        let given = |value| Computed::given(value, &arithmetic);
        let slope = |index: usize| slope(gate.activation, z[index], &arithmetic);
        match gate.slot {
            Slot::Before => {
                let (h, errors) = gated.products(inputs.x, &arithmetic);
                let errors = InputErrors { x: Some(&errors), ..InputErrors::default() };
                let mut truth = of_norm(&BackwardInputs { x: &h, ..*inputs }, errors, Some(z));
                for (index, (dx, error)) in truth.outputs.dx.iter_mut().zip(&mut truth.bounds.dx).enumerate() {
                    let dh = Computed { value: *dx, error: *error };
                    let dgate = dh.times(given(inputs.x[index]), &arithmetic).times(slope(index), &arithmetic);
                    truth.dgate.0.push(dgate.value);
                    truth.dgate.1.push(dgate.error);
                    let of_x = dh.times(activated(gate.activation, z[index], &arithmetic), &arithmetic);
                    (*dx, *error) = (of_x.value, of_x.error);
                }
                truth
            }
            Slot::After => {
                let (dy, errors) = gated.products(inputs.dy, &arithmetic);
                let errors = InputErrors { dy: Some(&errors), x: x_errors, bias };
                let mut truth = of_norm(&BackwardInputs { dy: &dy, ..*inputs }, errors, Some(z));
                for (index, error) in truth.bounds.y.iter().enumerate() {
                    let (group, col) = (index / width, index % spec.cols);
                    let x_hat = (inputs.x[index] - inputs.mean[group]) * inputs.rstd[group];
                    let weight = reference::effective_weight(spec, inputs.weight, col);
                    let y = Computed { value: x_hat * weight + bias.map_or(0.0, |bias| bias[col]), error: *error };
                    let dgate = y.times(given(inputs.dy[index]), &arithmetic).times(slope(index), &arithmetic);
                    truth.dgate.0.push(dgate.value);
                    truth.dgate.1.push(dgate.error);
                }
                truth
            }
        }
    }

    /// Behind a weight before the norm, whose gradient is made of `x`: the norm's own `dx` is that
    /// of the product.
    fn before(mut self, weight: WeightFirst<'_>, x: &[f64], model: Model<'_>) -> Self {
        let BackwardTruth { outputs, bounds, arithmetic, .. } = &mut self;
        let (dx, dweight) = weight.backward(&outputs.dx, x);
        let cols = dweight.len();
        let mut columns = vec![(Vec::new(), 0.0); cols];
        for (index, (dh, error)) in outputs.dx.iter().zip(&mut bounds.dx).enumerate() {
            let (dh, x) = (Computed { value: *dh, error: *error }, Computed::given(x[index], arithmetic));
            let term = dh.times(x, arithmetic);
            let (terms, errors) = &mut columns[index % cols];
            terms.push(term.value);
            *errors += term.error + arithmetic.flush_loss(1.0);
            *error = dh.times(weight.factor(index % cols, arithmetic), arithmetic).error;
        }
        let depth = (arithmetic.depth_rows)(outputs.dx.len() / cols);
        let of_column = |(terms, errors): (Vec<f64>, f64)| bounds::sum_error(terms, depth, model) + errors;
        bounds.dweight = columns.into_iter().map(of_column).collect();
        (outputs.dx, outputs.dweight) = (dx, dweight);
        self
    }

    /// The expected result of a call that adds its weight and bias gradients, as f32 sums, to
    /// `dweight` and `dbias`: one more addition.
    #[must_use]
    pub fn added_to(mut self, dweight: &[f64], dbias: &[f64]) -> Self {
        let BackwardTruth { outputs, bounds, arithmetic, .. } = &mut self;
        for (held, gradients, errors) in
            [(dweight, &mut outputs.dweight, &mut bounds.dweight), (dbias, &mut outputs.dbias, &mut bounds.dbias)]
        {
            for ((held, gradient), error) in held.iter().zip(gradients).zip(errors) {
                *gradient += held;
                // The addition rounds the computed sum, which may differ from the exact sum by its
                // error.
                let largest = gradient.abs() + *error;
                *error += arithmetic.unit_roundoff * largest + 2.0 * arithmetic.flush_loss(1.0);
            }
        }
        self
    }

    /// Judges a whole output of the call. For a tensor that is not an output of backward, every
    /// element fails.
    pub fn judge<E: Element>(&self, tensor: Tensor, got: &[E]) -> Verdict {
        self.judge_bits(tensor, &Bits::of(got))
    }

    /// As [`judge`](Self::judge), for an output whose dtype is known only at run time.
    pub fn judge_bits(&self, tensor: Tensor, got: &Bits) -> Verdict {
        let BackwardTruth { width, arithmetic, outputs, bounds, dgate, rows_due } = self;
        let judged = [
            // Both have one value, rounded to the dtype of each.
            (Tensor::Dx, (&outputs.dx, &bounds.dx, *width)),
            (Tensor::Dresidual, (&outputs.dx, &bounds.dx, *width)),
            (Tensor::Dweight, (&outputs.dweight, &bounds.dweight, 1)),
            (Tensor::Dbias, (&outputs.dbias, &bounds.dbias, 1)),
            (Tensor::Dgate, (&dgate.0, &dgate.1, *width)),
        ];
        let Some((_, (reference, error, width))) = judged.into_iter().find(|(judged, _)| *judged == tensor) else {
            return judge_due(got, Vec::new(), &[], 1, arithmetic);
        };
        let of_columns = || columns_due(reference, rows_due, arithmetic);
        let due = if tensor.is_matrix() { rows_due.clone() } else { of_columns() };
        judge_due(got, plain(reference, error), &due, width, arithmetic)
    }
}

fn backward_due(
    width: usize,
    given: &BackwardInputs<'_>,
    gate: Option<&[f64]>,
    row: usize,
    arithmetic: &Arithmetic,
) -> Due {
    let finite = |values: &[f64]| values[row * width..][..width].iter().all(|value| value.is_finite());
    let statistics = given.mean[row].is_finite() && given.rstd[row].is_finite();
    let optional = [given.dresidual_out, gate].into_iter().flatten().all(finite);
    if statistics && finite(given.dy) && finite(given.x) && optional {
        return Due::Interval;
    }
    tainted(arithmetic)
}

/// The requirements for the columns of a weight gradient. A row with non-finite inputs contributes
/// its values to a column. If the arithmetic leaves these values open, the column is open too.
fn columns_due(gradient: &[f64], rows: &[Due], arithmetic: &Arithmetic) -> Vec<Due> {
    let open = arithmetic.non_finite == NonFinite::Unspecified && rows.iter().any(|&due| due != Due::Interval);
    let column = |value: &f64| match (open, value.is_finite()) {
        (true, _) => Due::Nothing,
        (false, true) => Due::Interval,
        (false, false) => Due::Nan,
    };
    gradient.iter().map(column).collect()
}

/// Locks and atomics add rows in any order, so only the largest possible depth is certain.
fn summed_as(reduction: GradReduction, arithmetic: &Arithmetic) -> Arithmetic {
    match reduction {
        GradReduction::Partials => *arithmetic,
        GradReduction::Locks { .. } | GradReduction::Atomics => {
            Arithmetic { depth_rows: |rows| rows.saturating_sub(1), ..*arithmetic }
        }
    }
}

fn plain(reference: &[f64], error: &[f64]) -> Vec<Expected> {
    reference.iter().zip(error).map(|(&reference, &error)| Expected::new(reference, error)).collect()
}

/// Judges an output as far as `due` requires it. Each entry of `due` covers `width` elements.
fn judge_due(got: &Bits, expected: Vec<Expected>, due: &[Due], width: usize, arithmetic: &Arithmetic) -> Verdict {
    let expected = expected.into_iter().enumerate().map(|(i, expected)| match due[i / width] {
        Due::Interval => Some(expected),
        // NaN is required, for any bound.
        Due::Nan => expected.reference.is_nan().then(|| Expected::new(f64::NAN, 0.0)),
        Due::Nothing => None,
    });
    judge_expected(got, &expected.collect::<Vec<_>>(), arithmetic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::bounds::Mode;
    use rmsnorm_spec::CastOrder;

    const MODEL: Model<'static> = Model { arithmetic: &Arithmetic::IEEE, mode: Mode::Worst };

    /// Rows are judged if the sum of their squares fits in f32.
    #[test]
    fn rows_are_judged_up_to_the_end_of_f32() {
        let due = |h: f64| {
            let inputs = ForwardInputs { x: &[h; 4], residual: None, weight: None, bias: None };
            ForwardTruth::new(&NormSpec::rms(1, 4, 1e-6), inputs, DType::F32, None, MODEL).due[0]
        };
        assert!(due(1e10) == Due::Interval && due(6e18) == Due::Interval, "sums of 4e20 and 1.44e38");
        assert!(due(1e19) == Due::Nothing, "a sum of 4e38");
        assert!(due(f64::INFINITY) == Due::Nan && due(f64::NAN) == Due::Nan);
    }

    #[test]
    fn column_of_a_weight_gradient_must_be_nan_where_the_reference_is() {
        let due = |rows: &[Due], non_finite| {
            let arithmetic = Arithmetic { non_finite, ..Arithmetic::IEEE };
            [[1.0, f64::NAN], [f64::INFINITY, 2.0]].map(|gradient| columns_due(&gradient, rows, &arithmetic))
        };
        let expected = [[Due::Interval, Due::Nan], [Due::Nan, Due::Interval]];
        for rows in [[Due::Interval; 2], [Due::Interval, Due::Nan]] {
            assert_eq!(due(&rows, NonFinite::Ieee), expected);
        }
        assert_eq!(due(&[Due::Interval; 2], NonFinite::Unspecified), expected);
        assert_eq!(due(&[Due::Interval, Due::Nothing], NonFinite::Unspecified), [[Due::Nothing; 2]; 2]);
    }

    /// Every output is compared with its reference: the correct output passes, and one wrong
    /// element fails.
    #[test]
    fn every_output_is_judged_and_nothing_else() {
        let (x, residual, weight, bias) = ([3.0, 4.0, 5.0, 0.0, -2.0, 1.0], [1.0; 6], [1.0, 2.0, 0.5], [0.5; 3]);
        let (x, residual, weight) = (&x[..], &residual[..], &weight[..]);
        let float = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<_>>();
        let spec = NormSpec::layer(2, 3, 1e-6).weight_offset(1.0);
        for cast_order in CastOrder::ALL {
            let inputs =
                ForwardInputs { x, residual: Some((residual, DType::F32)), weight: Some(weight), bias: Some(&bias) };
            let truth = ForwardTruth::new(&spec.cast_order(cast_order), inputs, DType::F32, None, MODEL);
            let out = &truth.outputs;
            for (tensor, reference) in [
                (Tensor::ResidualOut, &out.h),
                (Tensor::Mean, &out.mean),
                (Tensor::Rstd, &out.rstd),
                (Tensor::Y, &out.y),
            ] {
                let mut got = float(reference);
                assert!(truth.judge(tensor, &got).is_pass(), "{tensor}");
                got[1] = got[1].next_up() * 1.00001;
                assert_eq!(truth.judge(tensor, &got).failures, 1, "{tensor}");
            }
            assert_eq!(truth.judge(Tensor::Dx, &[0f32; 6]).failures, 6, "no output of this call");
        }
        let (mean, rstd) = (&[4.0, 0.0][..], &[1.0, 0.5][..]);
        let inputs = BackwardInputs { dy: residual, x, weight: Some(weight), mean, rstd, dresidual_out: Some(x) };
        let truth = BackwardTruth::new(&spec, &inputs, Statistics::Given, GradReduction::Partials, MODEL);
        let out = &truth.outputs;
        for (tensor, reference) in [
            (Tensor::Dx, &out.dx),
            (Tensor::Dresidual, &out.dx),
            (Tensor::Dweight, &out.dweight),
            (Tensor::Dbias, &out.dbias),
        ] {
            let mut got = float(reference);
            assert!(truth.judge(tensor, &got).is_pass(), "{tensor}");
            got[1] = got[1].next_up() * 1.00001;
            assert_eq!(truth.judge(tensor, &got).failures, 1, "{tensor}");
        }
        assert_eq!(truth.judge(Tensor::Y, &[0f32; 6]).failures, 6, "no output of this call");
    }

    /// A sum that may round to either neighbour: both are correct, and y must follow from the
    /// stored one.
    #[test]
    fn y_is_judged_by_the_sum_that_was_stored() {
        let either = Arithmetic { unit_roundoff: 2.0 * Arithmetic::IEEE.unit_roundoff, ..Arithmetic::IEEE };
        let model = Model { arithmetic: &either, ..MODEL };
        let (x, residual) = ([1.0, 3.0], [2f64.powi(-24), 0.0]);
        let inputs = ForwardInputs { x: &x, residual: Some((&residual, DType::F32)), weight: None, bias: None };
        for first in [1.0, 1.0 + 2f64.powi(-23)] {
            let h = [first, 3.0];
            let truth = ForwardTruth::new(&NormSpec::rms(1, 2, 1e-6), inputs, DType::F32, Some(&h), model);
            assert_eq!(truth.outputs.h, h);
            assert!(truth.judge(Tensor::ResidualOut, &h.map(|h| h as f32)).is_pass());
        }
        let nearest = ForwardTruth::new(&NormSpec::rms(1, 2, 1e-6), inputs, DType::F32, Some(&[9.0; 2]), MODEL);
        assert_eq!(nearest.outputs.h, [1.0, 3.0], "the nearest sum is one value, whatever was stored");
        assert_eq!(nearest.judge(Tensor::ResidualOut, &[1f32.next_up(), 3.0]).failures, 1);
    }

    /// NaN is required where the reference is NaN; the other elements of such a row are open.
    #[test]
    fn swallowed_nan_is_a_failure_and_open_elements_are_counted() {
        let x = [1.0, f64::INFINITY, 1.0, 2.0];
        let inputs = ForwardInputs { x: &x, residual: None, weight: None, bias: None };
        let spec = NormSpec::rms(2, 2, 1e-6);
        let truth = ForwardTruth::new(&spec, inputs, DType::F32, None, MODEL);
        let finite = truth.outputs.y[3] as f32;
        let judged = |y1: f32| truth.judge(Tensor::Y, &[7.0, y1, truth.outputs.y[2] as f32, finite]);
        let verdict = judged(f32::NAN);
        assert_eq!((verdict.checked, verdict.failures, verdict.open, verdict.is_pass()), (3, 0, 1, false));
        assert_eq!(judged(0.0).failures, 1);
    }

    #[test]
    fn sums_in_any_order_may_be_as_deep_as_there_are_rows() {
        let depth = |reduction| (summed_as(reduction, &Arithmetic::IEEE).depth_rows)(1000);
        assert!(depth(GradReduction::Partials) < 200);
        assert_eq!(depth(GradReduction::Atomics), 999);
        assert_eq!(depth(GradReduction::Locks { groups: 64 }), 999);
    }
}
