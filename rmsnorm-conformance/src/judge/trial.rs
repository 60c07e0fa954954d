//! The trial of bounds: makes a case's calls, computes the reference and the bounds, and judges every output.
//!
//! A forward reference starts from the exact inputs. A backward reference starts from the very statistics that the
//! backend was given, so that only the backward pass's own errors remain; an end-to-end case is judged a second time
//! against the gradient of the exact function, with the errors of the forward pass in the bound.

use rmsnorm_spec::depth::{policy_depth_cols, policy_depth_rows};
use rmsnorm_spec::reference::{self, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, round_to};
use rmsnorm_spec::{CastOrder, DType, Element, GradReduction, Norm, Tensor, bf16, f16};

use crate::case::Case;
use crate::case::data::Inputs;
use crate::judge::bounds::{self, ForwardBounds, Model, Statistics};
use crate::judge::{self, BeforeWeight, Verdict};
use crate::report::{CaseReport, Check, Finding, OutputReport, Status};
use crate::run::calls::{Context, Saved, Scenario, may_vary};
use crate::run::memory::{Bits, Outputs, Poison};
use crate::{Arithmetic, NonFinite};

/// Runs a case and judges it. The digest of its outputs and the reports of judged ones are added to `report`, whatever
/// the status.
pub(crate) fn run(context: Context<'_>, case: &Case, report: &mut CaseReport) -> Status {
    if let Some(finding) = excessive_claim(context.arithmetic, case) {
        return Status::Fail(finding);
    }
    let mut judged =
        Judged { arithmetic: context.arithmetic, reports: &mut report.outputs, finding: None, vacuous: None };
    match run_and_judge(context, case, &mut report.digest, &mut judged) {
        Err(status) => status,
        Ok(()) => judged.status(),
    }
}

/// Bounds follow from the claims, so a claim that could excuse anything is no better than a wrong result.
fn excessive_claim(arithmetic: &Arithmetic, case: &Case) -> Option<Finding> {
    let sums = [
        ("a sum over cols", (arithmetic.depth_cols)(case.cols), policy_depth_cols(case.cols)),
        ("a sum over rows", (arithmetic.depth_rows)(case.rows), policy_depth_rows(case.rows)),
    ];
    let (output, claimed, allowed) = sums.into_iter().find(|(_, claimed, allowed)| claimed > allowed)?;
    let detail = format!("chains of {claimed} additions are claimed, policy allows {allowed}");
    Some(Finding { check: Check::Claim, output, detail })
}

fn run_and_judge(
    context: Context<'_>,
    case: &Case,
    digest: &mut Option<String>,
    judged: &mut Judged<'_>,
) -> Result<(), Status> {
    let scenario = Scenario::new(case);
    let stored = scenario.run_from_both_poisons(context)?;
    *digest = Some(stored.digest(|tensor| !may_vary(case, tensor)));
    let trial = BoundsTrial { context, case, inputs: &scenario.inputs };
    let truth = if case.kind.has_forward() { Some(trial.forward_truth(&stored)?) } else { None };
    if let Some(truth) = &truth {
        trial.judge_forward(truth, &stored, judged);
    }
    if case.kind.has_backward() {
        trial.judge_backward(&scenario.saved_by(&stored), Statistics::Given, &stored, judged);
        if let Some(truth) = truth {
            trial.judge_end_to_end(truth, &stored, judged);
        }
    }
    Ok(())
}

/// The verdicts of a case so far.
struct Judged<'a> {
    arithmetic: &'a Arithmetic,
    reports: &'a mut Vec<OutputReport>,
    finding: Option<Finding>,
    vacuous: Option<&'static str>,
}

/// What is due of a part of an output: a row, or a column of a weight gradient.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Due {
    /// The acceptance interval.
    Interval,
    /// NaN where the reference is NaN.
    Nan,
    /// Nothing: the arithmetic is outside its domain.
    Nothing,
}

