//! The trial of bounds: makes a case's calls, and judges every output by the
//! [truth](crate::judge::truth) of its call.
//!
//! A backward reference starts from the statistics that the backend was given, so only the errors
//! of the backward pass itself remain. An end-to-end case is judged a second time, by the gradient
//! of the exact function, with bounds that include the errors of the forward pass.

use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};
use rmsnorm_spec::reference::ForwardInputs;
use rmsnorm_spec::{Direction, Slot, Tensor};

use crate::Arithmetic;
use crate::case::Case;
use crate::case::data::Inputs;
use crate::case::kind::Calls;
use crate::finding::{Check, Finding, Status};
use crate::judge::bounds::{Model, Statistics};
use crate::judge::quantized::QuantizedTruth;
use crate::judge::truth::{BackwardTruth, ForwardTruth};
use crate::judge::{self, Verdict};
use crate::report::{CaseReport, OutputReport};
use crate::run::calls::{Context, Scenario, Step, may_vary, outputs};
use crate::run::memory::{Bits, Outputs, Poison};

/// Runs a case and judges it. Adds the digest of its outputs and the reports of the judged outputs
/// to `report`, for any status.
pub(crate) async fn run(context: Context<'_>, case: &Case, report: &mut CaseReport) -> Result<(), Status> {
    if let Some(finding) = excessive_claim(context.arithmetic, case) {
        return Err(Status::Fail(finding));
    }
    let mut judged = Judged { reports: &mut report.outputs, finding: None, vacuous: None };
    run_and_judge(context, case, &mut report.digest, &mut judged).await?;
    judged.verdict()
}

/// Bounds follow from the declared arithmetic, so a declaration that would excuse anything is as
/// bad as a wrong result.
fn excessive_claim(arithmetic: &Arithmetic, case: &Case) -> Option<Finding> {
    let sums = [
        ("a sum over cols", (arithmetic.depth_cols)(case.width()), sum_depth(case.width())),
        ("a sum over rows", (arithmetic.depth_rows)(case.rows), policy_depth_rows(case.rows)),
    ];
    let (output, claimed, allowed) = sums.into_iter().find(|(_, claimed, allowed)| claimed > allowed)?;
    let detail = format!("the backend declares chains of {claimed} additions, at most {allowed} are allowed");
    Some(Finding { check: Check::Claim, output, detail })
}

async fn run_and_judge(
    context: Context<'_>,
    case: &Case,
    digest: &mut Option<String>,
    judged: &mut Judged<'_>,
) -> Result<(), Status> {
    let steps = Scenario::new(case).steps_from_both_poisons(context).await?;
    *digest = Some(outputs(&steps).digest(|tensor| !may_vary(case, tensor)));
    let model = Model { arithmetic: context.arithmetic, mode: case.family.mode() };
    let mut forward = None;
    for Step { case, direction, inputs, outputs } in &steps {
        if *direction == Direction::Backward {
            judged.add_backward(case, inputs, Statistics::Given, outputs, model);
            continue;
        }
        let observed = observed_h(context, case, inputs, outputs).await?;
        let truth = truth_of(case, inputs, observed.as_deref(), model);
        judged.add_forward(case, &truth, outputs);
        judged.add_next(case, inputs, outputs, model);
        judged.add_quantized(case, inputs, &truth, outputs, model);
        forward = Some(truth);
    }
    let is_exact = case.kind.calls == Calls::EndToEnd && !case.kind.is_after();
    if let (Some(truth), Some(Step { case, inputs, outputs, .. })) = (forward.filter(|_| is_exact), steps.last()) {
        let ForwardTruth { outputs: exact, bounds, .. } = truth;
        // Backward reads h, or makes it again of x and the gate or the weight.
        let is_made_again = case.kind.gate() == Some(Slot::Before) || case.cast_order.is_weight_first();
        let x = if is_made_again { inputs.of(Tensor::X).to_vec() } else { exact.h };
        let inputs = inputs.clone().with(Tensor::X, Some(x)).with(Tensor::Mean, Some(exact.mean));
        let inputs = inputs.with(Tensor::Rstd, Some(exact.rstd));
        judged.add_backward(case, &inputs, Statistics::Computed(&bounds), outputs, model);
    }
    judged.has_all(&steps)
}

/// If additions may round to either neighbour, the reference starts from the sum that the backend
/// stored. A second call stores the sum if this one does not.
async fn observed_h(
    context: Context<'_>,
    case: &Case,
    inputs: &Inputs,
    stored: &Outputs,
) -> Result<Option<Vec<f64>>, Status> {
    if !case.present.has(Tensor::Residual) || context.arithmetic.adds_to_nearest() {
        return Ok(None);
    }
    if let Some(h) = stored.values(Tensor::ResidualOut) {
        return Ok(Some(h));
    }
    let with_h = Case { present: case.present.with(Tensor::ResidualOut), ..*case };
    let step = context.call(&with_h, case.kind.direction, inputs.clone(), Poison::Nan).await?;
    Ok(step.outputs.values(Tensor::ResidualOut))
}

