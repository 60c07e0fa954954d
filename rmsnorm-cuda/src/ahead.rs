//! Compiles kernels for GPUs that need not be in this machine, such as those that a container will
//! run on.

use std::fmt;
use std::path::Path;

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
    /// H100 SXM. It runs the kernels of the H200.
    H100,
    /// H200.
    H200,
    /// T4.
    T4,
}

impl Gpu {
    /// All models.
    pub const ALL: [Gpu; 4] = [Gpu::A100, Gpu::H100, Gpu::H200, Gpu::T4];

    /// The name: `a100`, `h100`, `h200` or `t4`.
    pub const fn name(self) -> &'static str {
        match self {
            Gpu::A100 => "a100",
            Gpu::H100 => "h100",
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
            Gpu::H100 | Gpu::H200 => Caps::h200(),
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

/// Compiles the kernels of these calls for `gpu`, on several threads, and writes them to `folder`. It
/// needs NVRTC, and neither a GPU nor a driver. Calls are as for [`prepare_all`]: dense rows, tensors
/// at the start of an allocation. Kernels that are in the folder are not compiled again.
///
/// A process uses these kernels if the folder is its `RMSNORM_CACHE_DIR`, or the argument of
/// [`look_for_programs_in`]. It must have the same version of NVRTC ([`nvrtc_version`]) and the
/// built-in tuning table, which this function uses in any environment. Otherwise it compiles its own.
///
/// # Errors
/// `Unavailable` without NVRTC; `Unsupported` for a call that the backend does not take; `Device` if a
/// kernel cannot be compiled; `InvalidArgument` if `folder` cannot be written.
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::Gpu;
/// use rmsnorm_cuda::spec::{DType, Norm, Problem, Tensor};
///
/// let call = |rows| Problem::forward(Norm::Rms, rows, 4096, DType::Bf16, &[Tensor::Weight]);
/// rmsnorm_cuda::compile_for(Gpu::H200, &[call(1), call(8192)], "/opt/kernels".as_ref())?;
/// # Ok::<(), rmsnorm_cuda::spec::Error>(())
/// ```
///
/// [`prepare_all`]: crate::CudaBackend::prepare_all
/// [`look_for_programs_in`]: crate::look_for_programs_in
/// [`nvrtc_version`]: crate::nvrtc_version
pub fn compile_for(gpu: Gpu, problems: &[Problem], folder: &Path) -> Result<(), Error> {
    let caps = gpu.caps();
    let keys = launch::keys(problems, |problem| launch::dense_access_bytes(problem) as usize, &caps)?;
    parallel::try_for_each(&Vec::from_iter(keys), |key| compile::compile_into(folder, key, caps.arch))
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm, Tensor};

    use super::*;

    #[test]
    fn names_are_those_that_are_printed() {
        let names = Gpu::ALL.map(|gpu| (gpu.to_string(), format!("{gpu:<6}")));
        assert_eq!(names, ["a100", "h100", "h200", "t4"].map(|name| (name.to_owned(), format!("{name:<6}"))));
    }

    /// Refused before NVRTC is asked for.
    #[test]
    fn a_call_that_cannot_be_made_is_refused() {
        let call = Problem::forward(Norm::Rms, 1 << 33, 64, DType::Bf16, &[Tensor::Weight]);
        let call = Problem { rows_per_group: Some(2), ..call };
        for gpu in Gpu::ALL {
            let refused = compile_for(gpu, &[call], "kernels".as_ref());
            assert!(matches!(&refused, Err(Error::Unsupported { rule }) if rule.contains("2^32 rows")), "{refused:?}");
        }
    }
}
