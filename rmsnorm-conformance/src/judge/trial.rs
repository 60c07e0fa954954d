//! The trial of bounds: makes a case's calls, and judges every output by the
//! [truth](crate::judge::truth) of its call.
//!
//! A backward reference starts from the statistics that the backend was given, so only the errors
//! of the backward pass itself remain. An end-to-end case is judged a second time, by the gradient
//! of the exact function, with bounds that include the errors of the forward pass.

use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};
use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::reference::{BackwardInputs, ForwardInputs};
use rmsnorm_spec::{Storage, Tensor};

use crate::Arithmetic;
use crate::case::Case;
use crate::case::data::Given;
use crate::case::data::Inputs;
use crate::case::kind::Calls;
use crate::finding::{Check, Finding, Status};
use crate::judge::bounds::{Model, Statistics};
use crate::judge::quantized::QuantizedTruth;
use crate::judge::truth::{BackwardTruth, ForwardTruth};
use crate::judge::{self, Verdict};
use crate::report::{CaseReport, OutputReport};
use crate::run::calls::{Context, Saved, Scenario, may_vary};
use crate::run::memory::{Bits, Outputs, Poison};

/// Runs a case and judges it. Adds the digest of its outputs and the reports of the judged outputs
/// to `report`, for any status.
pub(crate) fn run(context: Context<'_>, case: &Case, report: &mut CaseReport) -> Status {
    if let Some(finding) = excessive_claim(context.arithmetic, case) {
        return Status::Fail(finding);
    }
    let mut judged = Judged { reports: &mut report.outputs, finding: None, vacuous: None };
    match run_and_judge(context, case, &mut report.digest, &mut judged) {
        Err(status) => status,
        Ok(()) => judged.status(),
    }
}

/// Bounds follow from the declared arithmetic, so a declaration that would excuse anything is as
/// bad as a wrong result.
fn excessive_claim(arithmetic: &Arithmetic, case: &Case) -> Option<Finding> {
    let sums = [
        ("a sum over cols", (arithmetic.depth_cols)(case.cols), sum_depth(case.cols)),
        ("a sum over rows", (arithmetic.depth_rows)(case.rows), policy_depth_rows(case.rows)),
    ];
    let (output, claimed, allowed) = sums.into_iter().find(|(_, claimed, allowed)| claimed > allowed)?;
    let detail = format!("the backend declares chains of {claimed} additions, at most {allowed} are allowed");
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
        // After a sum, y belongs to the next norm.
        let outputs = ForwardTruth::OUTPUTS.into_iter().filter(|tensor| !case.kind.is_after() || *tensor != Tensor::Y);
        judged.add_all(outputs, &stored, |tensor, got| truth.judge_bits(tensor, got));
    }
    if case.kind.is_after() {
        trial.judge_next(&stored, judged);
        if case.kind.has_backward() {
            trial.judge_norms_back(&scenario, &stored, judged);
        }
        return Ok(());
    }
    if let Some((truth, (quant, given))) = truth.as_ref().zip(case.quant.zip(scenario.inputs.given)) {
        trial.judge_quantized(truth, quant, given, &stored, judged);
    }
    if case.kind.has_backward() {
        trial.judge_backward(&scenario.saved_by(&stored), Statistics::Given, &stored, judged);
        if case.kind.calls == Calls::Sums {
            trial.judge_accumulated(&scenario.saved_by(&stored), &stored, judged);
        }
        if let Some(truth) = truth {
            trial.judge_end_to_end(truth, &stored, judged);
        }
    }
    Ok(())
}

/// Judges the outputs of a forward call, or of each rank of a group.
pub(crate) fn judge_stored(
    case: &Case,
    inputs: &Inputs,
    stored: &Outputs,
    arithmetic: &Arithmetic,
    reports: &mut Vec<OutputReport>,
) -> Status {
    let mut judged = Judged { reports, finding: None, vacuous: None };
    let truth = truth_of(case, inputs, None, Model { arithmetic, mode: case.family.mode() });
    judged.add_all(ForwardTruth::OUTPUTS, stored, |tensor, got| truth.judge_bits(tensor, got));
    judged.status()
}

/// Judges the outputs of a backward call, by the statistics that it was given.
pub(crate) fn judge_stored_back(
    case: &Case,
    inputs: &Inputs,
    saved: &Saved,
    stored: &Outputs,
    arithmetic: &Arithmetic,
) -> Status {
    let mut judged = Judged { reports: &mut Vec::new(), finding: None, vacuous: None };
    let model = Model { arithmetic, mode: case.family.mode() };
    judge_back((case, inputs, saved), Statistics::Given, model, &mut judged, |tensor| stored.get(tensor));
    judged.status()
}