/// Judges the outputs of a call of a group of ranks, joined: a forward call, or a backward call
/// with the statistics in `inputs`.
pub(crate) fn judge_stored(
    case: &Case,
    inputs: &Inputs,
    stored: &Outputs,
    arithmetic: &Arithmetic,
) -> Result<(), Status> {
    let mut judged = Judged { reports: &mut Vec::new(), finding: None, vacuous: None };
    let model = Model { arithmetic, mode: case.family.mode() };
    match case.kind.has_forward() {
        true => judged.add_forward(case, &truth_of(case, inputs, None, model), stored),
        false => judged.add_backward(case, inputs, Statistics::Given, stored, model),
    }
    judged.verdict()
}

/// The expected result of a case's forward call. `observed` is the stored sum with the residual, if
/// that has no unique value.
fn truth_of<'a>(case: &Case, inputs: &'a Inputs, observed: Option<&[f64]>, model: Model<'a>) -> ForwardTruth<'a> {
    let given = inputs.forward(case);
    let x_dtype = if case.casts { case.x_dtype() } else { case.dtypes.activation };
    if let Some(sum) = &inputs.sum {
        let given = ForwardInputs { x: sum, residual: None, ..given };
        return ForwardTruth::of_sum(&case.spec(), given, (case.dtypes.activation, case.dtypes.residual), model);
    }
    ForwardTruth::gated(&case.spec(), given, inputs.gated(case), x_dtype, observed, model)
}

/// The verdicts on a case so far.
struct Judged<'a> {
    reports: &'a mut Vec<OutputReport>,
    finding: Option<Finding>,
    vacuous: Option<&'static str>,
}

