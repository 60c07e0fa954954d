//! The definition of a fused normalization for every backend: the [`NormBackend`] trait, the
//! argument structs, validation, the reference in f64 ([`mod@reference`]) and the
//! [mathematics](math).
//!
//! This crate touches no device and no environment variable, and has no unsafe code. Users depend
//! on `rmsnorm-core`, which re-exports it; backends depend on this crate, and `rmsnorm-conformance`
//! tests them.
//!
//! | here | PyTorch | meaning |
//! |---|---|---|
//! | `rows`, `cols` | product of batch dimensions, `normalized_shape` | statistics run over `cols` |
//! | [`Forward`] | `F.rms_norm`, `F.layer_norm` | views of the caller's tensors |
//! | [`Backward`] | `native_layer_norm_backward` | the gradients, from saved statistics |
//! | [`QuantizedForward`] | a norm and `to(torch.float8_e4m3fn)` with its scales | 8-bit codes in one pass |
//! | `weight`, `bias` | `weight`, `bias` (gamma, beta) | (cols) |
//! | `residual`, `residual_out` | `x = x + residual` before the norm | the residual stream |
//! | [`PartialStatistics`], [`WithStatistics`] | | rows whose columns are divided among ranks |
//! | [`ResidualPlacement::After`] | `residual + norm(x)`, and optionally the next norm of it | post-norm (Gemma 2 and 3) |
//! | `mean`, `rstd` | `save_mean`, `save_invstd` | (rows), or (rows, groups) with groups of columns; always f32 |
#![forbid(unsafe_code)]

#[macro_use]
mod sets;

mod args;
mod backend;
pub mod depth;
mod dtype;
mod error;
#[doc = include_str!("../math.md")]
pub mod math {}
mod memory;
mod norm;
mod piece;
mod problem;
pub mod quant;
pub mod reference;
mod storage;
mod tensor;

pub use args::{
    AnyBackward, AnyForward, AnyIn, AnyOut, AnyPartialBackwardStatistics, AnyPartialStatistics, AnyQuantizedForward,
    Untyped,
};
pub use args::{
    Backward, Forward, OutputRows, PartialBackwardStatistics, PartialStatistics, Parts, QuantizedForward, RowGroups,
    RowLayout, Rows, Scales, ShardedRows, Source, Visitor, WithStatistics,
};
pub use backend::NormBackend;
pub use dtype::{DType, DTypes, Element, bf16, f16};
pub use error::Error;
pub use memory::{HostMemory, Memory};
pub use norm::{Activation, CastOrder, Gate, GradReduction, GradStore, Norm, NormParams, NormSpec, ResidualPlacement};
pub use piece::{Piece, PieceSet, Slot};
pub use problem::{AnyCall, Checked, Problem, Span, Statistics, check_columns_form};
pub use storage::{AnyElement, Code, F8E4M3, F8E5M2, Storage};
pub use tensor::{Access, Direction, Role, Tensor, TensorSet, TensorShape};