fn judge_back<'s>(
    (case, inputs, saved): (&Case, &Inputs, &Saved),
    statistics: Statistics<'_>,
    model: Model<'_>,
    judged: &mut Judged<'_>,
    stored: impl Fn(Tensor) -> Option<&'s Bits>,
) {
    let truth = backward_truth((case, inputs, saved), statistics, model);
    judged.add_each(BackwardTruth::OUTPUTS, stored, |tensor, got| truth.judge_bits(tensor, got));
}

/// The expected result of a case's backward call.
fn backward_truth(
    (case, inputs, saved): (&Case, &Inputs, &Saved),
    statistics: Statistics<'_>,
    model: Model<'_>,
) -> BackwardTruth {
    let given = BackwardInputs {
        dy: &inputs.dy,
        x: &saved.x,
        weight: inputs.weight.as_deref(),
        mean: &saved.mean,
        rstd: &saved.rstd,
        dresidual_out: inputs.dresidual_out.as_deref(),
    };
    BackwardTruth::new(&case.spec(), &given, statistics, case.grad_reduction, model)
}

/// The expected result of a case's forward call. `observed` is the stored sum with the residual, if
/// that has no unique value.
fn truth_of<'a>(case: &Case, inputs: &'a Inputs, observed: Option<&[f64]>, model: Model<'a>) -> ForwardTruth<'a> {
    let (weight, bias) = (inputs.weight.as_deref(), inputs.bias.as_deref());
    if let Some(sum) = &inputs.sum {
        let given = ForwardInputs { x: sum, residual: None, weight, bias };
        return ForwardTruth::of_sum(&case.spec(), given, (case.dtypes.activation, case.dtypes.residual), model);
    }
    let residual = inputs.residual.as_deref().map(|residual| (residual, case.dtypes.residual));
    let given = ForwardInputs { x: &inputs.x, residual, weight, bias };
    ForwardTruth::new(&case.spec(), given, case.dtypes.activation, observed, model)
}

/// The verdicts on a case so far.
struct Judged<'a> {
    reports: &'a mut Vec<OutputReport>,
    finding: Option<Finding>,
    vacuous: Option<&'static str>,
}

impl Judged<'_> {
    fn status(self) -> Status {
        match (self.finding, self.vacuous) {
            (Some(finding), _) => Status::Fail(finding),
            (None, Some(output)) => Status::Vacuous(output),
            (None, None) => Status::Pass,
        }
    }

    /// Judges the tensors that the call stored.
    fn add_all(
        &mut self,
        tensors: impl IntoIterator<Item = Tensor>,
        stored: &Outputs,
        judge: impl Fn(Tensor, &Bits) -> Verdict,
    ) {
        self.add_each(tensors, |tensor| stored.get(tensor), judge);
    }

    /// Judges the tensors for which `stored` returns data.
    fn add_each<'s>(
        &mut self,
        tensors: impl IntoIterator<Item = Tensor>,
        stored: impl Fn(Tensor) -> Option<&'s Bits>,
        judge: impl Fn(Tensor, &Bits) -> Verdict,
    ) {
        for tensor in tensors {
            if let Some(got) = stored(tensor) {
                self.add(tensor, got.storage, judge(tensor, got));
            }
        }
    }

    fn add(&mut self, tensor: Tensor, storage: Storage, verdict: Verdict) {
        if verdict.failures > 0 && self.finding.is_none() {
            let (check, worst) = verdict.worst.as_ref().map_or((Check::Bounds, String::new()), describe);
            let detail = format!("{} of {} elements outside; {worst}", verdict.failures, verdict.checked);
            self.finding = Some(Finding { check, output: tensor.name(), detail });
        }
        if verdict.vacuous && self.vacuous.is_none() {
            self.vacuous = Some(tensor.name());
        }
        self.reports.push(OutputReport { output: tensor.name(), storage, verdict });
    }
}

fn describe(failure: &judge::Failure) -> (Check, String) {
    let judge::Failure { index, got, got_bits, reference, low, high } = failure;
    if reference.is_nan() {
        return (Check::NonFinite, format!("element {index} must be NaN, got {got:e}"));
    }
    let place = format!("element {index} is {got:e} ({got_bits:#x}), not in [{low:e}, {high:e}] around {reference:e}");
    (Check::Bounds, place)
}

