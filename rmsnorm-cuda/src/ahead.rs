//! Compiles kernels for GPUs that need not be in this machine, such as those that a container will
//! run on.

use std::fmt;

use rmsnorm_gpu::parallel;
use rmsnorm_spec::{Error, Problem};

use crate::caps::Caps;
use crate::{compile, launch, plan};

/// A model of GPU, for [`compile_for`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gpu {
    /// A100, of 40 or 80 GB.
    A100,
    /// H200, and H100 with 132 multiprocessors (SXM).
    H200,
    /// T4.
    T4,
}

impl Gpu {
    /// All models.
    pub const ALL: [Gpu; 3] = [Gpu::A100, Gpu::H200, Gpu::T4];

    /// The name: `a100`, `h200` or `t4`.
    pub const fn name(self) -> &'static str {
        match self {
            Gpu::A100 => "a100",
            Gpu::H200 => "h200",
            Gpu::T4 => "t4",
        }
    }

    /// Numbers of rows around which calls have other kernels.
    pub const fn rows_breakpoints(self) -> &'static [usize] {
        &plan::ROWS_BREAKPOINTS
    }

    const fn caps(self) -> Caps {
        match self {
            Gpu::A100 => Caps::a100(),
            Gpu::H200 => Caps::h200(),
            Gpu::T4 => Caps::t4(),
        }
    }
}

/// The name.
impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Compiles the kernels of these calls for `gpu` on several threads, and writes them into the cache
/// on disk (`RMSNORM_CACHE_DIR`, or the user's cache folder). It needs NVRTC, and neither a GPU nor a
/// driver. Calls are as for [`prepare_all`]: dense rows, tensors at the start of an allocation.
///
/// A process reads these kernels if it has the same version of NVRTC and the built-in tuning table;
/// otherwise it compiles its own.
///
/// # Errors
/// `Unavailable` without NVRTC; `Device` if a kernel cannot be compiled.
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::Gpu;
/// use rmsnorm_cuda::spec::{DType, Norm, Problem, Tensor};
///
/// let call = |rows| Problem::forward(Norm::Rms, rows, 4096, DType::Bf16, &[Tensor::Weight]);
/// rmsnorm_cuda::compile_for(Gpu::H200, &[call(1), call(8192)])?;
/// # Ok::<(), rmsnorm_cuda::spec::Error>(())
/// ```
///
/// [`prepare_all`]: crate::CudaBackend::prepare_all
pub fn compile_for(gpu: Gpu, problems: &[Problem]) -> Result<(), Error> {
    let caps = gpu.caps();
    let keys = launch::keys(problems, |problem| launch::dense_access_bytes(problem) as usize, &caps)?;
    parallel::try_for_each(&Vec::from_iter(keys), |key| compile::compile(key, caps.arch).map(|_| ()))
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm, Tensor};

    use super::*;

    #[test]
    fn names_are_those_that_are_printed() {
        let names = Gpu::ALL.map(|gpu| (gpu.to_string(), format!("{gpu:<6}")));
        assert_eq!(names, ["a100", "h200", "t4"].map(|name| (name.to_owned(), format!("{name:<6}"))));
    }

    /// Refused before NVRTC is asked for.
    #[test]
    fn a_call_that_cannot_be_made_is_refused() {
        let call = Problem::forward(Norm::Rms, 1 << 33, 64, DType::Bf16, &[Tensor::Weight]);
        let call = Problem { rows_per_group: Some(2), ..call };
        for gpu in Gpu::ALL {
            let refused = compile_for(gpu, &[call]);
            assert!(matches!(&refused, Err(Error::Unsupported { rule }) if rule.contains("2^32 rows")), "{refused:?}");
        }
    }
}
