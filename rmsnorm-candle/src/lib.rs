//! Fused RMSNorm and LayerNorm for candle tensors: one pass over memory forward and one backward,
//! with gradients.
//!
//! | function | result |
//! |---|---|
//! | [`rms_norm`] | RMS norm |
//! | [`gemma_rms_norm`] | RMS norm with `1 + weight` |
//! | [`layer_norm`] | layer norm, with a bias or without |
//! | [`add_rms_norm`], [`add_layer_norm`] | `h = residual + x`, and the norm of `h` |
//! | [`rms_norm_add`], [`gemma_rms_norm_add`], [`layer_norm_add`] | `h = residual +` the norm of `x` |
//! | [`rms_norm_add_rms_norm`], [`gemma_rms_norm_add_rms_norm`] | `h` as above, and the norm of `h` |
//! | [`rms_norm_in_place`], [`gemma_rms_norm_in_place`], [`layer_norm_in_place`] | overwrites `x` with the norm, for inference |
//! | [`Norm`] | a norm as a value: these, and every other combination of the pieces |
//! | [`nn`] | modules that load from a `VarBuilder`, like those of candle-nn |
//!
//! # Shapes
//! Tensors have any rank from 1; the last dimension is normalized. Rows with at most two strides
//! are read without a copy: a `narrow` of a fused QKV tensor, or its heads. Other tensors (a
//! transpose, a broadcast) are made contiguous first, with an operation that has a gradient.
//!
//! # Dtypes and devices
//! Our kernels run on the CPU and, with the feature `cuda`, on NVIDIA GPUs. They take activations
//! in f32, f16 or bf16; the weight (with the bias) and the residual have the dtype of `x` or f32.
//! They compute in f32 and round once, unless a [`cast_order`](Norm::cast_order) rounds more. With
//! an [`out_dtype`](Norm::out_dtype), weight and gate go with y: one of x and y is f32, and the
//! weight has the dtype of y or f32. All other calls run as candle's own operations, in f32, or in
//! f64 if a tensor is f64, with the same gradients: other devices (Metal, and CUDA without the
//! feature), f64, and mixes such as an f64 weight.
//!
//! # CUDA
//! A call is enqueued on the stream of its tensors' device, without waiting. The first call of each
//! kind compiles its kernel, which takes up to a second; kernels are loaded once for each context
//! and stay loaded. Results are not zeroed before they are written, and the statistics for backward
//! stay on the GPU. candle gives a device of `Device::new_cuda` one stream for each thread of the
//! program: call `Device::synchronize` before another thread uses a tensor.
//!
//! To build candle's feature `cuda`, nvcc and the libraries of a CUDA toolkit are needed.
//!
//! # Gradients
//! x, residual, weights and bias have gradients if candle tracks them. A frozen tensor has none,
//! except the weight of [`layer_norm_add`] if the bias is tracked. Forward saves x and weight,
//! which candle's graph holds anyway, and the statistics: 4 bytes a row for each RMS norm, 8 for a
//! layer norm. Gradients have no gradients themselves, as with all fused operations of candle.
//!
//! candle's own fused `candle_nn::ops::rms_norm` and `layer_norm`, and the candle-nn modules that
//! use them, have no gradient and return no error about it.
//!
//! # Errors
//! A wrong length, dtype or device, and an `eps` that is negative or not finite, are errors that
//! name the tensor. Pieces that do not go together are errors too. Nothing is broadcast. `eps` has
//! no default.
//!
//! # Replacing other norms
//! | other | here |
//! |---|---|
//! | candle-nn's modules `RmsNorm`, `LayerNorm`, and the functions that load them | the same names in [`nn`], or `From` for a loaded module |
//! | candle-nn's `ops::rms_norm(&x, &w, eps)`, `ops::layer_norm(&x, &w, &b, eps)` | [`rms_norm`]`(&x, &w, eps)`, [`layer_norm`]`(&x, &w, Some(&b), eps)` |
//! | `rms_norm(x, w, None, eps)`, `layer_norm(x, w, b, eps)` of candle-layer-norm (text-embeddings-inference) | the same without the `None`, for any rank, also on the CPU |
//! | `fused_add_rms_norm(x, res, w, None, eps)`, `fused_add_layer_norm(x, res, w, b, eps)`: `(result, residual_add)` | [`add_rms_norm`]`(x, res, w, eps)`, [`add_layer_norm`]`(x, res, w, b, eps)`: the same pair |
//! | `let x = (x + residual)?; let y = norm.forward(&x)?`, in candle-vllm and candle's own models | `let (y, x) = norm.add_forward(&x, &residual)?` |
//! | Gemma's `weight + 1`, rounded to the weight's dtype: candle-vllm, mistral.rs | [`nn::gemma_rms_norm`], [`gemma_rms_norm`]: `1 + weight` in f32 |
//! | a weight cast to bf16 | the f32 weight, without a cast |
//! | L2 norms of q and k: gated delta nets | [`Norm::l2`]`(eps)`, or [`Norm::l2_clamped`]`(eps)` for PyTorch's `F.normalize` |
//! | `(x * rstd).to_dtype(..)? * weight`: Llama and others | [`Norm::rms`]`(eps).cast_order(CastOrder::BeforeWeight)`; [`CastOrder`] has more |
//! | a norm of a bf16 stream, and a cast to f32: routers | [`Norm::rms`]`(eps).out_dtype(DType::F32)`, which rounds once |
//! | strided norms of q and k: mistral.rs | [`rms_norm`] of the heads from `narrow`, before the transpose; or in place |
//! | `residual + norm(x)`: mistral.rs's Gemma | [`gemma_rms_norm_add`]`(&x, &residual, &w, eps)`, or `norm.forward_add(&x, &residual)` |
//! | `residual + norm(x)` and its next norm | [`gemma_rms_norm_add_rms_norm`]`(&x, &residual, &w1, &w2, eps)`, or `norm.forward_add_forward(&x, &residual, &next)` |
//!
//! # Threads
//! Large calls are split over rayon's pool, which candle uses too. Results do not depend on the
//! number of threads. As with candle's own operations, a call holds candle's locks of the tensors'
//! storages while it runs. Tasks of the pool that overwrite parts of one storage at the same time,
//! such as q and k of a fused buffer, may wait for each other forever; overwrite them one after the
//! other.
//!
//! # Debug builds
//! Unoptimized, the CPU kernels are about 120 times slower. Add to your workspace:
//!
//! ```toml
//! [profile.dev.package.rmsnorm-cpu]
//! opt-level = 3
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod call;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod functions;
mod native;
pub mod nn;
pub mod norm;
mod ops;
mod rows;
mod slow;

/// The programs of these pages are tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../../docs/guide/candle.md")]
    mod guide {}
}

pub use functions::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm,
    gemma_rms_norm_in_place, layer_norm, layer_norm_add, layer_norm_in_place, rms_norm, rms_norm_add,
    rms_norm_add_rms_norm, rms_norm_in_place,
};
pub use norm::Norm;
pub use rmsnorm_core::{Activation, CastOrder};
