//! rmsnorm's fused RMSNorm and LayerNorm on candle's tensors: one pass over memory forward and one backward, with gradients.
//!
//! | function | gives |
//! |---|---|
//! | [`rms_norm`] | RMS norm |
//! | [`gemma_rms_norm`] | RMS norm by `1 + weight` |
//! | [`layer_norm`] | layer norm, with a bias or without |
//! | [`add_rms_norm`], [`add_layer_norm`] | `residual + x`, and its norm |
//! | [`rms_norm_add`], [`gemma_rms_norm_add`], [`layer_norm_add`] | `residual` + the norm of x |
//! | [`rms_norm_add_rms_norm`], [`gemma_rms_norm_add_rms_norm`] | that, and its norm |
//! | [`rms_norm_in_place`], [`gemma_rms_norm_in_place`], [`layer_norm_in_place`] | y over x, for inference |
//! | [`nn`] | modules that load from a `VarBuilder`, as candle-nn's |
//!
//! # Shapes
//! Tensors have any rank from 1, and the last dimension is normalized. Rows are read where they lie if they have at most two
//! strides: a `narrow` of a fused QKV tensor, its heads. What is less regular (a transpose, a broadcast) is made contiguous
//! first, by an operation that has its gradient too.
//!
//! # Dtypes and devices
//! Kernels of ours run on the CPU and, with the feature `cuda`, on NVIDIA GPUs, where activations are f32, f16 or bf16, and the
//! weight (with the bias) and the residual have the dtype of `x` or f32. They compute in f32 and round once. Anything else takes
//! candle's own operations, in f32 or, where a tensor is f64, in f64, with the same gradients: other devices (Metal, and CUDA
//! without the feature), f64, and mixes such as an f64 weight.
//!
//! # CUDA
//! A call is enqueued on the stream of its tensors' device, and waits for nothing; the first of each kind compiles its kernel, up to
//! a second. Kernels are loaded once for each context, and stay. Results are memory that nobody zeroes first, and the statistics
//! that backward needs stay on the GPU. Devices of `Device::new_cuda` have a stream for each thread of the program, as candle
//! makes them: `Device::synchronize` before a tensor goes to another thread.
//!
//! To build, candle's own `cuda` needs nvcc and the libraries of a CUDA toolkit.
//!
//! # Gradients
//! Of x, residual, weights and bias, wherever candle tracks them: none is kept of a frozen tensor, but for [`layer_norm_add`]'s weight
//! beside a bias. Forward saves what candle's graph holds anyway, x and weight, and 4 bytes a row for each RMS norm, 8 for a layer
//! norm. Gradients have no gradient of their own, as with all fused operations of
//! candle.
//!
//! candle's own fused `candle_nn::ops::rms_norm` and `layer_norm`, and the modules of candle-nn where they use them, have no
//! gradient and say nothing about it.
//!
//! # Errors
//! A length, a dtype or a device that does not fit, and an `eps` that is negative or not finite, are errors that name the
//! tensor. Nothing is broadcast. `eps` has no default.
//!
//! # In place of other norms
//! | today | here |
//! |---|---|
//! | candle-nn's modules `RmsNorm`, `LayerNorm`, and what loads them | the same names in [`nn`], or `From` for one that is loaded |
//! | candle-nn's `ops::rms_norm(&x, &w, eps)`, `ops::layer_norm(&x, &w, &b, eps)` | [`rms_norm`]`(&x, &w, eps)`, [`layer_norm`]`(&x, &w, Some(&b), eps)` |
//! | candle-layer-norm, of text-embeddings-inference: `rms_norm(x, w, None, eps)`, `layer_norm(x, w, b, eps)` | the same without the `None`, of any rank, on the CPU too |
//! | `fused_add_rms_norm(x, res, w, None, eps)`, `fused_add_layer_norm(x, res, w, b, eps)`: `(result, residual_add)` | [`add_rms_norm`]`(x, res, w, eps)`, [`add_layer_norm`]`(x, res, w, b, eps)`: the same pair |
//! | `let x = (x + residual)?; let y = norm.forward(&x)?`, in candle-vllm and candle's own models | `let (y, x) = norm.add_forward(&x, &residual)?` |
//! | Gemma's `weight + 1`, rounded to the weight's dtype: candle-vllm, mistral.rs | [`nn::gemma_rms_norm`], [`gemma_rms_norm`]: `1 + weight` in f32 |
//! | a weight that is cast to bf16 | the f32 weight as it is |
//! | norms of q and k by strides: mistral.rs | [`rms_norm`] of the heads as `narrow` gives them, before they are transposed; or in place |
//! | residual + norm(x), of mistral.rs's Gemma | [`gemma_rms_norm_add`]`(&x, &residual, &w, eps)`, or `norm.forward_add(&x, &residual)` |
//! | and the next norm of that | [`gemma_rms_norm_add_rms_norm`]`(&x, &residual, &w1, &w2, eps)`, or `norm.forward_add_forward(&x, &residual, &next)`; of layer norms by two functions |
//!
//! # Threads
//! Large calls are split over rayon's pool, which candle uses as well. Results do not depend on the number of threads. While that runs,
//! candle's locks of the tensors' storages are held, as with operations of its own: tasks of the pool that overwrite parts of one
//! storage, such as q and k of a fused buffer, may wait for each other forever. One after the other they do not.
//!
//! # Debug builds
//! Unoptimized, the CPU kernels are about 120 times slower. In the workspace that you build:
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
