//! The tensors of a call, as named borrowed views.
//!
//! Matrices are row-major with `rows` rows of `cols` elements; the last dimension is dense, rows may be further apart
//! than `cols` (a slice of a fused QKV buffer), each matrix with a row stride of its own: [`Rows::strided`]. Rows may lie in
//! groups (the heads of a token in that buffer): [`Rows::grouped`]. Three dtypes meet in a call: `T` of the activations, `W` of
//! weight and bias, `R` of the residual stream; `W` and `R` are each `T` or `f32`. Saved statistics are always `f32`.
//!
//! The structs are built by methods, so that an optional tensor can be added without breaking a caller.

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
    AnyBackward, AnyBackwardStatistics, AnyColumnStatistics, AnyForward, AnyIn, AnyOut, AnyQuantizedForward, Untyped,
};
pub use backward::Backward;
pub use columns::{BackwardStatistics, ColumnStatistics, Given};
pub use forward::Forward;
pub use quantized_forward::{QuantizedForward, Scales};
pub use row_layout::{RowGroups, RowLayout};
pub use rows::{Parts, Rows, Source};
pub use sharded_rows::{ShardedRows, YRows};
use tensors::tensors;
pub use visit::Visitor;
pub(crate) use visit::{SpanVisitor, View, Views};
