//! Gets the cubin of a [`KernelKey`] from the disk cache or a package, or compiles it with NVRTC.
//!
//! Kernels are compiled to machine code for the device's own architecture, never to PTX, so that a
//! driver older than the compiler can load them.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rmsnorm_gpu::cache::{Cache, Entry, Id, Magic};
use rmsnorm_spec::Error;
use rmsnorm_tuning::folder;

use crate::caps::Arch;
use crate::error::BACKEND;
use crate::library::{self, Failure, Nvrtc};
use crate::plan::KernelKey;
use crate::source;

/// Marks a cache file as a cubin of this format.
const MAGIC: &Magic = b"rmsnorm cubin 1\n";

/// The oldest architecture that NVRTC of CUDA 13 compiles for.
const OLDEST_OF_CUDA_13: Arch = Arch(75);

/// A program that NVRTC rejected: the source of an [`Error::Device`].
#[derive(Debug, thiserror::Error)]
#[error("{file} does not compile: {call} of NVRTC {}.{} gives {status}{advice}\noptions: {options}\n{log}", version.0, version.1)]
pub(crate) struct CompileError {
    /// The file name of the program.
    file: &'static str,
    version: (u32, u32),
    /// The NVRTC function that failed.
    call: &'static str,
    status: String,
    /// Advice for the user; may be empty.
    advice: &'static str,
    options: String,
    /// The compiler's log.
    log: String,
}

/// The folder of programs that came with a package.
static PACKAGED: OnceLock<PathBuf> = OnceLock::new();

/// Kernels that [`compile_for`] wrote to `folder` are read there and not compiled again. They must be
/// of the same sources, the same tuning table and the same version of NVRTC (major and minor); others
/// are ignored. The user's cache is read first. An empty `RMSNORM_CACHE_DIR` turns off both.
///
/// Only the first call of the process has an effect. Call it before any use of CUDA. Anyone who can
/// write to the folder decides which code runs on the device.
///
/// [`compile_for`]: crate::compile_for
pub fn look_for_programs_in(folder: PathBuf) {
    let _ = PACKAGED.set(folder);
}

/// The cubin of a kernel for architecture `arch`.
///
/// # Errors
/// `Unavailable` without NVRTC; `Device` with a [`CompileError`] if NVRTC fails.
pub(crate) fn compile(key: &KernelKey, arch: Arch) -> Result<Arc<[u8]>, Error> {
    let nvrtc = library::nvrtc()?;
    let request = Request::new(key, arch);
    let id = request.id(nvrtc.version());
    let packaged = PACKAGED.get().filter(|_| !folder::is_off());
    let cache = Cache::of_user(BACKEND).with_packaged(packaged.map(PathBuf::as_path));
    cache.get_or(id, || request.compile(nvrtc)).map(Arc::from)
}

/// Compiles a kernel into `folder`, unless it is there.
///
/// # Errors
/// As [`compile`]; `InvalidArgument` if the folder cannot be written.
pub(crate) fn compile_into(folder: &Path, key: &KernelKey, arch: Arch) -> Result<(), Error> {
    let nvrtc = library::nvrtc()?;
    let request = Request::new(key, arch);
    let entry = Entry::new(folder, request.id(nvrtc.version()));
    if entry.read().is_some() {
        return Ok(());
    }
    entry.write(&request.compile(nvrtc)?).map_err(|error| {
        let rule = format!("is one that can be written, got {}: {error}", folder.display());
        Error::InvalidArgument { arg: "folder", rule }
    })
}

/// The version of the NVRTC that this process uses: major, minor.
///
/// # Errors
/// `Unavailable` without NVRTC.
pub fn nvrtc_version() -> Result<(u32, u32), Error> {
    library::nvrtc().map(Nvrtc::version)
}

/// Everything that decides the cubin, except the compiler version.
struct Request {
    arch: Arch,
    file: &'static str,
    source: String,
    options: Vec<String>,
}

impl Request {
    fn new(key: &KernelKey, arch: Arch) -> Request {
        Request {
            arch,
            file: source::file_name(key.program),
            source: source::text(key),
            options: source::options(key, arch),
        }
    }

    fn id(&self, version: (u32, u32)) -> Id {
        let version = format!("NVRTC {}.{}", version.0, version.1);
        let texts = [version.as_str(), &self.source].into_iter().chain(self.options.iter().map(String::as_str));
        Id::of(MAGIC, texts)
    }

    fn compile(&self, nvrtc: &Nvrtc) -> Result<Vec<u8>, Error> {
        nvrtc.compile(self.file, &self.source, &self.options).map_err(|failure| self.error(nvrtc, failure))
    }

    fn error(&self, nvrtc: &Nvrtc, Failure { call, status, log }: Failure) -> Error {
        let options = self.options.join(" ");
        let (file, version) = (self.file, nvrtc.version());
        let advice = advice(self.arch, version);
        let error = CompileError { file, version, call, status, advice, options, log };
        Error::Device { backend: BACKEND, source: Box::new(error) }
    }
}

/// Advice for a program that NVRTC `version` rejected for `arch`.
fn advice(arch: Arch, version: (u32, u32)) -> &'static str {
    if arch < OLDEST_OF_CUDA_13 && version.0 >= 13 {
        "; NVRTC 13 has no support for devices this old; fix: pip install nvidia-cuda-nvrtc-cu12, and set RMSNORM_NVRTC \
         to its folder"
    } else {
        ""
    }
}
