//! Invalid calls. Each must be refused with the error that names the argument, before anything is
//! written.
//!
//! Overlapping tensors are not tested, because safe host slices cannot express them. Validation
//! detects overlaps by the spans of views, which [`span`](crate::run::span) checks.

use rmsnorm_spec::{CastOrder, DType, DTypes, GradReduction, Norm, RowGroups, Tensor};

use crate::case::Kind;
use crate::case::kind::Calls;
use crate::pieces;
use crate::run::bad_call::{BadCall, GoodCall, Misuse, Refusal};
use crate::run::device::Device;
use crate::run::memory::Guarded;

/// The ways to misuse every call.
const OF_ALL: [Misuse; 15] = [
    ("nan_eps", Refusal::Eps, |call| call.spec.eps = f32::NAN),
    ("negative_eps", Refusal::Eps, |call| call.spec.eps = -1e-5),
    ("infinite_eps", Refusal::Eps, |call| call.spec.eps = f32::INFINITY),
    ("nan_weight_offset", Refusal::WeightOffset, |call| call.spec.weight_offset = f32::NAN),
    ("infinite_weight_offset", Refusal::WeightOffset, |call| call.spec.weight_offset = f32::NEG_INFINITY),
    ("no_cols", Refusal::EmptyRow, |call| call.spec.cols = 0),
    ("no_groups_of_columns", Refusal::Invalid("groups"), |call| call.spec.groups = 0),
    ("groups_that_leave_columns", Refusal::Invalid("groups"), |call| call.spec.groups = 2),
    ("rows_beyond_memory", Refusal::TooLarge("x"), |call| call.spec.rows = usize::MAX),
    ("mean_for_rms_norm", Refusal::Unexpected("mean"), |call| call.spec.norm = Norm::Rms),
    // Mixes that validation refuses.
    ("bf16_weight_for_f16", Refusal::Unsupported, |call| {
        call.change_dtypes(DTypes { weight: DType::Bf16, ..DTypes::uniform(DType::F16) });
    }),
    ("bf16_residual_for_f16", Refusal::Unsupported, |call| {
        call.change_dtypes(DTypes { residual: DType::Bf16, ..DTypes::uniform(DType::F16) });
    }),
    ("mean_for_l2_norm", Refusal::Unexpected("mean"), |call| call.spec.norm = Norm::L2),
    ("eps_whose_square_is_too_small", Refusal::Invalid("eps"), |call| {
        (call.spec.norm, call.spec.eps) = (Norm::L2Clamped, 1e-20);
    }),
    // Every call here has a residual, a gate before the norm or parts.
    ("weight_first_beside_what_makes_h", Refusal::Unsupported, |call| call.spec.cast_order = CastOrder::WeightFirst),
];

const OF_BACKWARD: &[Misuse] = &[
    ("no_lock_groups", Refusal::Invalid("grad_reduction"), |call| call.reduction = GradReduction::Locks { groups: 0 }),
    ("no_mean", Refusal::Missing("mean"), |call| call.lose(Tensor::Mean)),
];

/// If the residual is added after the norm, its gradient is dy.
const OF_DRESIDUAL: &[Misuse] =
    &[("dresidual_out_of_a_sum_after", Refusal::Unexpected("dresidual_out"), GoodCall::add_after)];

const OF_RESIDUAL: &[Misuse] = &[("residual_out_without_residual", Refusal::Unexpected("residual_out"), |call| {
    call.lose(Tensor::Residual);
})];

/// A way to falsify a tensor: its property, the error that names it, and the change.
type TensorMisuse = (&'static str, fn(&'static str) -> Refusal, fn(&mut Guarded));

const OF_TENSOR: [TensorMisuse; 6] = [
    ("short", Refusal::Length, |tensor| tensor.view.end -= 1),
    ("long", Refusal::Length, |tensor| tensor.view.end += 1),
    ("overlapping_rows_of", Refusal::Stride, |tensor| tensor.row_stride = Some(tensor.cols() - 1)),
    ("stride_beyond_memory_of", Refusal::TooLarge, |tensor| tensor.row_stride = Some(usize::MAX / 2)),
    ("empty_groups_of", Refusal::Invalid, |tensor| tensor.groups = Some(RowGroups { rows: 0, stride: 10 })),
    // Two adjacent rows per group; the third row starts before the second one ends.
    ("overlapping_groups_of", Refusal::Invalid, |tensor| {
        tensor.groups = Some(RowGroups { rows: 2, stride: 2 * tensor.cols() - 1 });
    }),
];

