//! Fused RMSNorm and LayerNorm in WGSL, forward and backward, on every device that wgpu supports:
//! Vulkan, Metal, Direct3D 12, and in browsers WebGPU.
//!
//! [`WgpuBackend`] implements [`rmsnorm_spec::NormBackend`] over views of the caller's
//! [`wgpu::Buffer`]s, on the caller's device and queue, and can record into the caller's
//! [`wgpu::CommandEncoder`]. Calls copy no matrix and do not wait. A call allocates a uniform
//! buffer, and for weight gradients a workspace unless the caller passes one.
//!
//! In a browser, which lets no program wait, devices are opened by [`WgpuBackend::new_async`], and
//! [`WgpuBackend::catch`] returns the device's errors.
//!
//! A device needs storage buffers and workgroup memory: WebGPU's default limits and features
//! suffice, and most lower limits do. bf16 and f16 are converted by integer arithmetic, which needs
//! no feature and rounds as IEEE 754 requires. With `SHADER_F16` the device's f16 conversions are
//! used if a test shader finds that they are exact. Subgroups are used if available. A kernel binds
//! one storage buffer per tensor of the call. A device may have fewer: two layer norms around a
//! residual with all their statistics have 12 tensors, and WebGPU's default is 8. Then small
//! kernels copy weights and biases into one buffer before the kernel, and statistics out of it
//! afterwards.
//!
//! | module | role |
//! |---|---|
//! | `adapter` | adapters and devices that this crate opens |
//! | `view` | elements of a buffer |
//! | `caps` | the capabilities of a device, read once |
//! | `check_f16` | whether the device converts f16 exactly |
//! | `download` | buffers read by the host |
//! | `plan` | a pure function of problem, layout and caps: kernels, their sizes and their rows |
//! | `params` | the uniform buffer of every kernel |
//! | `source` | the text of a kernel: constants and accessors, then files of `shaders/` |
//! | `kernel` | pipelines, and the driver's compiled code on disk |
//! | `shared` | a device with its kernels and memory |
//! | `launch` | arguments to bindings, plans to dispatches |
//! | `recording` | calls that are recorded instead of submitted |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod adapter;
mod backend;
mod caps;
mod check_f16;
mod download;
mod error;
#[cfg(feature = "conformance")]
mod harness;
mod kernel;
mod launch;
mod params;
mod plan;
mod recording;
mod shared;
mod source;
#[cfg(feature = "conformance")]
mod tunable;
mod unfit;
mod view;

pub use backend::WgpuBackend;
pub use error::WgpuFailure;
#[cfg(feature = "conformance")]
pub use harness::TestBuffer;
pub use launch::Target;
pub use recording::Recorder;
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
