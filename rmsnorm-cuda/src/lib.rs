//! Fused RMSNorm and LayerNorm on NVIDIA GPUs, forward and backward, limited only by memory
//! bandwidth.
//!
//! [`CudaBackend`] implements [`rmsnorm_spec::NormBackend`] for views of [`cudarc`] slices, on a
//! CUDA stream of the caller. A call enqueues kernels and returns: it copies nothing and waits for
//! nothing. It allocates at most a workspace, which the caller of a backward call can pass in.
//!
//! The driver and the NVRTC library are needed at run time, not at build time. A kernel is compiled
//! for the device at its first use, which takes up to a second, and cached in memory and on disk.
//!
//! | module | content |
//! |---|---|
//! | `caps` | properties of the device, read once |
//! | `plan` | kernels and launch sizes: a pure function of problem, alignment and caps |
//! | `params` | the argument of every kernel |
//! | `source`, `compile` | the source of a kernel, and its cubin, cached on disk |
//! | `ahead` | compiles for GPUs of other machines |
//! | `kernel` | state that the backends of a context share: loaded kernels, pool of workspaces |
//! | `backend` | [`CudaBackend`]: a stream, and the kernels of its context |
//! | `launch` | the trait; runs plans: views to addresses, steps to launches |
//! | `borrowed` | tensors in memory of another owner |
//! | `memory` | buffers between the calls of a composed operation |
//! | `nccl` | groups of ranks through NCCL: feature `nccl` |
//! | `peers` | norms of sums over several devices: feature `peers` |
//! | `library` | loads the driver, NVRTC and NCCL |
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Compiles the guide's programs as tests; not part of the package.
#[cfg(all(doctest, feature = "peers"))]
#[doc = include_str!("../../docs/guide/several_gpus.md")]
mod page {}

mod ahead;
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

pub use ahead::{Gpu, compile_for};
pub use backend::CudaBackend;
pub use borrowed::BorrowedSlice;
pub use compile::{look_for_programs_in, nvrtc_version};
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
/// The tensors of a forward call to 8-bit codes, on views of CUDA slices: `CudaSlice<F8E4M3>`,
/// `CudaSlice<F8E5M2>` or `CudaSlice<i8>`.
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
