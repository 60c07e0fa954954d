//! rmsnorm's fused RMSNorm and LayerNorm on burn's tensors: one pass over memory forward and one backward, with gradients.
//!
//! | function | gives |
//! |---|---|
//! | [`rms_norm`] | RMS norm |
//! | [`gemma_rms_norm`] | RMS norm by `1 + weight` |
//! | [`layer_norm`] | layer norm, with a bias or without |
//! | [`add_rms_norm`], [`add_layer_norm`] | `residual + x`, and its norm |
//! | [`rms_norm_add`], [`gemma_rms_norm_add`], [`layer_norm_add`] | `residual` and the norm of `x`, added |
//! | [`rms_norm_add_rms_norm`], [`gemma_rms_norm_add_rms_norm`] | that sum, and its norm by a weight of its own |
//! | [`nn`] | modules that are configured and saved as burn's |
//!
//! # Shapes
//! Tensors have any rank from 1, and the last dimension is normalized. Rows are read where they lie if they have at most two
//! strides: a `narrow` of a fused QKV tensor, its heads. (On wgpu burn itself copies some of these: see the module `wgpu`.) What is less regular (a transpose, a broadcast, a flip) burn makes
//! contiguous first.
//!
//! # Dtypes and devices
//! Kernels of ours run on burn's CPU backend, `Device::flex()`, and with the feature `wgpu` on its wgpu devices (Vulkan, Metal,
//! Direct3D 12) that were shared (see the module `wgpu`), where activations are f32, f16 or bf16, and the weight (with the
//! bias, or the next norm's weight) and the residual have the dtype of `x` or f32. They compute in f32 and round once. Anything
//! else takes burn's own operations, in f32 or, where a tensor is f64, in f64, with the same gradients: the other backends (CUDA,
//! ROCm and wgpu devices that were not shared, by CubeCL, whose fusion sees these operations as any others; LibTorch; remote
//! devices), f64, and mixes such as an f64 weight.
//!
//! # Gradients
//! Of x, residual, weights and bias, wherever burn tracks them: none is computed of an untracked parameter. The graph keeps x, the
//! weights and 4 bytes a row and norm, of layer norm 8, beside the results; where a residual is added before the norm, the sum
//! instead of x. With gradient checkpointing, y is not kept but computed again, on the CPU with the same bits, where another operation needs
//! it; it is kept where an input is untracked, and beside a wider residual. Sums are kept.
//!
//! # Memory
//! Results are new tensors, and on the CPU, as in burn's own operations, they take the place of what is moved into the call and that
//! nobody else has: not its caller, not a view, not a graph. y takes that of `x`; with a residual that is added before the norm, the
//! sum takes its place at the same time, if both are so. The sum of a residual that is added after the norm takes the residual's
//! place, unless it has a next norm: both results are new then.
//!
//! # Panics
//! burn's operations panic where arguments do not fit, and so do these, with the name of the tensor: where a length or a dtype
//! does not fit, and where `eps` is negative or not finite, or a tensor is not on the shared wgpu device of `x`. Nothing is broadcast.
//! `eps` has no default but that of burn's configs, which [`nn`] has as they are.
//!
//! # Threads
//! Large calls are split over rayon's pool, which burn uses as well. Results do not depend on the number of threads.
//!
//! # Debug builds
//! Unoptimized, the CPU kernels are about 120 times slower. In the workspace that you build:
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
mod ops;
mod path;
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