/// All invalid calls. A workspace that is too short is included if the backend needs a workspace.
pub(crate) fn bad_calls(device: &dyn Device) -> Vec<BadCall> {
    let of_kind = |kind: Kind| {
        let good = GoodCall::new(device, kind);
        let of_direction = match kind.calls {
            _ if !kind.has_forward() => OF_BACKWARD,
            Calls::One if !kind.is_after() => OF_RESIDUAL,
            Calls::One | Calls::InPlace | Calls::EndToEnd | Calls::Sums => &[],
        };
        let of_gradients = if kind.has_forward() || kind.gate().is_some() { &[][..] } else { OF_DRESIDUAL };
        let of_pieces = kind.pieces.iter().flat_map(pieces::misuse);
        // A tensor that the call has not can be neither missed nor unexpected.
        let is_there = |refusal| {
            let is_of = |arg| good.call.tensors.iter().any(|tensor| tensor.name.name() == arg);
            if let Refusal::Missing(arg) | Refusal::Unexpected(arg) = refusal { is_of(arg) } else { true }
        };
        let of_kind = of_direction.iter().chain(of_gradients).chain(of_pieces);
        let listed = OF_ALL.iter().chain(of_kind).filter(|(_, refusal, _)| is_there(*refusal));
        let listed = listed.map(|(what, refusal, falsify)| BadCall::new(kind, what, *refusal, *falsify));
        let sizes = good.call.tensors.iter().flat_map(|tensor| {
            let falsified = OF_TENSOR.into_iter().filter(|(what, ..)| match *what {
                "short" => !tensor.view.is_empty(),
                "long" => tensor.name != Tensor::Workspace,
                _ => tensor.name.is_matrix(),
            });
            let arg = match (kind.calls, tensor.name) {
                (Calls::Sums, Tensor::Dweight) => "dweight_sum",
                (Calls::Sums, Tensor::Dbias) => "dbias_sum",
                (_, tensor) => tensor.name(),
            };
            let name = tensor.name;
            falsified.map(move |(what, refusal, falsify)| {
                let falsify = move |call: &mut GoodCall| call.call.get_mut(name).into_iter().for_each(falsify);
                BadCall::new(kind, &format!("{what}_{arg}"), refusal(arg), falsify)
            })
        });
        listed.chain(sizes).collect::<Vec<_>>()
    };
    Kind::first_calls().flat_map(of_kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arithmetic;
    use crate::finding::Status;
    use crate::run::calls::Context;
    use crate::run::device::About;
    use crate::run::harness::{Answer, TransferError};
    use crate::run::memory::Call;
    use crate::selftest::simulate::SimulatedBackend;
    use futures_util::FutureExt;
    use futures_util::future::{LocalBoxFuture, ready};
    use pollster::block_on;
    use rmsnorm_spec::{Error, NormSpec, Problem};

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

        fn check_spans(&self) -> LocalBoxFuture<'_, Result<Result<(), String>, TransferError>> {
            ready(Ok(Ok(()))).boxed_local()
        }

        fn make<'a>(
            &'a self,
            _: &'a NormSpec,
            _: DTypes,
            _: GradReduction,
            call: &'a mut Call,
        ) -> LocalBoxFuture<'a, Answer> {
            let touched = self.touches.and_then(|slot| call.get_mut(slot));
            // Changes an element, which a valid call may write.
            touched.into_iter().for_each(|tensor| {
                let first = tensor.view.start.min(tensor.after.len() - 1);
                tensor.after[first] ^= 1;
            });
            ready((self.answer)()).boxed_local()
        }
    }

    fn statuses(device: &dyn Device) -> Vec<Status> {
        let arithmetic = Arithmetic::IEEE;
        let context = Context { device, arithmetic: &arithmetic };
        let run = |call: BadCall| block_on(call.run(context)).err().unwrap_or(Status::Pass);
        bad_calls(device).into_iter().map(run).collect()
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
        assert_eq!(passed(None), 18);
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
            [(Tensor::Weight, 0), (Tensor::Bias, 4), (Tensor::Y, 9), (Tensor::Dy, 12), (Tensor::Workspace, 12)]
        {
            assert_eq!(touched(Some(slot)), stages_without, "{slot:?}");
        }
    }
}
