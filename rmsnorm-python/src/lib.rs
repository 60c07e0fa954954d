//! The extension module `rmsnorm._native`: what frameworks call, over `rmsnorm-core`. It holds no arithmetic.
//!
//! | here | role |
//! |---|---|
//! | `foreign` | tensors of other libraries: address, storage, rows |
//! | `call` | a call on foreign tensors; dtypes become types |
//! | `lender` | addresses become a backend's views |
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

/// Fused RMSNorm and LayerNorm: the native half of the package.
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

    /// The commit that the module was built from, with a `+` if files had changed since; `unknown` outside a repository.
    #[pymodule_export]
    const REVISION: &str =
        git_version::git_version!(args = ["--always", "--dirty=+", "--abbrev=12", "--match="], fallback = "unknown");

    /// Has NVRTC looked for in these folders, unless `RMSNORM_NVRTC` is set. The first call counts.
    #[pyfunction]
    fn look_for_nvrtc_in(folders: Vec<std::path::PathBuf>) {
        rmsnorm_core::cuda::look_for_nvrtc_in(folders);
    }

    /// Why that CUDA device cannot be used; None if it can.
    #[pyfunction]
    fn why_no_cuda(py: Python<'_>, ordinal: usize) -> Option<String> {
        py.detach(|| device::cuda(ordinal)).err().map(|error| error.to_string())
    }

    /// The devices of this machine: name, whether it can be used, and what it is or why not.
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