impl Judged<'_> {
    fn status(self) -> Status {
        match (self.finding, self.vacuous) {
            (Some(finding), _) => Status::Fail(finding),
            (None, Some(output)) => Status::Vacuous(output),
            (None, None) => Status::Pass,
        }
    }

    /// Judges an output of which each part has `width` elements.
    fn judge(&mut self, tensor: Tensor, got: Option<&Bits>, reference: &[f64], error: &[f64], due: (&[Due], usize)) {
        let Some(got) = got else { return };
        let (parts, width) = due;
        self.require_nan(tensor, got, reference, due);
        let arithmetic = self.arithmetic;
        let kept = kept_elements(parts, width);
        let verdict = match &kept {
            None => judge_bits(got, reference, error, arithmetic),
            Some(kept) => {
                let got = Bits { dtype: got.dtype, bits: select(kept, &got.bits) };
                judge_bits(&got, &select(kept, reference), &select(kept, error), arithmetic)
            }
        };
        self.add(tensor, got.dtype, verdict, kept.as_deref());
    }

    /// Judges y where x_hat is rounded before it meets the weight.
    fn judge_before_weight(&mut self, got: &Bits, elements: &[BeforeWeight], reference: &[f64], due: (&[Due], usize)) {
        self.require_nan(Tensor::Y, got, reference, due);
        let kept = kept_elements(due.0, due.1).unwrap_or_else(|| (0..elements.len()).collect());
        let bits = Bits { dtype: got.dtype, bits: select(&kept, &got.bits) };
        let elements = select(&kept, elements);
        let verdict = match got.dtype {
            DType::F32 => judge::judge_before_weight(&bits.elements::<f32>(), &elements, self.arithmetic),
            DType::F16 => judge::judge_before_weight(&bits.elements::<f16>(), &elements, self.arithmetic),
            DType::Bf16 => judge::judge_before_weight(&bits.elements::<bf16>(), &elements, self.arithmetic),
        };
        self.add(Tensor::Y, got.dtype, verdict, Some(&kept));
    }

    fn require_nan(&mut self, tensor: Tensor, got: &Bits, reference: &[f64], due: (&[Due], usize)) {
        let (parts, width) = due;
        let swallowed = |&i: &usize| parts[i / width] == Due::Nan && reference[i].is_nan() && !got.value(i).is_nan();
        if self.finding.is_none()
            && let Some(index) = (0..reference.len()).find(swallowed)
        {
            let detail = format!("element {index} must be NaN, got {:e}", got.value(index));
            self.finding = Some(Finding { check: Check::NonFinite, output: tensor.name(), detail });
        }
    }

    /// `kept` maps an index of the judged elements to one of the tensor.
    fn add(&mut self, tensor: Tensor, dtype: DType, mut verdict: Verdict, kept: Option<&[usize]>) {
        if let (Some(worst), Some(kept)) = (&mut verdict.worst, kept) {
            worst.index = kept.get(worst.index).copied().unwrap_or(worst.index);
        }
        if verdict.failures > 0 && self.finding.is_none() {
            let worst = verdict.worst.as_ref().map(describe).unwrap_or_default();
            let detail = format!("{} of {} elements outside; {worst}", verdict.failures, verdict.checked);
            self.finding = Some(Finding { check: Check::Bounds, output: tensor.name(), detail });
        }
        if verdict.vacuous && self.vacuous.is_none() {
            self.vacuous = Some(tensor.name());
        }
        self.reports.push(OutputReport { output: tensor.name(), dtype, verdict });
    }
}

fn describe(failure: &judge::Failure) -> String {
    let judge::Failure { index, got, got_bits, reference, low, high } = failure;
    format!("element {index} is {got:e} ({got_bits:#x}), not in [{low:e}, {high:e}] around {reference:e}")
}

/// The elements whose interval is due, or `None` if that is all of them.
fn kept_elements(parts: &[Due], width: usize) -> Option<Vec<usize>> {
    if parts.iter().all(|&due| due == Due::Interval) {
        return None;
    }
    Some((0..parts.len() * width).filter(|i| parts[i / width] == Due::Interval).collect())
}

