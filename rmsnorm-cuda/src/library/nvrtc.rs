//! NVRTC, the compiler: the functions that this crate calls, and the compilation of one program.
//!
//! cudarc's loader is not used: it looks for the library in fixed places only, panics if a function
//! is missing, and has no safe way to get a cubin.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::{fmt, ptr};

use libloading::Library;

use super::function;

/// nvrtcProgram
type Handle = *mut c_void;
/// nvrtcResult, where 0 is success.
type Status = c_int;
type GetSize = unsafe extern "C" fn(Handle, *mut usize) -> Status;
type GetBytes = unsafe extern "C" fn(Handle, *mut c_char) -> Status;

functions! {
    version = "nvrtcVersion": unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
    error_string = "nvrtcGetErrorString": unsafe extern "C" fn(Status) -> *const c_char;
    create = "nvrtcCreateProgram": unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status;
    compile = "nvrtcCompileProgram": unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status;
    destroy = "nvrtcDestroyProgram": unsafe extern "C" fn(*mut Handle) -> Status;
    cubin_size = "nvrtcGetCUBINSize": GetSize;
    cubin = "nvrtcGetCUBIN": GetBytes;
    log_size = "nvrtcGetProgramLogSize": GetSize;
    log = "nvrtcGetProgramLog": GetBytes;
}

/// NVRTC, ready for calls from any thread.
pub(crate) struct Nvrtc {
    version: (u32, u32),
    functions: Functions,
    /// Keeps the code of the functions loaded, and the builtins library that NVRTC looks up by
    /// name.
    _libraries: (Library, Option<Library>),
}

/// The function that failed, the reason, and the compiler's log, which may be empty.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) status: String,
    pub(crate) log: String,
}

impl Nvrtc {
    /// Checks a library that was loaded from this path or bare name.
    ///
    /// # Errors
    /// It is not NVRTC, or too old.
    pub(super) fn new(library: Library, path: &Path) -> Result<Nvrtc, String> {
        let unusable = |why: String| {
            let path = path.display();
            format!(
                "{path} is no usable NVRTC of CUDA 11.1 or later: {why}; fix: pip install nvidia-cuda-nvrtc, and set \
                 RMSNORM_NVRTC to its folder"
            )
        };
        // SAFETY:
        // - types: as nvrtc.h has declared them since CUDA 11.1, the release that added
        //   nvrtcGetCUBIN.
        let functions = unsafe { Functions::of(&library) }.map_err(unusable)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY:
        // - arguments: valid places for one int each.
        let status = unsafe { (functions.version)(&mut major, &mut minor) };
        match (status, u32::try_from(major), u32::try_from(minor)) {
            (0, Ok(major), Ok(minor)) => {
                Ok(Nvrtc { version: (major, minor), functions, _libraries: (library, builtins(path, major, minor)) })
            }
            (status, _, _) => Err(unusable(format!("nvrtcVersion gives error {status}, version {major}.{minor}"))),
        }
    }

    /// The CUDA release of this NVRTC: major, minor.
    pub(crate) fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles a source to a cubin. `name` is the file name in compiler messages.
    ///
    /// # Errors
    /// A NUL byte in a string, or an error of the compiler.
    pub(crate) fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, Failure> {
        let mut program = Program::new(self, name, source)?;
        program.compile(options)?;
        program.cubin()
    }

    /// Like [`compile`](Self::compile), and also returns the compiler's log.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    #[cfg(test)]
    pub(crate) fn compile_logged(
        &self,
        name: &str,
        source: &str,
        options: &[String],
    ) -> Result<(Vec<u8>, String), Failure> {
        let mut program = Program::new(self, name, source)?;
        program.compile(options)?;
        Ok((program.cubin()?, program.log()))
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), Failure> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY:
        // - argument: any value is allowed.
        let text = unsafe { (self.functions.error_string)(status) };
        let status = if text.is_null() {
            format!("error {status}")
        } else {
            // SAFETY:
            // - string: not null, terminated, and constant for as long as the library is loaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Failure { call, status, log: String::new() })
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).finish_non_exhaustive()
    }
}

/// An NVRTC program, destroyed when this is dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, name: &str, source: &str) -> Result<Self, Failure> {
        let (name, source) = (text("its name", name)?, text("the source", source)?);
        let mut handle = ptr::null_mut();
        // SAFETY:
        // - handle: a valid place for one.
        // - strings: terminated, and copied by the callee.
        // - headers: none are announced, so none are read.
        let status = unsafe {
            (nvrtc.functions.create)(&mut handle, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        nvrtc.check("nvrtcCreateProgram", status)?;
        Ok(Program { nvrtc, handle })
    }

    fn compile(&mut self, options: &[String]) -> Result<(), Failure> {
        let options: Vec<CString> = options.iter().map(|option| text("an option", option)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
        // SAFETY:
        // - program: created, not yet destroyed, and used by this thread alone.
        // - options: at least `count` pointers to terminated strings, which `options` keeps alive.
        let status = unsafe { (self.nvrtc.functions.compile)(self.handle, count, pointers.as_ptr()) };
        let failure = |failure| Failure { log: self.log(), ..failure };
        self.nvrtc.check("nvrtcCompileProgram", status).map_err(failure)
    }

    fn cubin(&self) -> Result<Vec<u8>, Failure> {
        let functions = &self.nvrtc.functions;
        self.bytes("nvrtcGetCUBIN", functions.cubin_size, functions.cubin)
    }

    /// The compiler's log; empty if it cannot be read.
    fn log(&self) -> String {
        let functions = &self.nvrtc.functions;
        let log = self.bytes("nvrtcGetProgramLog", functions.log_size, functions.log).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_matches(['\0', '\n']).to_owned()
    }

    fn bytes(&self, call: &'static str, size: GetSize, get: GetBytes) -> Result<Vec<u8>, Failure> {
        let mut len = 0;
        // SAFETY:
        // - program: created and not yet destroyed.
        // - size: a valid place for one.
        self.nvrtc.check(call, unsafe { size(self.handle, &mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY:
        // - program: as above, and unchanged after the size was read, so that the size still holds.
        // - bytes: a valid place for as many bytes as the size call returned.
        self.nvrtc.check(call, unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY:
        // - program: created, destroyed here only, and not used after.
        unsafe { (self.nvrtc.functions.destroy)(&mut self.handle) };
    }
}

fn text(what: &str, text: &str) -> Result<CString, Failure> {
    CString::new(text).map_err(|_| Failure {
        call: "nvrtcCreateProgram",
        status: format!("{what} has a NUL byte"),
        log: String::new(),
    })
}

/// Loads NVRTC's builtins library from NVRTC's own folder. NVRTC looks for it by its bare name, and
/// some releases find it only on the search path, or if it is already loaded. A missing library is
/// no error here: it may be on that path, and otherwise the compiler's log reports it.
fn builtins(nvrtc: &Path, major: u32, minor: u32) -> Option<Library> {
    let folder = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let name = if cfg!(windows) {
        format!("nvrtc-builtins64_{major}{minor}.dll")
    } else {
        format!("libnvrtc-builtins.so.{major}.{minor}")
    };
    // SAFETY:
    // - initializers: the compiler, which is loaded, would run them itself.
    unsafe { Library::new(folder.join(name)) }.ok()
}
