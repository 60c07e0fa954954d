//! Fused RMSNorm and LayerNorm on the CPU, forward and backward, at the speed of memory.
//!
//! [`CpuBackend`] implements [`rmsnorm_spec::NormBackend`] over plain slices and is done on return. It uses AVX-512 or
//! AVX2 where the processor has them and portable code elsewhere; results have the same bits on every instruction set
//! and for any number of threads. Nothing is allocated here but the partial sums of weight gradients, and those can
//! be passed in; rayon's queue allocates a block now and then when a call is split over threads.
//!
//! # Debug builds
//! A debug build of your program runs the CPU kernels 120 times slower than a release build, since a dependency cannot choose its
//! own optimization. Choose it in the workspace that you build:
//!
//! ```toml
//! [profile.dev.package.rmsnorm-cpu]
//! opt-level = 3
//! ```
//!
//! # Rooms
//! | here | role |
//! |---|---|
//! | `caps` | what the processor offers, read once |
//! | `plan` | a pure function of the problem and the caps: tasks, row blocks, streaming |
//! | `lanes` | loads, stores and conversions of 32 elements, per instruction set |
//! | `stages` | the arithmetic: one file per stage, shared by all instruction sets |
//! | `kernel` | the stage bodies compiled per instruction set |
//! | `launch` | splits rows over threads |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod caps;
#[cfg(feature = "conformance")]
mod harness;
mod kernel;
mod lanes;
mod launch;
#[cfg(test)]
mod order;
mod plan;
#[cfg(feature = "planted")]
mod planted;
mod stages;

pub use backend::CpuBackend;
pub use caps::Isa;
#[doc(no_inline)]
pub use rmsnorm_spec as spec;

/// The tensors of a forward call on slices.
pub type Forward<'a, T, W = T, R = T> = spec::Forward<'a, CpuBackend, T, W, R>;
/// The tensors of a backward call on slices.
pub type Backward<'a, T, W = T, R = T> = spec::Backward<'a, CpuBackend, T, W, R>;