fn select<T: Clone>(kept: &[usize], all: &[T]) -> Vec<T> {
    kept.iter().map(|&i| all[i].clone()).collect()
}

fn judge_bits(got: &Bits, reference: &[f64], error: &[f64], arithmetic: &Arithmetic) -> Verdict {
    match got.dtype {
        DType::F32 => judge_typed::<f32>(got, reference, error, arithmetic),
        DType::F16 => judge_typed::<f16>(got, reference, error, arithmetic),
        DType::Bf16 => judge_typed::<bf16>(got, reference, error, arithmetic),
    }
}

fn judge_typed<E: Element>(got: &Bits, reference: &[f64], error: &[f64], arithmetic: &Arithmetic) -> Verdict {
    judge::judge(&got.elements::<E>(), reference, error, arithmetic)
}

/// What a forward pass must give: the f64 reference, its bounds, and what is due of each row.
struct ForwardTruth {
    /// The sums with the residual before their rounding.
    sums: Option<Vec<f64>>,
    outputs: ForwardOutputs,
    bounds: ForwardBounds,
    due: Vec<Due>,
}

struct BoundsTrial<'a> {
    context: Context<'a>,
    case: &'a Case,
    inputs: &'a Inputs,
}

impl BoundsTrial<'_> {
    fn judge_end_to_end(&self, truth: ForwardTruth, stored: &Outputs, judged: &mut Judged<'_>) {
        let exact = Saved { x: truth.outputs.h, mean: truth.outputs.mean, rstd: truth.outputs.rstd };
        self.judge_backward(&exact, Statistics::Computed(&truth.bounds), stored, judged);
    }

    fn model(&self) -> Model<'_> {
        Model { arithmetic: self.context.arithmetic, mode: self.case.family.mode() }
    }

    /// The dtype in which h is stored, or would be.
    fn h_dtype(&self) -> DType {
        if self.case.present.has(Tensor::Residual) { self.case.dtypes.residual } else { self.case.dtypes.activation }
    }

    fn forward_truth(&self, stored: &Outputs) -> Result<ForwardTruth, Status> {
        let (case, inputs) = (self.case, self.inputs);
        let sums = inputs.residual.as_ref().map(|residual| inputs.x.iter().zip(residual).map(|(x, r)| x + r).collect());
        let (weight, bias) = (inputs.weight.as_deref(), inputs.bias.as_deref());
        let observed = self.observed_h(stored)?;
        let given = match (&observed, &inputs.residual) {
            (Some(h), _) => ForwardInputs { x: h, residual: None, weight, bias },
            (None, Some(r)) => ForwardInputs { x: &inputs.x, residual: Some((r, case.dtypes.residual)), weight, bias },
            (None, None) => ForwardInputs { x: &inputs.x, residual: None, weight, bias },
        };
        let spec = case.spec();
        let outputs = reference::forward(&spec, &given);
        let bounds = bounds::forward(&spec, &given, self.h_dtype(), &outputs, self.model());
        let due = (0..case.rows).map(|row| self.forward_due(&outputs, row)).collect();
        Ok(ForwardTruth { sums, outputs, bounds, due })
    }

    /// Where additions may round to either neighbour, h is not a function of the inputs, and the reference starts
    /// from the one that the backend stored; from a second call if this one does not store it.
    fn observed_h(&self, stored: &Outputs) -> Result<Option<Vec<f64>>, Status> {
        let case = self.case;
        if !case.present.has(Tensor::Residual) || self.context.arithmetic.adds_to_nearest() {
            return Ok(None);
        }
        if let Some(h) = stored.get(Tensor::ResidualOut) {
            return Ok(Some(h.values()));
        }
        let mut with_h = *case;
        with_h.present = with_h.present.with(Tensor::ResidualOut);
        let stored = self.context.forward(&with_h, self.inputs, Poison::Nan)?;
        Ok(stored.get(Tensor::ResidualOut).map(Bits::values))
    }

    fn forward_due(&self, outputs: &ForwardOutputs, row: usize) -> Due {
        let cols = self.case.cols;
        let h = &outputs.h[row * cols..(row + 1) * cols];
        if h.iter().any(|h| !h.is_finite()) {
            return match self.context.arithmetic.non_finite {
                NonFinite::Ieee => Due::Nan,
                NonFinite::Unspecified => Due::Nothing,
            };
        }
        // The sums of this row do not fit f32, with a factor of two for the rounding of partial sums.
        let squares = (outputs.var[row] + outputs.mean[row] * outputs.mean[row]) * cols as f64;
        if squares > f64::from(f32::MAX) / 2.0 { Due::Nothing } else { Due::Interval }
    }

    fn judge_forward(&self, truth: &ForwardTruth, stored: &Outputs, judged: &mut Judged<'_>) {
        let (ForwardTruth { outputs, bounds, due, .. }, cols) = (truth, self.case.cols);
        if let Some(sums) = &truth.sums {
            let error: Vec<f64> = match judged.arithmetic.adds_to_nearest() {
                // Exactly the nearest value: the sum of two 16-bit values rounds through f32 without a trace.
                true => vec![0.0; sums.len()],
                // x and the residual may be flushed to zero.
                false => {
                    let flushed = judged.arithmetic.flush_loss(2.0);
                    sums.iter().map(|sum| sum.abs() * judged.arithmetic.unit_roundoff + flushed).collect()
                }
            };
            let dtype = self.h_dtype();
            let nearest: Vec<f64> = sums.iter().map(|&sum| round_to(sum, dtype)).collect();
            let reference = if judged.arithmetic.adds_to_nearest() { &nearest } else { sums };
            judged.judge(Tensor::ResidualOut, stored.get(Tensor::ResidualOut), reference, &error, (due, cols));
        }
        if self.case.norm == Norm::Layer {
            judged.judge(Tensor::Mean, stored.get(Tensor::Mean), &outputs.mean, &bounds.mean, (due, 1));
        }
        judged.judge(Tensor::Rstd, stored.get(Tensor::Rstd), &outputs.rstd, &bounds.rstd, (due, 1));
        let y = stored.get(Tensor::Y);
        match (self.case.cast_order, y) {
            (CastOrder::AtStore, y) => judged.judge(Tensor::Y, y, &outputs.y, &bounds.y, (due, cols)),
            (CastOrder::BeforeWeight, None) => {}
            (CastOrder::BeforeWeight, Some(y)) => {
                judged.judge_before_weight(y, &self.before_weight(truth), &outputs.y, (due, cols));
            }
        }
    }

    fn before_weight(&self, truth: &ForwardTruth) -> Vec<BeforeWeight> {
        let (inputs, offset) = (self.inputs, f64::from(self.case.weight_offset));
        let element = |(i, (&x_hat, &x_hat_error)): (usize, (&f64, &f64))| {
            let col = i % self.case.cols;
            BeforeWeight {
                x_hat,
                x_hat_error,
                weight: inputs.weight.as_ref().map_or(1.0, |weight| weight[col] + offset),
                has_offset: inputs.weight.is_some() && offset != 0.0,
                bias: inputs.bias.as_ref().map(|bias| bias[col]),
            }
        };
        truth.outputs.x_hat.iter().zip(&truth.bounds.x_hat).enumerate().map(element).collect()
    }

    fn judge_backward(&self, saved: &Saved, statistics: Statistics<'_>, stored: &Outputs, judged: &mut Judged<'_>) {
        let (case, inputs) = (self.case, self.inputs);
        let given = BackwardInputs {
            dy: &inputs.dy,
            x: &saved.x,
            weight: inputs.weight.as_deref(),
            mean: &saved.mean,
            rstd: &saved.rstd,
            dresidual_out: inputs.dresidual_out.as_deref(),
        };
        let arithmetic = summed_in_any_order(case, self.context.arithmetic);
        let model = Model { arithmetic: &arithmetic, ..self.model() };
        let outputs = reference::backward(&case.spec(), &given);
        let bounds = bounds::backward(&case.spec(), &given, &outputs, statistics, model);

        let due: Vec<Due> = (0..case.rows).map(|row| self.backward_due(&given, row)).collect();
        judged.judge(Tensor::Dx, stored.get(Tensor::Dx), &outputs.dx, &bounds.dx, (&due, case.cols));
        let due = columns_due(&outputs, &due, judged.arithmetic);
        judged.judge(Tensor::Dweight, stored.get(Tensor::Dweight), &outputs.dweight, &bounds.dweight, (&due.0, 1));
        judged.judge(Tensor::Dbias, stored.get(Tensor::Dbias), &outputs.dbias, &bounds.dbias, (&due.1, 1));
    }

    fn backward_due(&self, given: &BackwardInputs<'_>, row: usize) -> Due {
        let elements = row * self.case.cols..(row + 1) * self.case.cols;
        let finite = |values: &[f64]| values[elements.clone()].iter().all(|value| value.is_finite());
        let statistics = given.mean[row].is_finite() && given.rstd[row].is_finite();
        if statistics && finite(given.dy) && finite(given.x) && given.dresidual_out.is_none_or(finite) {
            return Due::Interval;
        }
        match self.context.arithmetic.non_finite {
            NonFinite::Ieee => Due::Nan,
            NonFinite::Unspecified => Due::Nothing,
        }
    }
}

