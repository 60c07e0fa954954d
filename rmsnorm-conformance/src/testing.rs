//! The test kit, for tests of a backend, of its measurements and of programs that use it.
//!
//! | item | purpose |
//! |---|---|
//! | [`values`] | data without structure, the same on every machine |
//! | [`Guarded`] | a tensor inside memory that must not change; a [`Call`] consists of them |
//! | [`available`], [`skip_or_fail`] | skip a missing device, or fail if `RMSNORM_REQUIRE` names it |
//! | [`swept`] | some of thousands of calls, or all if `RMSNORM_SWEEP` says so |
//! | [`ForwardTruth`], [`QuantizedTruth`], [`BackwardTruth`] | expected results: reference, bounds, judge |
//! | [`Passes`] | the forward and backward pass of a function with gradients |
//!
//! # Example
//! A call in guarded memory, and the judgement of its result:
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
//!     kind: Kind::FORWARD,
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
//! // A write to one element after the last row is detected.
//! let y = call.get_mut(Tensor::Y).unwrap();
//! y.after[y.view.end] ^= 1;
//! assert!(call.breach().is_some());
//! ```

mod passes;
mod require;
mod sweep;
mod values;

pub use crate::case::data::Given;
pub use crate::judge::gate::Gated;
pub use crate::judge::quantized::QuantizedTruth;
pub use crate::judge::truth::{BackwardTruth, ForwardTruth};
pub use crate::run::harness::{Answer, TransferError};
pub use crate::run::memory::{Access, Bits, Call, Fill, Guarded, Outputs, Placement, Poison};
pub use passes::Passes;
pub use require::{TestFailure, available, skip_or_fail};
pub use sweep::swept;
pub(crate) use values::draw;
pub use values::{bits, exact, splitmix, value, values};