impl Judged<'_> {
    fn verdict(self) -> Result<(), Status> {
        match (self.finding, self.vacuous) {
            (Some(finding), _) => Err(Status::Fail(finding)),
            (None, Some(output)) => Err(Status::Vacuous(output)),
            (None, None) => Ok(()),
        }
    }

    fn add_forward(&mut self, case: &Case, truth: &ForwardTruth<'_>, stored: &Outputs) {
        // After a sum, y belongs to the next norm.
        for tensor in ForwardTruth::OUTPUTS.into_iter().filter(|tensor| !case.kind.is_after() || *tensor != Tensor::Y) {
            self.add(tensor, stored, |got| truth.judge_bits(tensor, got));
        }
    }

    /// Judges the next norm, with the stored sum as its input.
    fn add_next(&mut self, case: &Case, inputs: &Inputs, stored: &Outputs, model: Model<'_>) {
        let Some(sum) = stored.values(Tensor::ResidualOut).filter(|_| case.kind.is_after()) else { return };
        let (weight, bias) = (inputs.get(Tensor::NextWeight), inputs.get(Tensor::NextBias));
        let given = ForwardInputs { x: &sum, residual: None, weight, bias };
        let truth = ForwardTruth::new(&case.spec(), given, case.dtypes.residual, None, model);
        for (tensor, of_norm) in
            [(Tensor::NextMean, Tensor::Mean), (Tensor::NextRstd, Tensor::Rstd), (Tensor::Y, Tensor::Y)]
        {
            self.add(tensor, stored, |got| truth.judge_bits(of_norm, got));
        }
    }

    fn add_quantized(
        &mut self,
        case: &Case,
        inputs: &Inputs,
        truth: &ForwardTruth<'_>,
        stored: &Outputs,
        model: Model<'_>,
    ) {
        let Some((quant, given)) = case.quant.zip(inputs.given) else { return };
        let of_y = (case.dtypes.activation, stored.get(Tensor::Rstd));
        let truth = QuantizedTruth::new(&case.spec(), quant, given, truth, of_y, model.arithmetic);
        self.add(Tensor::Scales, stored, |got| truth.judge_scales(got));
        self.add(Tensor::Amax, stored, |got| truth.judge_amax(got));
        self.add(Tensor::Codes, stored, |got| truth.judge_codes(got, stored.get(Tensor::Scales)));
        if let Some(codes) = stored.get(Tensor::Codes) {
            self.add(Tensor::CodesT, stored, |got| truth.judge_transposed(got, codes));
        }
        if let Some(scales) = stored.get(Tensor::ScalesColumnwise) {
            let truth = truth.columnwise();
            self.add(Tensor::ScalesColumnwise, stored, |got| truth.judge_scales(got));
            self.add(Tensor::CodesColumnwise, stored, |got| truth.judge_codes(got, Some(scales)));
        }
    }

    /// Judges a backward call, which adds its gradient sums to those in `inputs`, if there are any.
    fn add_backward(
        &mut self,
        case: &Case,
        inputs: &Inputs,
        statistics: Statistics<'_>,
        stored: &Outputs,
        model: Model<'_>,
    ) {
        let bias = inputs.get(Tensor::Bias).filter(|_| case.kind.gate() == Some(Slot::After));
        let gated = inputs.gated(case).map(|gated| (gated, bias));
        let spec = case.spec();
        let (given, x_dtype) = (inputs.backward(), case.dtypes.activation);
        let truth = BackwardTruth::gated(&spec, &given, gated, x_dtype, statistics, case.grad_reduction, model);
        let truth = truth.added_to(inputs.of(Tensor::Dweight), inputs.of(Tensor::Dbias));
        for tensor in BackwardTruth::OUTPUTS {
            self.add(tensor, stored, |got| truth.judge_bits(tensor, got));
        }
    }

    /// Checks that every output was judged.
    fn has_all(&self, steps: &[Step]) -> Result<(), Status> {
        let is_judged = |tensor: Tensor| self.reports.iter().any(|report| report.output == tensor.name());
        let mut stored = steps.iter().flat_map(|step| &step.outputs.tensors);
        let Some((tensor, _)) = stored.find(|(tensor, _)| !is_judged(*tensor)) else { return Ok(()) };
        let detail = "the suite has no bound for this output".into();
        Err(Status::Fail(Finding { check: Check::Bounds, output: tensor.name(), detail }))
    }

    /// Judges a tensor, if the call stored it.
    fn add(&mut self, tensor: Tensor, stored: &Outputs, judge: impl FnOnce(&Bits) -> Verdict) {
        let Some(got) = stored.get(tensor) else { return };
        let verdict = judge(got);
        if verdict.failures > 0 && self.finding.is_none() {
            let (check, worst) = verdict.worst.as_ref().map_or((Check::Bounds, String::new()), describe);
            let detail = format!("{} of {} elements outside; {worst}", verdict.failures, verdict.checked);
            self.finding = Some(Finding { check, output: tensor.name(), detail });
        }
        if verdict.vacuous && self.vacuous.is_none() {
            self.vacuous = Some(tensor.name());
        }
        self.reports.push(OutputReport { output: tensor.name(), storage: got.storage, verdict });
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

#[cfg(test)]
mod tests {
    use super::*;
    use pollster::block_on;
    use rmsnorm_spec::{DType, Norm};

    use crate::case::Kind;
    use crate::run::execute::execute_case;
    use crate::selftest::simulate::SimulatedBackend;

    #[test]
    fn claim_of_longer_chains_than_policy_allows_fails_the_case() {
        let arithmetic = Arithmetic { depth_cols: |cols| cols, ..Arithmetic::IEEE };
        let device = &SimulatedBackend::new(None);
        let case = Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, 1000);
        let status = execute_case(Context { device, arithmetic: &arithmetic }, &case).status;
        let detail = "the backend declares chains of 1000 additions, at most 48 are allowed".into();
        assert_eq!(status, Status::Fail(Finding { check: Check::Claim, output: "a sum over cols", detail }));
        let context = Context { device, arithmetic: &Arithmetic::IEEE };
        assert_eq!(execute_case(context, &case).status, Status::Pass);
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
            let y = Bits { storage: DType::F32.into(), bits: Vec::new() };
            case.add(Tensor::Y, &Outputs { tensors: vec![(Tensor::Y, y)] }, |_| verdict);
            case.verdict().err().unwrap_or(Status::Pass)
        };
        assert_eq!(status(judged_as([1.0, 1.0], [f64::INFINITY, 0.0])), Status::Vacuous("y"));
        assert_eq!(status(judged_as([1.0, 1.0], [0.0, 0.0])), Status::Pass);
        let failed = status(judged_as([1.0, 2.0], [f64::INFINITY, 0.0]));
        assert!(matches!(failed, Status::Fail(_)), "a failure weighs more");
    }

    /// A tensor that no truth judges fails a case.
    #[test]
    fn all_that_a_call_writes_is_judged() {
        let (scenario, device) =
            (Scenario::new(&Case::plain(Kind::FORWARD, Norm::Rms, DType::F32, 3, 4)), SimulatedBackend::new(None));
        let context = Context { device: &device, arithmetic: &Arithmetic::IEEE };
        let steps = block_on(scenario.steps(context, Poison::Nan)).expect("a correct call");
        let mut reports = Vec::new();
        let status = judged(&mut reports).has_all(&steps).expect_err("nothing is judged");
        assert!(matches!(&status, Status::Fail(finding) if finding.output == "y"), "{status:?}");
    }

    /// Once by the statistics that the backend computed, once by the exact ones.
    #[test]
    fn end_to_end_case_is_judged_twice() {
        let device = SimulatedBackend::new(None);
        let context = Context { device: &device, arithmetic: &Arithmetic::IEEE };
        let case = Case::plain(Kind::END_TO_END, Norm::Layer, DType::F32, 3, 40).normalized();
        let report = execute_case(context, &case);
        assert_eq!(report.status, Status::Pass);
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
        let status = execute_case(device.context(), &case.normalized()).status;
        assert!(matches!(&status, Status::Fail(finding) if finding.output == "dbias"), "{status:?}");
    }
}
