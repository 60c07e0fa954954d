//! Fused RMSNorm and LayerNorm for burn tensors: one pass over memory forward and one backward,
//! with gradients.
//!
//! | function | result |
//! |---|---|
//! | [`rms_norm`] | RMS norm |
//! | [`gemma_rms_norm`] | RMS norm with `1 + weight` |
//! | [`layer_norm`] | layer norm, with a bias or without |
//! | [`add_rms_norm`], [`add_layer_norm`] | `h = residual + x`, and the norm of `h` |
//! | [`rms_norm_add`], [`gemma_rms_norm_add`], [`layer_norm_add`] | `h = residual +` the norm of `x` |
//! | [`rms_norm_add_rms_norm`], [`gemma_rms_norm_add_rms_norm`] | `h` as above, and the norm of `h` with a second weight |
//! | [`Norm`] | a norm as a value: these, and every other combination of the pieces |
//! | [`nn`] | modules that are configured and saved like burn's |
//!
//! # Shapes
//! Tensors have any rank from 1; the last dimension is normalized. Rows with at most two strides
//! are read without a copy: a `narrow` of a fused QKV tensor, or its heads. (On wgpu burn itself
//! copies some of these: see the module `wgpu`.) burn makes other tensors (a transpose, a
//! broadcast, a flip) contiguous first.
//!
//! # Dtypes and devices
//! Our kernels run on burn's CPU backend, `Device::flex()`, and with the feature `wgpu` on shared
//! wgpu devices (Vulkan, Metal, Direct3D 12; see the module `wgpu`). They take activations in f32,
//! f16 or bf16; the weight (with the bias, or the next norm's weight) and the residual have the
//! dtype of `x` or f32, and a gate that of `x`. They compute in f32 and round once, unless a
//! [`cast_order`](Norm::cast_order) rounds more. With an [`out_dtype`](Norm::out_dtype), weight and
//! gate go with y: one of x and y is f32, and the weight has the dtype of y or f32. All other calls
//! run as burn's own operations, in f32, or in f64 if a tensor is f64, with the same gradients: the
//! other backends (CUDA, ROCm and unshared wgpu devices through CubeCL, which fuses these
//! operations like any others; LibTorch; remote devices), f64, and mixes such as an f64 weight.
//!
//! # Gradients
//! x, residual, gate, weights and bias have gradients if burn tracks them; none is computed for an
//! untracked parameter or gate. Besides the results, the graph keeps x, the gate, the weights, and 4
//! bytes a row and group of columns for each RMS norm or 8 for a layer norm; with a residual before the norm, it keeps the sum instead
//! of x. With gradient checkpointing, y is recomputed if another operation needs it, on the CPU
//! with the same bits. y is kept if an input is untracked, or if the residual is wider. Sums are
//! always kept.
//!
//! # Memory
//! Results are new tensors. On the CPU, as in burn's own operations, a result overwrites an
//! argument that has no other owner: no clone of the caller, no view, no graph. y overwrites `x` of
//! its dtype; with a residual before the norm, the sum overwrites the residual in the same call, if
//! both have no other owner. With a residual after the norm, the sum overwrites the residual,
//! unless there is a next norm: then both results are new.
//!
//! # Panics
//! As burn's operations, these functions panic on wrong arguments, with the name of the tensor: a
//! wrong length or dtype, an `eps` that is negative or not finite, groups that do not divide the
//! columns, pieces that do not go together, or a tensor that is not on the shared wgpu device of
//! `x`. Nothing is broadcast. `eps` has no default, except in the configs of [`nn`], which have
//! burn's.
//!
//! # Threads
//! Large calls are split over rayon's pool, which burn uses too. Results do not depend on the
//! number of threads.
//!
//! # Debug builds
//! Unoptimized, the CPU kernels are about 120 times slower. Add to your workspace:
//!
//! ```toml
//! [profile.dev.package.rmsnorm-cpu]
//! opt-level = 3
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod check;
mod flex;
mod functions;
mod kernels;
mod native;
pub mod nn;
pub mod norm;
mod ops;
mod slow;
#[cfg(feature = "wgpu")]
pub mod wgpu;

/// The programs of these pages are tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../../docs/guide/burn.md")]
    mod guide {}
}

pub use functions::{
    add_layer_norm, add_rms_norm, gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm, layer_norm,
    layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
};
pub use norm::Norm;
#[doc(no_inline)]
pub use rmsnorm_core::{Activation, CastOrder};