#[derive(Clone, Copy)]
struct BoundsTrial<'a> {
    context: Context<'a>,
    case: &'a Case,
    inputs: &'a Inputs,
}

impl<'a> BoundsTrial<'a> {
    fn model(&self) -> Model<'a> {
        Model { arithmetic: self.context.arithmetic, mode: self.case.family.mode() }
    }

    fn forward_truth(&self, stored: &Outputs) -> Result<ForwardTruth<'a>, Status> {
        let observed = self.observed_h(stored)?;
        Ok(truth_of(self.case, self.inputs, observed.as_deref(), self.model()))
    }

    /// If additions may round to either neighbour, the reference starts from the sum that the
    /// backend stored. A second call stores the sum if this one does not.
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

    /// Judges the next norm, with the stored sum as its input.
    fn judge_next(&self, stored: &Outputs, judged: &mut Judged<'_>) {
        let (case, inputs) = (self.case, self.inputs);
        let Some(sum) = stored.get(Tensor::ResidualOut).map(Bits::values) else { return };
        let (weight, bias) = (inputs.next_weight.as_deref(), inputs.next_bias.as_deref());
        let given = ForwardInputs { x: &sum, residual: None, weight, bias };
        let truth = ForwardTruth::new(&case.spec(), given, case.dtypes.residual, None, self.model());
        for (tensor, of_norm) in
            [(Tensor::NextMean, Tensor::Mean), (Tensor::NextRstd, Tensor::Rstd), (Tensor::Y, Tensor::Y)]
        {
            judged.add_all([tensor], stored, |_, got| truth.judge_bits(of_norm, got));
        }
    }

    /// Judges the gradients of both norms, each with the inputs of its call.
    fn judge_norms_back(&self, scenario: &Scenario, stored: &Outputs, judged: &mut Judged<'_>) {
        let mut dy = self.inputs.dy.clone();
        if let Some(step) = scenario.back_from_y(stored).filter(|_| self.case.present.has(Tensor::Y)) {
            let call = (&step.case, &step.inputs, &step.saved);
            judge_back(call, Statistics::Given, self.model(), judged, |tensor| stored.get(tensor));
            dy = stored.get(Tensor::Dx).map(Bits::values).unwrap_or_default();
        }
        let step = scenario.back_from_sum(stored, &dy);
        // This call has no gradient of the residual.
        let of_step = |tensor| stored.last(tensor).filter(|_| tensor != Tensor::Dresidual);
        judge_back((&step.case, &step.inputs, &step.saved), Statistics::Given, self.model(), judged, of_step);
    }

    fn judge_quantized(
        &self,
        truth: &ForwardTruth<'_>,
        quant: QuantSpec,
        given: Given,
        stored: &Outputs,
        judged: &mut Judged<'_>,
    ) {
        let (spec, dtype) = (self.case.spec(), self.case.dtypes.activation);
        let truth =
            QuantizedTruth::new(&spec, quant, given, truth, (dtype, stored.get(Tensor::Rstd)), self.context.arithmetic);
        let scales = stored.get(Tensor::Scales);
        judged.add_all([Tensor::Scales], stored, |_, got| truth.judge_scales(got));
        judged.add_all([Tensor::Amax], stored, |_, got| truth.judge_amax(got));
        judged.add_all([Tensor::Codes], stored, |_, got| truth.judge_codes(got, scales));
        if let Some(codes) = stored.get(Tensor::Codes) {
            judged.add_all([Tensor::CodesT], stored, |_, got| truth.judge_transposed(got, codes));
        }
        if let Some(scales) = stored.get(Tensor::ScalesColumnwise) {
            let truth = truth.columnwise();
            judged.add_all([Tensor::ScalesColumnwise], stored, |_, got| truth.judge_scales(got));
            judged.add_all([Tensor::CodesColumnwise], stored, |_, got| truth.judge_codes(got, Some(scales)));
        }
    }

    fn judge_backward(&self, saved: &Saved, statistics: Statistics<'_>, stored: &Outputs, judged: &mut Judged<'_>) {
        let call = (self.case, self.inputs, saved);
        judge_back(call, statistics, self.model(), judged, |tensor| stored.get(tensor));
    }

    /// Judges the second of two calls with gradient sums: it adds to the sums of the first call,
    /// and all other outputs are the same.
    fn judge_accumulated(&self, saved: &Saved, stored: &Outputs, judged: &mut Judged<'_>) {
        let (case, inputs) = (self.case, self.inputs);
        let truth = backward_truth((case, inputs, saved), Statistics::Given, self.model());
        let held = |tensor| stored.get(tensor).map(Bits::values).unwrap_or_default();
        let truth = truth.added_to(&held(Tensor::Dweight), &held(Tensor::Dbias));
        judged.add_each(
            BackwardTruth::OUTPUTS,
            |tensor| stored.last(tensor),
            |tensor, got| truth.judge_bits(tensor, got),
        );
    }

    fn judge_end_to_end(&self, truth: ForwardTruth<'_>, stored: &Outputs, judged: &mut Judged<'_>) {
        let exact = Saved { x: truth.outputs.h, mean: truth.outputs.mean, rstd: truth.outputs.rstd };
        self.judge_backward(&exact, Statistics::Computed(&truth.bounds), stored, judged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rmsnorm_spec::{DType, Norm};

    use crate::case::Kind;
    use crate::selftest::simulate::SimulatedBackend;

    #[test]
    fn claim_of_longer_chains_than_policy_allows_fails_the_case() {
        let arithmetic = Arithmetic { depth_cols: |cols| cols, ..Arithmetic::IEEE };
        let device = &SimulatedBackend::new(None);
        let case = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, 1000);
        let status = run(Context { device, arithmetic: &arithmetic }, &case, &mut CaseReport::new(String::new()));
        let detail = "the backend declares chains of 1000 additions, at most 48 are allowed".into();
        assert_eq!(status, Status::Fail(Finding { check: Check::Claim, output: "a sum over cols", detail }));
        assert_eq!(
            run(Context { device, arithmetic: &Arithmetic::IEEE }, &case, &mut CaseReport::new(String::new())),
            Status::Pass
        );
    }

    fn judged(reports: &mut Vec<OutputReport>) -> Judged<'_> {
        Judged { reports, finding: None, vacuous: None }
    }

    #[test]
    fn case_with_a_bound_that_proves_nothing_is_vacuous() {
        let (mut reports, judged_as) = (Vec::new(), |reference: [f64; 2], error: [f64; 2]| {
            judge::judge(&[1f32; 2], &reference, &error, &Arithmetic::IEEE)
        });
        let mut status = |verdict| {
            let mut case = judged(&mut reports);
            case.add(Tensor::Y, DType::F32.into(), verdict);
            case.status()
        };
        assert_eq!(status(judged_as([1.0, 1.0], [f64::INFINITY, 0.0])), Status::Vacuous("y"));
        assert_eq!(status(judged_as([1.0, 1.0], [0.0, 0.0])), Status::Pass);
        let failed = status(judged_as([1.0, 2.0], [f64::INFINITY, 0.0]));
        assert!(matches!(failed, Status::Fail(_)), "a failure weighs more");
    }

    /// Once by the statistics that the backend computed, once by the exact ones.
    #[test]
    fn end_to_end_case_is_judged_twice() {
        let device = SimulatedBackend::new(None);
        let context = Context { device: &device, arithmetic: &Arithmetic::IEEE };
        let mut report = CaseReport::new(String::new());
        let case = Case::plain(Kind::END_TO_END, Norm::Layer, DType::F32, 3, 40).normalized();
        assert_eq!(run(context, &case, &mut report), Status::Pass);
        assert_eq!(report.outputs.iter().filter(|report| report.output == "dx").count(), 2);
    }

    /// dbias has a separate bound: an error within dweight's bound fails the case.
    #[test]
    fn dbias_is_held_to_its_own_bound() {
        let device = crate::selftest::faulty::Faulty::new(|_, _, call| {
            for dbias in call.get_mut(Tensor::Dbias).into_iter() {
                let first = dbias.view.start;
                dbias.after[first] = (f32::from_bits(dbias.after[first]) * (1.0 + 2e-6)).to_bits();
            }
        });
        let mut case = Case::plain(Kind::BACKWARD, Norm::Rms, DType::F32, 3, 4);
        case.present = case.present.with(Tensor::Dweight).with(Tensor::Dbias);
        let status = run(device.context(), &case.normalized(), &mut CaseReport::new(String::new()));
        assert!(matches!(&status, Status::Fail(finding) if finding.output == "dbias"), "{status:?}");
    }
}
