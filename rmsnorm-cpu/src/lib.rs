//! Fused RMSNorm and LayerNorm on the CPU, forward and backward, at the speed of memory.
//!
//! [`CpuBackend`] implements [`rmsnorm_spec::NormBackend`] over plain slices; a call has finished
//! when it returns. It uses AVX-512 or AVX2 if the processor has them, and portable code otherwise.
//! Results have the same bits on every instruction set and for any number of threads. A call
//! allocates the partial sums of weight gradients, unless a workspace is passed, and a buffer for
//! scales in a layout that is not row by row. rayon's queue may allocate when a call is split over
//! threads.
//!
//! # Outputs
//! Outputs are the caller's `&mut [T]`. [`CpuBackend::forward_vec`] and
//! [`CpuBackend::backward_vec`] return new vectors. [`CpuBackend::uninit`] accepts uninitialized
//! memory.
//!
//! # Stack
//! Forward with 16-bit elements takes 50 KiB of the stack of each participating thread.
//!
//! # Debug builds
//! In a debug build of your program the CPU kernels run 120 times slower than in a release build,
//! because a dependency cannot choose its optimization level. Set it in your workspace:
//!
//! ```toml
//! [profile.dev.package.rmsnorm-cpu]
//! opt-level = 3
//! ```
//!
//! # Modules
//! | here | role |
//! |---|---|
//! | `calls` | the traits of both backends |
//! | `caps` | the processor's features, read once |
//! | `plan` | tasks, row blocks and streaming, as a pure function of the problem and the caps |
//! | `lanes` | loads, stores and conversions of 32 elements per instruction set; views of elements |
//! | `stages` | the arithmetic: one file per stage, shared by all instruction sets |
//! | `kernel` | the stage bodies, compiled per instruction set and dtype |
//! | `launch` | splits rows over threads |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod calls;
mod caps;
#[cfg(feature = "conformance")]
mod harness;
mod kernel;
mod lanes;
mod launch;
mod memory;
#[cfg(test)]
mod order;
mod plan;
#[cfg(feature = "planted")]
mod planted;
mod stages;
#[cfg(feature = "conformance")]
mod tunable;
mod tuning;
mod uninit;
mod vectors;

pub use backend::CpuBackend;
pub use caps::Isa;
#[doc(no_inline)]
pub use rmsnorm_spec as spec;
pub use uninit::UninitBackend;
pub use vectors::{BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs};

/// The tensors of a forward call on slices.
///
/// # Example
/// `residual_out` is `x + residual`, and `y` is its norm. Activations are bf16; weight and residual
/// are f32. `x` is the first half of every row of a buffer with 8 columns.
/// ```
/// use rmsnorm_cpu::{CpuBackend, Forward, spec::{Error, NormBackend, NormSpec, Rows, bf16}};
/// # fn main() -> Result<(), Error> {
/// let wide = [bf16::from_f32(2.0); 2 * 8];
/// let (residual, weight) = ([-1.0f32; 2 * 4], [0.5f32; 4]);
/// let (mut residual_out, mut y, mut rstd) = ([0.0f32; 8], [bf16::ZERO; 8], [0.0; 2]);
/// let args = Forward::new(Rows::strided(&wide[..8 + 4], 8), &mut y).f32_weight().f32_residual();
/// let args = args.residual(&residual).residual_out(&mut residual_out).weight(&weight).rstd(&mut rstd);
/// CpuBackend::new().forward(&NormSpec::rms(2, 4, 1e-6), args)?;
/// assert_eq!((residual_out, y), ([1.0; 8], [bf16::from_f32(0.5); 8]));
/// # Ok(())
/// # }
/// ```
pub type Forward<'a, T, W = T, R = T> = spec::Forward<'a, CpuBackend, T, W, R>;
/// The tensors of a backward call on slices.
///
/// # Example
/// The gradients of a layer norm, with a workspace for `dweight` and `dbias`:
/// ```
/// use rmsnorm_cpu::{Backward, CpuBackend, Forward, spec::{Checked, Error, NormBackend, NormSpec}};
/// # fn main() -> Result<(), Error> {
/// let (backend, norm) = (CpuBackend::new(), NormSpec::layer(2, 4, 1e-5));
/// let (x, weight, dy) = ([1.0f32, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0], [1.0; 4], [1.0; 8]);
/// let (mut y, mut mean, mut rstd) = ([0.0; 8], [0.0; 2], [0.0; 2]);
/// backend.forward(&norm, Forward::new(&x, &mut y).weight(&weight).mean(&mut mean).rstd(&mut rstd))?;
///
/// let (mut dx, mut dweight, mut dbias) = ([0.0; 8], [0.0; 4], [0.0; 4]);
/// let args = Backward::new(&dy, &x, &rstd, &mut dx).mean(&mean).weight(&weight);
/// let call = Checked::backward(&backend, norm, args.dweight(&mut dweight).dbias(&mut dbias))?;
/// let mut workspace = vec![0.0; backend.workspace_len(call.problem())];
/// backend.backward(&norm, call.into_args().workspace(&mut workspace))?;
/// assert_eq!((mean, dbias), ([2.5; 2], [2.0; 4]));
/// # Ok(())
/// # }
/// ```
pub type Backward<'a, T, W = T, R = T> = spec::Backward<'a, CpuBackend, T, W, R>;
/// The tensors of a forward call to 8-bit codes, on slices.
///
/// # Example
/// Rows of E4M3 with one scale per row, as FP8 matrix products take their activations. Then the
/// gradients, computed from x and rstd of the same call, without the codes.
/// ```
/// use rmsnorm_cpu::{Backward, CpuBackend, QuantizedForward, spec::{Error, F8E4M3, NormSpec, AnyElement}};
/// use rmsnorm_cpu::spec::quant::{CodeType, QuantSpec, ScaleKind};
/// # fn main() -> Result<(), Error> {
/// let (backend, norm) = (CpuBackend::new(), NormSpec::rms(2, 4, 0.0));
/// let (x, weight) = ([1.0f32, -1.0, 1.0, -1.0, 3.0, 3.0, -3.0, 3.0], [1.0, 2.0, 3.0, 7.0]);
/// let (mut codes, mut scales, mut rstd) = ([F8E4M3::from_bits(0); 8], [0.0; 2], [0.0; 2]);
/// let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
/// let args = QuantizedForward::new(quant, &x, &mut codes).weight(&weight);
/// backend.quantized_forward(&norm, args.scales(&mut scales).rstd(&mut rstd))?;
/// assert_eq!((scales, rstd), ([7.0 / 448.0; 2], [1.0, 1.0 / 3.0]));
/// assert_eq!(codes.map(|code| code.to_f32()), [64.0, -128.0, 192.0, -448.0, 64.0, 128.0, -192.0, 448.0]);
///
/// let (dy, mut dx, mut dweight) = ([1.0; 8], [0.0; 8], [0.0; 4]);
/// backend.backward(&norm, Backward::new(&dy, &x, &rstd, &mut dx).weight(&weight).dweight(&mut dweight))?;
/// assert_eq!(dweight, [2.0, 0.0, 0.0, 0.0]);
/// # Ok(())
/// # }
/// ```
pub type QuantizedForward<'a, T, C, W = T, R = T> = spec::QuantizedForward<'a, CpuBackend, T, C, W, R>;
