//! From a [`KernelKey`] to a cubin: out of the disk cache, else through NVRTC.
//!
//! Programs are compiled for the device's own architecture, never to PTX, so that a driver older than the compiler can
//! load them.

#[cfg(test)]
mod programs;

use std::sync::Arc;

use rmsnorm_gpu::cache::{Cache, Id, Magic};
use rmsnorm_spec::Error;

use crate::caps::Arch;
use crate::error::BACKEND;
use crate::library::{self, Failure, Nvrtc};
use crate::plan::KernelKey;
use crate::source;

/// The kind of what is kept on disk.
const MAGIC: &Magic = b"rmsnorm cubin 1\n";

/// The oldest architecture that NVRTC of CUDA 13 compiles for.
const OLDEST_OF_CUDA_13: Arch = Arch(75);

/// A program that the compiler refused. The source of an [`Error::Device`].
#[derive(Debug, thiserror::Error)]
#[error("{file} does not compile: {call} of NVRTC {}.{} gives {status}{advice}\noptions: {options}\n{log}", version.0, version.1)]
pub(crate) struct CompileError {
    /// The program's file.
    file: &'static str,
    version: (u32, u32),
    /// What of NVRTC failed.
    call: &'static str,
    status: String,
    /// What can be done about it, or nothing.
    advice: &'static str,
    options: String,
    /// What the compiler said.
    log: String,
}

/// The cubin of a kernel, for a device.
///
/// # Errors
/// `Unavailable` without NVRTC; `Device` with a [`CompileError`] where NVRTC fails.
pub(crate) fn compile(key: &KernelKey, arch: Arch) -> Result<Arc<[u8]>, Error> {
    let nvrtc = library::nvrtc()?;
    let request = Request::new(key, arch);
    let id = request.id(nvrtc.version());
    Cache::of_user(BACKEND).get_or(id, || request.compile(nvrtc)).map(Arc::from)
}

/// NVRTC's version: major, minor.
///
/// # Errors
/// `Unavailable` without NVRTC.
pub(crate) fn nvrtc_version() -> Result<(u32, u32), Error> {
    library::nvrtc().map(Nvrtc::version)
}

/// All that decides what comes out, but the compiler itself.
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
            source: source::text(key.program),
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

/// What can be done where NVRTC of that version refuses a program for the device.
fn advice(arch: Arch, version: (u32, u32)) -> &'static str {
    if arch < OLDEST_OF_CUDA_13 && version.0 >= 13 {
        "; it no longer knows devices this old: let RMSNORM_NVRTC name an NVRTC of CUDA 12"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::programs::nvrtc;
    use super::*;

    fn request(source: &str, options: &[&str]) -> Request {
        let options = options.iter().map(ToString::to_string).collect();
        Request { arch: Arch::HOPPER, file: "kernels/test.cu", source: source.to_owned(), options }
    }

    #[test]
    fn a_program_becomes_an_elf_file_for_its_device() {
        let Some(nvrtc) = nvrtc() else { return };
        let source = "extern \"C\" __global__ void nothing() {}";
        let cubin = request(source, &["--gpu-architecture=sm_90"]).compile(nvrtc).expect("a program");
        assert_eq!(&cubin[..4], b"\x7fELF");
    }

    /// Cubins are kept by it.
    #[test]
    fn the_version_is_the_one_that_programs_see() {
        let Some(nvrtc) = nvrtc() else { return };
        let (major, minor) = nvrtc_version().expect("a version");
        let is_it = format!("__CUDACC_VER_MAJOR__ == {major} && __CUDACC_VER_MINOR__ == {minor}");
        for (condition, is_good) in [(is_it.clone(), true), (format!("!({is_it})"), false)] {
            let source = format!("#if !({condition})\n#error another version\n#endif\n");
            let compiled = request(&source, &["--gpu-architecture=sm_90"]).compile(nvrtc);
            assert_eq!(compiled.is_ok(), is_good, "{condition}: {compiled:?}");
        }
        assert!(format!("{nvrtc:?}").contains(&format!("({major}, {minor})")), "{nvrtc:?}");
    }

    #[test]
    fn a_refused_program_is_an_error_with_the_log() {
        let Some(nvrtc) = nvrtc() else { return };
        let source = "#line 7 \"kernels/other.cuh\"\n__global__ void broken() { undeclared(); }\n";
        let error = request(source, &["--gpu-architecture=sm_90", "-DPACK=8"]).compile(nvrtc).expect_err("no program");
        let text = error.to_string();
        for part in ["kernels/test.cu", "nvrtcCompileProgram", "-DPACK=8", "kernels/other.cuh(7)", "undeclared"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert!(error.source().is_some_and(|source| source.is::<CompileError>()), "{error:?}");
    }

    #[test]
    fn a_refused_option_is_an_error_too() {
        let Some(nvrtc) = nvrtc() else { return };
        let error = request("", &["--gpu-architecture=sm_1"]).compile(nvrtc).expect_err("no such device");
        assert!(error.to_string().contains("--gpu-architecture"), "{error}");
        let error = request("a\0b", &[]).compile(nvrtc).expect_err("no text");
        assert!(error.to_string().contains("NUL"), "{error}");
    }

    #[test]
    fn an_architecture_that_the_compiler_has_dropped_comes_with_advice() {
        assert!(advice(Arch(70), (13, 0)).contains("RMSNORM_NVRTC"));
        for (arch, version) in [(70, (12, 9)), (75, (13, 0)), (90, (13, 2))] {
            assert_eq!(advice(Arch(arch), version), "", "sm_{arch}, {version:?}");
        }
        let Some(nvrtc) = nvrtc().filter(|nvrtc| nvrtc.version().0 >= 13) else { return };
        let request = Request { arch: Arch(70), ..request("", &["--gpu-architecture=sm_70"]) };
        let error = request.compile(nvrtc).expect_err("a device of the past");
        assert!(error.to_string().contains("an NVRTC of CUDA 12\noptions: "), "{error}");
    }

    #[test]
    fn everything_that_decides_the_code_is_in_the_id() {
        let one = request("source", &["-DPACK=8", "-DPACKS=2"]);
        let same = request("source", &["-DPACK=8", "-DPACKS=2"]);
        assert!(one.id((13, 0)) == same.id((13, 0)));
        let others = [
            one.id((13, 1)),
            one.id((12, 0)),
            request("source ", &["-DPACK=8", "-DPACKS=2"]).id((13, 0)),
            request("source", &["-DPACK=8", "-DPACKS=1"]).id((13, 0)),
            request("source", &["-DPACK=8-DPACKS=2"]).id((13, 0)),
            request("source-DPACK=8", &["-DPACKS=2"]).id((13, 0)),
        ];
        assert!(others.into_iter().all(|other| other != one.id((13, 0))));
    }
}
