//! Fused RMSNorm and LayerNorm on NVIDIA GPUs, forward and backward, at the speed of memory.
//!
//! [`CudaBackend`] implements [`rmsnorm_spec::NormBackend`] over views of the caller's own [`cudarc`] slices, on the
//! caller's own stream. A call enqueues kernels and returns: nothing is copied, nothing waits. Nothing is allocated but
//! the partial sums of weight gradients, and those can be passed in.
//!
//! Needed at run time: the driver and the NVRTC library, at build time neither. Kernels are compiled for the device at
//! hand when they are first used, which takes up to a second, and kept in memory and on disk.
//!
//! | here | role |
//! |---|---|
//! | `caps` | what the device offers, read once |
//! | `plan` | a pure function of the problem, the alignment and the caps: which kernels, how large |
//! | `params` | the argument of every kernel |
//! | `source`, `compile` | a kernel's source, and its cubin, kept on disk |
//! | `kernel` | what a context has for all backends on it: its loaded cubins, the pool of workspaces |
//! | `launch` | arguments to pointers, plans to launches |
//! | `borrowed` | memory of another owner as tensors |
//! | `memory` | room for what lies between the calls of who composes several |
//! | `nccl` | a group of ranks through NCCL: feature `nccl` |
//! | `peers` | norms of sums over several devices, by the feature of that name |
//! | `library` | whether the driver, NVRTC and NCCL are there |
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The program of this page is a test. It is not in the package.
#[cfg(all(doctest, feature = "peers"))]
#[doc = include_str!("../../docs/guide/several_gpus.md")]
mod page {}

mod backend;
mod borrowed;
mod caps;
mod compile;
mod error;
#[cfg(feature = "conformance")]
mod harness;
mod kernel;
mod launch;
mod library;
mod memory;
#[cfg(feature = "nccl")]
mod nccl;
mod params;
#[cfg(feature = "peers")]
mod peers;
mod plan;
mod source;
#[cfg(feature = "conformance")]
mod tunable;

pub use backend::CudaBackend;
pub use borrowed::BorrowedSlice;
pub use cudarc;
pub use error::DriverFailure;
pub use library::look_for_nvrtc_in;
#[cfg(feature = "nccl")]
pub use nccl::{NcclComm, NcclFailure, NcclId};
#[cfg(feature = "peers")]
#[cfg_attr(docsrs, doc(cfg(feature = "peers")))]
pub use peers::{MissingRank, PeerCard, PeerGroup, PeerSeat};
pub use plan::workspace_len_bound;
#[cfg(any(feature = "nccl", feature = "peers"))]
#[doc(no_inline)]
pub use rmsnorm_dist as dist;
#[doc(no_inline)]
pub use rmsnorm_spec as spec;

/// The tensors of a forward call on views of CUDA slices.
pub type Forward<'a, T, W = T, R = T> = spec::Forward<'a, CudaBackend, T, W, R>;
/// The tensors of a backward call on views of CUDA slices.
pub type Backward<'a, T, W = T, R = T> = spec::Backward<'a, CudaBackend, T, W, R>;
/// The tensors of a forward call to 8-bit codes, on views of CUDA slices: `CudaSlice<F8E4M3>`, `CudaSlice<F8E5M2>` or `CudaSlice<i8>`.
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::cudarc::driver::CudaContext;
/// use rmsnorm_cuda::spec::quant::{CodeType, QuantSpec, ScaleKind};
/// use rmsnorm_cuda::spec::{F8E4M3, NormSpec, bf16};
/// use rmsnorm_cuda::{CudaBackend, QuantizedForward};
///
/// let stream = CudaContext::new(0)?.default_stream();
/// let backend = CudaBackend::from_stream(stream.clone())?;
/// let (tokens, hidden) = (2048, 4096);
/// let x = stream.alloc_zeros::<bf16>(tokens * hidden)?;
/// let weight = stream.alloc_zeros::<bf16>(hidden)?;
/// let mut codes = stream.alloc_zeros::<F8E4M3>(tokens * hidden)?;
/// let mut scales = stream.alloc_zeros::<f32>(tokens)?;
/// let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
/// let args = QuantizedForward::new(quant, x.as_view(), codes.as_view_mut()).weight(weight.as_view());
/// backend.quantized_forward(&NormSpec::rms(tokens, hidden, 1e-5), args.scales(scales.as_view_mut()))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type QuantizedForward<'a, T, C, W = T, R = T> = spec::QuantizedForward<'a, CudaBackend, T, C, W, R>;
