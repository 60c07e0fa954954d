//! The test kit: what tests of a backend, of its measurements and of programs that use it need beside the suite.
//!
//! | of these there is one | for |
//! |---|---|
//! | [`values`] | data without structure, the same everywhere |
//! | [`Guarded`] | a tensor amid memory that must stay as it was; a [`Call`] is made of them |
//! | [`available`], [`skip_or_fail`] | a device that a machine lacks: skipped, or a failure where `RMSNORM_REQUIRE` names it |
//! | [`swept`] | a part of thousands of calls, or all where `RMSNORM_SWEEP` says so |
//! | [`ForwardTruth`], [`QuantizedTruth`], [`BackwardTruth`] | what a call must give: reference, derived bounds, and the judge of its outputs |
//! | [`Passes`] | both of a function with gradients |
//!
//! # Example
//! A call in guarded memory, judged:
//! ```
//! use rmsnorm_conformance::bounds::{Mode, Model};
//! use rmsnorm_conformance::simulate::SimulatedBackend;
//! use rmsnorm_conformance::spec::{DType, DTypes, GradReduction, NormSpec, Tensor, reference::ForwardInputs};
//! use rmsnorm_conformance::testing::{Access, Call, Fill, ForwardTruth, Guarded, Placement, Poison, exact, values};
//! use rmsnorm_conformance::{Harness, Kind};
//!
//! let (backend, spec) = (SimulatedBackend::new(None), NormSpec::rms(4, 33, 1e-6));
//! let x = exact(&values::<f32>(1, 4 * 33));
//! let place = Placement { pad: 3, offset: 1, ..Placement::DENSE };
//! let guarded = |name, access, fill| Guarded::new((name, DType::F32, access), (4, 33), place, &fill, 0);
//! let mut call = Call {
//!     kind: Kind::Forward,
//!     quant: None,
//!     parts: 1,
//!     tensors: vec![
//!         guarded(Tensor::X, Access::Read, Fill::Values(&x)),
//!         guarded(Tensor::Y, Access::Write, Fill::Poison(Poison::Nan)),
//!     ],
//! };
//! call.make(&backend, &spec, DTypes::uniform(DType::F32), GradReduction::Partials).unwrap().unwrap();
//! assert_eq!(call.breach(), None);
//!
//! let inputs = ForwardInputs { x: &x, residual: None, weight: None, bias: None };
//! let model = Model { arithmetic: &backend.arithmetic(), mode: Mode::Worst };
//! let truth = ForwardTruth::new(&spec, inputs, DType::F32, None, model);
//! assert!(truth.judge_bits(Tensor::Y, call.outputs().get(Tensor::Y).unwrap()).is_pass());
//!
//! // One element behind the last row.
//! let y = call.get_mut(Tensor::Y).unwrap();
//! y.after[y.view.end] ^= 1;
//! assert!(call.breach().is_some());
//! ```

mod passes;
mod require;
mod sweep;
mod values;

pub use crate::case::quantized::Given;
pub use crate::judge::quantized::QuantizedTruth;
pub use crate::judge::truth::{BackwardTruth, ForwardTruth};
pub use crate::run::device::{Answer, TransferError};
pub use crate::run::memory::{Access, Bits, Call, Fill, Guarded, Outputs, Placement, Poison};
pub use passes::Passes;
pub use require::{TestFailure, available, skip_or_fail};
pub use sweep::swept;
pub use values::{bits, exact, splitmix, value, values};
