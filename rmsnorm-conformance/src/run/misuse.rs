//! Invalid calls. Each must be refused with the error that names the argument, before anything is
//! written.
//!
//! An invalid call is a valid one with one property falsified. Overlapping tensors are not tested,
//! because safe host slices cannot express them. Validation detects overlaps by the spans of views,
//! which [`span`](crate::run::span) checks.

use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_spec::{
    DType, DTypes, Error, GradReduction, Norm, NormSpec, Piece, ResidualPlacement, RowGroups, Tensor, TensorShape,
};

use crate::case::kind::Calls;
use crate::case::presence::{ALL_PRESENT, NEXT, OF_CODES};
use crate::case::{Case, Kind};
use crate::finding::{Check, Finding, Status};
use crate::run::calls::{Context, Scenario, call};
use crate::run::device::{Device, FOREIGN_RESIDUAL, FOREIGN_WEIGHT};
use crate::run::memory::{Call, Guarded, Poison};

/// The required error, with the argument that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Eps,
    WeightOffset,
    EmptyRow,
    Stride(&'static str),
    Length(&'static str),
    TooLarge(&'static str),
    Missing(&'static str),
    Unexpected(&'static str),
    Invalid(&'static str),
    Unsupported,
}

impl Refusal {
    /// The refusal that corresponds to an error; `None` for errors that no invalid argument causes.
    fn of(error: &Error) -> Option<Refusal> {
        match error {
            Error::InvalidEps { .. } => Some(Refusal::Eps),
            Error::InvalidWeightOffset { .. } => Some(Refusal::WeightOffset),
            Error::EmptyRow => Some(Refusal::EmptyRow),
            Error::Stride { arg, .. } => Some(Refusal::Stride(arg)),
            Error::Length { arg, .. } => Some(Refusal::Length(arg)),
            Error::TooLarge { arg, .. } => Some(Refusal::TooLarge(arg)),
            Error::Missing { arg, .. } => Some(Refusal::Missing(arg)),
            Error::Unexpected { arg, .. } => Some(Refusal::Unexpected(arg)),
            Error::InvalidArgument { arg, .. } => Some(Refusal::Invalid(arg)),
            Error::Unsupported { .. } => Some(Refusal::Unsupported),
            // `_` stands for errors that are added later.
            Error::Overlap { .. } | Error::Unavailable { .. } | Error::Device { .. } | _ => None,
        }
    }
}

/// A call with one invalid property.
pub(crate) struct BadCall {
    /// Its id, `misuse:<kind>:<what is wrong>`.
    pub id: String,
    kind: Kind,
    spec: NormSpec,
    dtypes: DTypes,
    reduction: GradReduction,
    call: Call,
    refusal: Refusal,
}

impl BadCall {
    /// Makes the call, and checks its answer and its memory.
    pub fn run(mut self, context: Context<'_>) -> Status {
        let fail = |detail| Status::Fail(Finding { check: Check::Misuse, output: self.kind.name(), detail });
        match context.device.make(&self.spec, self.dtypes, self.reduction, &mut self.call) {
            Err(error) => error.status(self.kind.name()),
            Ok(Ok(())) => fail(format!("accepted, expected {:?}", self.refusal)),
            Ok(Err(error)) if Refusal::of(&error) != Some(self.refusal) => {
                fail(format!("expected {:?}, got: {error}", self.refusal))
            }
            Ok(Err(_)) => match self.call.tensors.iter().find(|tensor| !tensor.is_untouched()) {
                Some(tensor) => fail(format!("the refused call changed {}", tensor.name.name())),
                None => Status::Pass,
            },
        }
    }
}

/// All invalid calls. A workspace that is too short is included if the backend needs a workspace.
pub(crate) fn bad_calls(device: &dyn Device) -> Vec<BadCall> {
    let mut calls = Vec::new();
    for kind in Kind::first_calls() {
        let mut bad = |what: &str, refusal, falsify: &dyn Fn(&mut GoodCall)| {
            let mut call = GoodCall::new(device, kind, Norm::Layer);
            falsify(&mut call);
            calls.push(call.bad(what, refusal));
        };
        scalars(kind, &mut bad);
        sizes(&GoodCall::new(device, kind, Norm::Layer), &mut bad);
        presence(kind, &mut bad);
        foreign_dtypes(&mut bad);
    }
    calls
}

/// Adds an invalid call: the invalid property, the required error, and the change that makes a
/// valid call invalid.
type Add<'a> = dyn FnMut(&str, Refusal, &dyn Fn(&mut GoodCall)) + 'a;

/// A valid call with every optional tensor, to be falsified.
struct GoodCall {
    kind: Kind,
    spec: NormSpec,
    dtypes: DTypes,
    reduction: GradReduction,
    call: Call,
}

const ROWS: usize = 3;
const COLS: usize = 5;

impl GoodCall {
    fn new(device: &dyn Device, kind: Kind, norm: Norm) -> Self {
        let quant = Some(QuantSpec::new(CodeType::E5m2, ScaleKind::Given));
        let present = ALL_PRESENT.union(OF_CODES).union(NEXT);
        let case = Case { present, quant, ..Case::plain(kind, norm, DType::F16, ROWS, COLS) }.normalized();
        let inputs = Scenario::new(&case).inputs;
        let workspace_elements = |problem: &_| device.workspace_elements(problem);
        let call = call(&case, kind.direction, &inputs, workspace_elements, Poison::Nan);
        GoodCall { kind, spec: case.spec(), dtypes: case.dtypes, reduction: GradReduction::Partials, call }
    }

    fn bad(self, what: &str, refusal: Refusal) -> BadCall {
        let GoodCall { kind, spec, dtypes, reduction, call } = self;
        let id = format!("misuse:{}:{what}", kind.name());
        BadCall { id, kind, spec, dtypes, reduction, call, refusal }
    }

    fn lose(&mut self, tensor: Tensor) {
        self.call.tensors.retain(|guarded| guarded.name != tensor);
    }
}

fn scalars(kind: Kind, bad: &mut Add<'_>) {
    for (what, eps) in [("nan_eps", f32::NAN), ("negative_eps", -1e-5), ("infinite_eps", f32::INFINITY)] {
        bad(what, Refusal::Eps, &|call| call.spec.eps = eps);
    }
    for (what, offset) in [("nan_weight_offset", f32::NAN), ("infinite_weight_offset", f32::NEG_INFINITY)] {
        bad(what, Refusal::WeightOffset, &|call| call.spec.weight_offset = offset);
    }
    bad("no_cols", Refusal::EmptyRow, &|call| call.spec.cols = 0);
    if !kind.has_forward() {
        let no_groups = GradReduction::Locks { groups: 0 };
        bad("no_lock_groups", Refusal::Invalid("grad_reduction"), &|call| call.reduction = no_groups);
    }
}

fn sizes(good: &GoodCall, bad: &mut Add<'_>) {
    bad("rows_beyond_memory", Refusal::TooLarge("x"), &|call| call.spec.rows = usize::MAX);
    for guarded in &good.call.tensors {
        let tensor = guarded.name;
        let name = match (good.kind.calls, tensor) {
            (Calls::Sums, Tensor::Dweight) => "dweight_sum",
            (Calls::Sums, Tensor::Dbias) => "dbias_sum",
            (_, tensor) => tensor.name(),
        };
        let mut falsified = |what: &str, refusal, change: &dyn Fn(&mut Guarded)| {
            let change = |call: &mut GoodCall| call.call.get_mut(tensor).into_iter().for_each(change);
            bad(&format!("{what}_{name}"), refusal, &change);
        };
        if !guarded.view.is_empty() {
            falsified("short", Refusal::Length(name), &|tensor| tensor.view.end -= 1);
        }
        if tensor != Tensor::Workspace {
            falsified("long", Refusal::Length(name), &|tensor| tensor.view.end += 1);
        }
        if tensor.is_matrix() {
            let cols = if tensor.shape() == TensorShape::Transposed { ROWS } else { COLS };
            let (overlapping, beyond) = (Some(cols - 1), Some(usize::MAX / 2));
            falsified("overlapping_rows_of", Refusal::Stride(name), &|tensor| tensor.row_stride = overlapping);
            falsified("stride_beyond_memory_of", Refusal::TooLarge(name), &|tensor| tensor.row_stride = beyond);
            // Two adjacent rows per group; the third row starts before the second one ends.
            let groups = [("empty_groups_of", 0, 2 * COLS), ("overlapping_groups_of", 2, 2 * COLS - 1)];
            for (what, rows, stride) in groups {
                let groups = Some(RowGroups { rows, stride });
                falsified(what, Refusal::Invalid(name), &|tensor| tensor.groups = groups);
            }
        }
    }
}

fn presence(kind: Kind, bad: &mut Add<'_>) {
    bad("mean_for_rms_norm", Refusal::Unexpected("mean"), &|call| call.spec.norm = Norm::Rms);
    let adds_after: fn(&mut GoodCall) = |call| call.spec = call.spec.residual_after();
    let no_residual = |call: &mut GoodCall| call.lose(Tensor::Residual);
    if kind.has_forward() && kind.calls == Calls::One && !kind.is_after() {
        bad("residual_out_without_residual", Refusal::Unexpected("residual_out"), &no_residual);
    }
    if !kind.has_forward() {
        bad("no_mean", Refusal::Missing("mean"), &|call| call.lose(Tensor::Mean));
        // If the residual is added after the norm, its gradient is dy.
        bad("dresidual_out_of_a_sum_after", Refusal::Unexpected("dresidual_out"), &adds_after);
    }
    for piece in kind.pieces.iter() {
        match piece {
            Piece::Parts => {
                bad("no_parts", Refusal::Invalid("x"), &|call| call.call.parts = 0);
                bad("more_parts_than_x_has", Refusal::Length("x"), &|call| call.call.parts = 3);
                bad("parts_beyond_memory", Refusal::Invalid("x"), &|call| call.call.parts = usize::MAX);
                bad("parts_and_a_sum_after", Refusal::Unsupported, &adds_after);
            }
            Piece::ResidualAfter => {
                bad("no_residual", Refusal::Missing("residual"), &no_residual);
                bad("next_norm_without_y", Refusal::Unexpected("next_weight"), &|call| call.lose(Tensor::Y));
                bad("next_mean_for_rms_norm", Refusal::Unexpected("next_mean"), &|call| {
                    call.lose(Tensor::Mean);
                    call.spec.norm = Norm::Rms;
                });
                bad("next_norm_of_a_sum_before", Refusal::Unexpected("next_weight"), &|call| {
                    call.spec.residual_placement = ResidualPlacement::Before;
                });
                if kind.calls == Calls::One {
                    bad("no_residual_out", Refusal::Missing("residual_out"), &|call| call.lose(Tensor::ResidualOut));
                }
            }
            Piece::Quantize => quantization(adds_after, bad),
            // Optional tensors bring these pieces.
            Piece::Residual | Piece::NextNorm => {}
        }
    }
}

fn quantization(adds_after: fn(&mut GoodCall), bad: &mut Add<'_>) {
    let (row, given) = (ScaleKind::Row, ScaleKind::Given);
    let quant = |scale| QuantSpec::new(CodeType::E5m2, scale);
    bad("no_scale", Refusal::Missing("scale"), &|call| call.lose(Tensor::Scale));
    bad("transposed_codes_of_rows", Refusal::Unexpected("codes_t"), &|call| call.call.quant = Some(quant(row)));
    bad("scale_given_for_rows", Refusal::Unexpected("scale"), &|call| {
        call.lose(Tensor::CodesT);
        call.call.quant = Some(quant(row));
    });
    bad("negative_floor", Refusal::Invalid("quant"), &|call| call.call.quant = Some(quant(given).amax_floor(-1.0)));
    bad("sum_after", Refusal::Unsupported, &adds_after);
}

fn foreign_dtypes(bad: &mut Add<'_>) {
    let foreign = [("bf16_weight_for_f16", FOREIGN_WEIGHT), ("bf16_residual_for_f16", FOREIGN_RESIDUAL)];
    for (what, dtypes) in foreign {
        bad(what, Refusal::Unsupported, &|call| {
            call.dtypes = dtypes;
            for tensor in &mut call.call.tensors {
                // Both dtypes have 16 bits, so the buffer can be read as either. A 32-bit tensor,
                // such as an f32 sum, keeps its dtype.
                let dtype = tensor.name.dtype(call.kind.direction, dtypes);
                if let Some(dtype) = dtype.filter(|dtype| dtype.size() == tensor.storage.size()) {
                    tensor.storage = dtype.into();
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arithmetic;
    use crate::run::device::About;
    use crate::run::harness::{Answer, TransferError};
    use crate::selftest::simulate::SimulatedBackend;
    use rmsnorm_spec::Problem;

    /// Gives every call the same answer, after it changed a bit of a tensor.
    struct Stub {
        answer: fn() -> Answer,
        touches: Option<Tensor>,
    }

    impl Device for Stub {
        fn about(&self) -> About {
            About { name: "stub", ..SimulatedBackend::new(None).about() }
        }

        fn shape_breakpoints(&self, _: DType) -> Vec<(usize, usize)> {
            Vec::new()
        }

        fn workspace_elements(&self, _: &Problem) -> usize {
            10
        }

        fn check_spans(&self) -> Result<Result<(), String>, TransferError> {
            Ok(Ok(()))
        }

        fn make(&self, _: &NormSpec, _: DTypes, _: GradReduction, call: &mut Call) -> Answer {
            let touched = self.touches.and_then(|slot| call.get_mut(slot));
            // Changes an element, which a valid call may write.
            touched.into_iter().for_each(|tensor| {
                let first = tensor.view.start.min(tensor.after.len() - 1);
                tensor.after[first] ^= 1;
            });
            (self.answer)()
        }
    }

    fn statuses(device: &dyn Device) -> Vec<Status> {
        let arithmetic = Arithmetic::IEEE;
        bad_calls(device).into_iter().map(|call| call.run(Context { device, arithmetic: &arithmetic })).collect()
    }

    #[test]
    fn bad_calls_are_refused_by_the_shared_validation() {
        let backend = SimulatedBackend::new(None);
        assert!(statuses(&backend).iter().all(|status| *status == Status::Pass));
    }

    #[test]
    fn bad_calls_fail_a_backend_that_accepts_them_or_names_something_else() {
        let accepting = Stub { answer: || Ok(Ok(())), touches: None };
        assert!(statuses(&accepting).iter().all(|status| matches!(status, Status::Fail(_))));
        let vague = Stub { answer: || Ok(Err(Error::Missing { arg: "something", why: "" })), touches: None };
        assert!(statuses(&vague).iter().all(|status| matches!(status, Status::Fail(_))));
    }

    #[test]
    fn bad_calls_fail_a_backend_that_writes_before_it_refuses() {
        let answer = || Ok(Err(Error::EmptyRow));
        let passed = |touches| statuses(&Stub { answer, touches }).iter().filter(|s| **s == Status::Pass).count();
        assert_eq!(passed(None), 8);
        assert_eq!(passed(Some(Tensor::Rstd)), 0);
    }

    /// If the upload fails, nothing was tested. If the download fails after the call, the call is
    /// at fault.
    #[test]
    fn upload_that_fails_is_no_verdict_and_download_that_fails_is_one() {
        fn error(reason: &str) -> Error {
            Error::Unavailable { backend: "stub", reason: reason.into() }
        }
        let full = || Err(TransferError::Upload(error("no memory")));
        let skipped = statuses(&Stub { answer: full, touches: None });
        assert!(skipped.iter().all(|status| matches!(status, Status::Skipped(_))));
        let broken = || Err(TransferError::Download(error("illegal address")));
        let failed = statuses(&Stub { answer: broken, touches: None });
        let names_it =
            |status: &Status| matches!(status, Status::Fail(finding) if finding.detail.contains("illegal address"));
        assert!(failed.iter().all(names_it));
    }

    /// A refused call must not change inputs either.
    #[test]
    fn bad_calls_fail_a_backend_that_touches_any_tensor() {
        let answer = || Ok(Err(Error::EmptyRow));
        let touched = |touches| statuses(&Stub { answer, touches }).iter().filter(|s| **s == Status::Pass).count();
        // Each kind has one invalid call without columns, for which `EmptyRow` is the right answer.
        assert_eq!(touched(Some(Tensor::X)), 0);
        for (slot, stages_without) in
            [(Tensor::Weight, 0), (Tensor::Bias, 2), (Tensor::Y, 3), (Tensor::Dy, 6), (Tensor::Workspace, 6)]
        {
            assert_eq!(touched(Some(slot)), stages_without, "{slot:?}");
        }
    }
}
