//! The tensors of a call, as named borrowed views.
//!
//! Matrices are row-major, (rows, cols), and the last dimension is dense. Each matrix may have a
//! row stride above `cols` (a slice of a fused QKV buffer, [`Rows::strided`]) or rows in groups
//! (the heads of a token in that buffer, [`Rows::grouped`]). A call has three dtypes: `T` for the
//! activations, `W` for weight and bias, `R` for the residual stream. `W` and `R` are each `T` or
//! `f32`. [`Forward::cast`] and [`Backward::cast`] also take an `R` of 16 bits where `T` is `f32`.
//! Saved statistics are always `f32`.
//!
//! Builder methods fill the structs, so a new optional tensor does not break callers.

mod any;
mod backward;
mod columns;
mod forward;
mod quantized_forward;
mod row_layout;
mod rows;
mod sharded_rows;
mod tensors;
mod visit;

pub use any::{
    AnyBackward, AnyForward, AnyIn, AnyOut, AnyPartialBackwardStatistics, AnyPartialStatistics, AnyQuantizedForward,
    Untyped,
};
pub use backward::Backward;
pub use columns::{PartialBackwardStatistics, PartialStatistics, WithStatistics};
pub use forward::Forward;
pub use quantized_forward::{QuantizedForward, Scales};
pub use row_layout::{RowGroups, RowLayout};
pub use rows::{Parts, Rows, Source};
pub use sharded_rows::{OutputRows, ShardedRows};
use tensors::tensors;
pub use visit::Visitor;
pub(crate) use visit::{SpanVisitor, View, Views};
