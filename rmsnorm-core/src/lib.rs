//! Fused RMSNorm and LayerNorm, forward and backward: one pass over memory, behind one trait.
//!
//! Depend on this crate. It re-exports `rmsnorm-spec` (the [`NormBackend`] trait, the argument
//! structs, the definition), and each backend as a module behind a feature. [`available`] and
//! [`AnyBackend`] choose a backend at run time. This crate has no kernels and no unsafe code.
//!
//! # Where to begin
//! 1. Choose a backend: `cpu::CpuBackend`, `cuda::CudaBackend` or `wgpu::WgpuBackend`.
//! 2. Describe the norm with a [`NormSpec`]: [`NormSpec::rms`] or [`NormSpec::layer`].
//! 3. Pass tensors with [`Forward`], [`Backward`] or [`QuantizedForward`]. The page of [`Forward`]
//!    has a table of which tensors go together, and each backend has an alias of it, such as
//!    `cpu::Forward`.
//! 4. Call [`NormBackend::forward`], [`NormBackend::backward`] or
//!    [`NormBackend::quantized_forward`].
//!
//! | guide, in `docs/guide` of the repository | about |
//! |---|---|
//! | `rust.md` | programs for the CPU, CUDA and wgpu, all calls, and their costs |
//! | `fp8.md` | FP8 and int8 results: kinds of scales, layouts, training |
//! | `several_gpus.md` | all-reduce, residual and norm in one kernel (`rmsnorm-dist`, `rmsnorm-cuda`) |
//! | `reproducibility.md` | the settings and shapes that change the last bits of results |
//! | `candle.md`, `burn.md` | the crates `rmsnorm-candle` and `rmsnorm-burn` |
//!
//! | feature | module | brings |
//! |---|---|---|
//! | `cpu` (default) | `cpu` | the CPU backend |
//! | `cuda` | `cuda` | the CUDA backend; builds without CUDA, and reports missing libraries at run time |
//! | `wgpu` | `wgpu` | the wgpu backend: Vulkan, Metal and Direct3D 12, with no SDK |
//! | `conformance` | `conformance` | the test suite for backends, and [`AnyBackend`]'s `dispatch_harness` |
//!
//! # Debug builds
//! A debug build of your program runs the CPU kernels about 120 times slower than a release build,
//! because a dependency cannot set its own optimization level. Set it in your workspace:
//!
//! ```toml
//! [profile.dev.package.rmsnorm-cpu]
//! opt-level = 3
//! ```
//!
//! # Example
//! Forward, then backward, on slices:
//! ```
//! # #[cfg(feature = "cpu")] {
//! use rmsnorm_core::cpu::{Backward, CpuBackend, Forward};
//! use rmsnorm_core::NormSpec;
//!
//! let backend = CpuBackend::new();
//! let norm = NormSpec::rms(2, 3, 1e-6);
//! let (x, weight) = ([3.0f32, 4.0, 5.0, 0.0, -2.0, 0.0], [1.0, 2.0, 1.0]);
//! let (mut y, mut rstd) = ([0.0; 6], [0.0; 2]);
//! backend.forward(&norm, Forward::new(&x, &mut y).weight(&weight).rstd(&mut rstd))?;
//!
//! let (dy, mut dx, mut dweight) = ([1.0; 6], [0.0; 6], [0.0; 3]);
//! backend.backward(&norm, Backward::new(&dy, &x, &rstd, &mut dx).weight(&weight).dweight(&mut dweight))?;
//! assert!((dweight[0] - y[0]).abs() < 1e-6);
//! # }
//! # Ok::<(), rmsnorm_core::Error>(())
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod device;

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

/// The programs of these pages are tests. The pages are not in the package.
#[cfg(all(doctest, feature = "cuda", feature = "wgpu"))]
mod pages {
    #[doc = include_str!("../../README.md")]
    mod front {}
    #[doc = include_str!("../../docs/guide/rust.md")]
    mod rust {}
    #[doc = include_str!("../../docs/guide/fp8.md")]
    mod fp8 {}
}

#[cfg(feature = "conformance")]
pub use device::HarnessTask;
pub use device::{AnyBackend, Availability, Device, ParseDeviceError, Task, available};
#[cfg(feature = "conformance")]
#[doc(no_inline)]
pub use rmsnorm_conformance as conformance;
pub use rmsnorm_spec::*;

/// The CPU backend.
#[cfg(feature = "cpu")]
pub mod cpu {
    pub use rmsnorm_cpu::*;
}

/// The CUDA backend.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use rmsnorm_cuda::*;
}

/// The wgpu backend.
#[cfg(feature = "wgpu")]
pub mod wgpu {
    pub use rmsnorm_wgpu::*;
}
