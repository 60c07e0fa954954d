//! The extension module `rmsnorm._native`: the interfaces between Python's frameworks and
//! `rmsnorm-core`. It has no arithmetic.
//!
//! | module | role |
//! |---|---|
//! | `foreign` | tensors of other libraries: address, storage, rows |
//! | `call` | a call on foreign tensors; dtypes become types |
//! | `lender` | addresses become views of a backend |
//! | `device` | the backends of the process |
//! | `torch` | operators of PyTorch's dispatcher, through libtorch's stable C interface |
//! | `xla` | handlers of XLA's foreign function interface, for JAX |
//! | `arrays` | arrays of NumPy and others, through DLPack |

mod arrays;
mod call;
mod device;
mod foreign;
mod lender;
mod torch;
mod xla;

use pyo3::prelude::*;

/// Fused RMSNorm and LayerNorm: the native library of the package.
#[pymodule(gil_used = false)]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::arrays::run_arrays;
    #[pymodule_export]
    use crate::torch::{register_torch_operators, torch_schemas};
    #[pymodule_export]
    use crate::xla::{xla_handlers, xla_layouts, xla_workspace_len};

    /// The package's version.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// The commit that the module was built from, with a `+` if the tree had uncommitted changes;
    /// `unknown` outside a repository.
    #[pymodule_export]
    const REVISION: &str =
        git_version::git_version!(args = ["--always", "--dirty=+", "--abbrev=12", "--match="], fallback = "unknown");

    /// Adds folders to search for NVRTC, unless `RMSNORM_NVRTC` is set. Only the first call has an
    /// effect.
    #[pyfunction]
    fn look_for_nvrtc_in(folders: Vec<std::path::PathBuf>) {
        rmsnorm_core::cuda::look_for_nvrtc_in(folders);
    }

    /// Makes compiled kernels be read from this folder too. Only the first call has an effect.
    #[pyfunction]
    fn look_for_programs_in(folder: std::path::PathBuf) {
        rmsnorm_core::cuda::look_for_programs_in(folder);
    }

    /// The reason why a CUDA device cannot be used; None if it can.
    #[pyfunction]
    fn why_no_cuda(py: Python<'_>, ordinal: usize) -> Option<String> {
        py.detach(|| device::cuda(ordinal)).err().map(|error| error.to_string())
    }

    /// The devices of this machine: (name, can be used, description or reason).
    #[pyfunction]
    fn devices(py: Python<'_>) -> Vec<(String, bool, String)> {
        let all = py.detach(rmsnorm_core::available);
        let words = all.into_iter().map(|found| {
            let (is_there, text) = match found.status {
                Ok(text) => (true, text),
                Err(reason) => (false, reason),
            };
            (found.device.to_string(), is_there, text)
        });
        words.collect()
    }
}
