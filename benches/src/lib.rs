//! Speed of the backends: the library behind `rmsnorm bench`, `rmsnorm compare` and the criterion benchmarks.
//!
//! Rates count the fewest bytes that an operation must move, so that they compare with a plain copy. Tensors
//! exist in several sets that are visited in turn and together exceed every cache, unless the call is too
//! small. A result is checked before it is timed. Each backend supplies its own timer: [`Measurable`].
//!
//! ```text
//! selection -> workload (operation, pattern) -> check -> clock (measurable, devices) -> document -> figure -> tables, targets, plot
//! ```
#![forbid(unsafe_code)]

pub mod bars;
mod buffer;
mod check;
mod clock;
mod devices;
pub mod document;
mod error;
pub mod figure;
mod form;
mod measurable;
mod operation;
mod pattern;
pub mod plot;
mod quant;
pub mod ranks;
mod scheme;
pub mod selection;
pub mod shapes;
pub mod side_by_side;
pub mod targets;
pub mod tune;
mod workload;

pub use clock::{Samples, Sampling, Timing, alternate};
pub use devices::measure;
pub use error::BenchError;
pub use form::Form;
pub use measurable::{Measurable, Measurement, Mode, Sets};
pub use operation::{Op, Operation, REDUCTIONS, reduction_name};
pub use quant::Quant;
pub use shapes::Shape;
pub use workload::{Workload, problem, workload_bytes};
