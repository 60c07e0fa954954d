//! Fused RMSNorm and LayerNorm in WGSL, forward and backward, on any device that wgpu finds: Vulkan, Metal, Direct3D 12.
//!
//! [`WgpuBackend`] implements [`rmsnorm_spec::NormBackend`] over views of the caller's own [`wgpu::Buffer`]s, on the
//! caller's own device and queue, and records into the caller's own [`wgpu::CommandEncoder`]. Nothing is copied, nothing
//! waits. Nothing is allocated but the numbers of a call and one workspace for the partial sums of weight gradients,
//! which can be passed in instead.
//!
//! Every device will do that has storage buffers and workgroup memory: the limits and features of WebGPU's defaults, and
//! most of what is below them. bf16 is unpacked by integer arithmetic, and so is f16, so that they need no feature and round as
//! IEEE 754 says. With `SHADER_F16` the device's own conversions of f16 are used, if a shader finds that they do the same. Subgroups are
//! used where they are there. A kernel binds as many storage buffers as a call has tensors: up to the 8 of WebGPU's defaults, but for two
//! layer norms around a residual with all their statistics, which are 12 and `Unsupported` on a device with fewer; two RMS norms
//! with theirs are 8.
//!
//! | here | role |
//! |---|---|
//! | `adapter` | devices of our own: which there are |
//! | `view` | elements of a buffer |
//! | `caps` | what the device offers, read once |
//! | `plan` | a pure function of the problem, the layout and the caps: which kernels, how large, on which rows |
//! | `params` | the uniform buffer of every kernel |
//! | `source` | a kernel's text: constants and accessors, then files of `shaders/` |
//! | `kernel` | pipelines, and what the driver compiled on disk |
//! | `launch` | arguments to bindings, plans to dispatches |
//! | `recording` | where calls go instead of being submitted |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod adapter;
mod backend;
mod caps;
mod error;
#[cfg(feature = "conformance")]
mod harness;
mod kernel;
mod launch;
mod params;
mod plan;
mod recording;
mod source;
#[cfg(feature = "conformance")]
mod tunable;
mod view;

pub use backend::WgpuBackend;
pub use error::WgpuFailure;
#[cfg(feature = "conformance")]
pub use harness::TestBuffer;
pub use recording::{Recorder, Target};
#[doc(no_inline)]
pub use rmsnorm_spec as spec;
pub use view::WgpuSlice;
pub use wgpu;

/// The tensors of a forward call on views of wgpu's buffers.
pub type Forward<'a, T, W = T, R = T> = spec::Forward<'a, WgpuBackend, T, W, R>;
/// The tensors of a backward call on views of wgpu's buffers.
pub type Backward<'a, T, W = T, R = T> = spec::Backward<'a, WgpuBackend, T, W, R>;
/// The tensors of a quantized forward call on views of wgpu's buffers.
pub type QuantizedForward<'a, T, C, W = T, R = T> = spec::QuantizedForward<'a, WgpuBackend, T, C, W, R>;