/// What is due of each column of dweight and of dbias. A tainted row reaches a column with the values it has there;
/// where the arithmetic leaves those open, it leaves the columns open too.
fn columns_due(outputs: &BackwardOutputs, rows: &[Due], arithmetic: &Arithmetic) -> (Vec<Due>, Vec<Due>) {
    let open = arithmetic.non_finite == NonFinite::Unspecified && rows.iter().any(|&due| due != Due::Interval);
    let column = |&value: &f64| match (open, value.is_finite()) {
        (true, _) => Due::Nothing,
        (false, true) => Due::Interval,
        (false, false) => Due::Nan,
    };
    (outputs.dweight.iter().map(column).collect(), outputs.dbias.iter().map(column).collect())
}

/// Locks and atomics add in whatever order rows finish, so the only certain depth is the longest possible.
fn summed_in_any_order(case: &Case, arithmetic: &Arithmetic) -> Arithmetic {
    match case.grad_reduction {
        GradReduction::Partials => *arithmetic,
        GradReduction::Locks { .. } | GradReduction::Atomics => {
            Arithmetic { depth_rows: |rows| rows.saturating_sub(1), ..*arithmetic }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Kind;
    use crate::selftest::simulate::SimulatedBackend;

    #[test]
    fn claim_of_longer_chains_than_policy_allows_fails_the_case() {
        let arithmetic = Arithmetic { depth_cols: |cols| cols, ..Arithmetic::IEEE };
        let device = &SimulatedBackend::new(None);
        let case = Case::plain(Kind::Forward, Norm::Rms, DType::F32, 3, 1000);
        let status = run(Context { device, arithmetic: &arithmetic }, &case, &mut CaseReport::new(String::new()));
        let detail = "chains of 1000 additions are claimed, policy allows 48".into();
        assert_eq!(status, Status::Fail(Finding { check: Check::Claim, output: "a sum over cols", detail }));
        assert_eq!(
            run(Context { device, arithmetic: &Arithmetic::IEEE }, &case, &mut CaseReport::new(String::new())),
            Status::Pass
        );
    }

    fn judged(reports: &mut Vec<OutputReport>) -> Judged<'_> {
        Judged { arithmetic: &Arithmetic::IEEE, reports, finding: None, vacuous: None }
    }

    #[test]
    fn case_with_a_bound_that_proves_nothing_is_vacuous() {
        let (mut reports, got) = (Vec::new(), Bits { dtype: DType::F32, bits: vec![1f32.to_bits(); 2] });
        let mut case = judged(&mut reports);
        case.judge(Tensor::Y, Some(&got), &[1.0, 1.0], &[f64::INFINITY, 0.0], (&[Due::Interval], 2));
        assert_eq!(case.status(), Status::Vacuous("y"));
        let mut case = judged(&mut reports);
        case.judge(Tensor::Y, Some(&got), &[1.0, 1.0], &[0.0, 0.0], (&[Due::Interval], 2));
        assert_eq!(case.status(), Status::Pass);
        let mut case = judged(&mut reports);
        case.judge(Tensor::Y, Some(&got), &[1.0, 2.0], &[f64::INFINITY, 0.0], (&[Due::Interval], 2));
        assert!(matches!(case.status(), Status::Fail(_)), "a failure weighs more");
    }

    /// Once by the statistics that the backend gave itself, once by the exact ones.
    #[test]
    fn end_to_end_case_is_judged_twice() {
        let device = SimulatedBackend::new(None);
        let context = Context { device: &device, arithmetic: &Arithmetic::IEEE };
        let mut report = CaseReport::new(String::new());
        let case = Case::plain(Kind::EndToEnd, Norm::Layer, DType::F32, 3, 40).normalized();
        assert_eq!(run(context, &case, &mut report), Status::Pass);
        assert_eq!(report.outputs.iter().filter(|report| report.output == "dx").count(), 2);
    }

    /// Squares that sum to what f32 still holds are judged.
    #[test]
    fn rows_are_judged_up_to_the_end_of_f32() {
        let device = SimulatedBackend::new(None);
        let case = Case::plain(Kind::Forward, Norm::Rms, DType::F32, 1, 4);
        let scenario = Scenario::new(&case);
        let context = Context { device: &device, arithmetic: &Arithmetic::IEEE };
        let trial = BoundsTrial { context, case: &case, inputs: &scenario.inputs };
        let due = |h: f64| {
            let x = [h; 4];
            let given = ForwardInputs { x: &x, residual: None, weight: None, bias: None };
            trial.forward_due(&reference::forward(&case.spec(), &given), 0)
        };
        assert!(due(1e10) == Due::Interval && due(6e18) == Due::Interval, "sums of 4e20 and 1.44e38");
        assert!(due(1e19) == Due::Nothing, "a sum of 4e38");
        assert!(due(f64::INFINITY) == Due::Nan && due(f64::NAN) == Due::Nan);
    }

    #[test]
    fn column_of_a_weight_gradient_must_be_nan_where_the_reference_is() {
        let outputs = BackwardOutputs {
            dx: Vec::new(),
            mean_wdy: Vec::new(),
            mean_wdy_xhat: Vec::new(),
            dweight: vec![1.0, f64::NAN],
            dbias: vec![f64::INFINITY, 2.0],
        };
        let due =
            |rows: &[Due], non_finite| columns_due(&outputs, rows, &Arithmetic { non_finite, ..Arithmetic::IEEE });
        let expected = (vec![Due::Interval, Due::Nan], vec![Due::Nan, Due::Interval]);
        for rows in [[Due::Interval; 2], [Due::Interval, Due::Nan]] {
            assert!(due(&rows, NonFinite::Ieee) == expected);
        }
        assert!(due(&[Due::Interval; 2], NonFinite::Unspecified) == expected);
        let open = (vec![Due::Nothing; 2], vec![Due::Nothing; 2]);
        assert!(due(&[Due::Interval, Due::Nothing], NonFinite::Unspecified) == open);
    }

    /// The bound of dbias is its own: an error that dweight's would excuse fails the case.
    #[test]
    fn dbias_is_held_to_its_own_bound() {
        let device = crate::selftest::faulty::Faulty::new(|_, _, call| {
            for dbias in call.get_mut(Tensor::Dbias).into_iter() {
                let first = dbias.view.start;
                dbias.after[first] = (f32::from_bits(dbias.after[first]) * (1.0 + 2e-6)).to_bits();
            }
        });
        let mut case = Case::plain(Kind::Backward, Norm::Rms, DType::F32, 3, 4);
        case.present = case.present.with(Tensor::Dweight).with(Tensor::Dbias);
        let status = run(device.context(), &case.normalized(), &mut CaseReport::new(String::new()));
        assert!(matches!(&status, Status::Fail(finding) if finding.output == "dbias"), "{status:?}");
    }
}
