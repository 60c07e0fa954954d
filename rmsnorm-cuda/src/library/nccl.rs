//! NCCL: the functions that this crate calls.
//!
//! cudarc's loader is not used: it looks for `libnccl.so` but not for `libnccl.so.2`, the name in
//! every NCCL package, takes no other path, and panics if the library or a function is missing.
//! cudarc's types are used, except for return codes: a later NCCL may have more codes than a Rust
//! enum knows.

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;
use rmsnorm_spec::Error;

use super::{Opened, function, in_folder, open_first};

/// NCCL's name in errors. It differs from the backend's, because a machine may have one without the
/// other.
pub(crate) const NAME: &str = "nccl";

/// The environment variable that names the folder of NCCL, to use instead of any other.
const VARIABLE: &str = "RMSNORM_NCCL";

/// File names of NCCL, for the system's loader and in a folder. If the process has already loaded a
/// library with the first name, as PyTorch does, the loader returns that one.
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// Places of NCCL below a named folder: the folder itself, an NVIDIA package, a PyTorch wheel.
const SUBFOLDERS: [&str; 3] = ["", "lib", "nvidia/nccl/lib"];

/// The oldest version with all functions called; `ncclCommFinalize` is the newest of them.
const OLDEST: Version = Version { major: 2, minor: 14, patch: 0 };

const INSTALL: &str = "install NCCL: the system's package libnccl2, or pip's nvidia-nccl-cu12 or -cu13";

/// ncclResult_t
pub(crate) type Status = c_int;
/// `ncclSuccess`
pub(crate) const SUCCESS: Status = 0;
/// `ncclInProgress`: returned by a non-blocking communicator.
pub(crate) const IN_PROGRESS: Status = 7;

type OfComm = unsafe extern "C" fn(ncclComm_t) -> Status;
type IntOfComm = unsafe extern "C" fn(ncclComm_t, *mut c_int) -> Status;

functions! {
    error_string = "ncclGetErrorString": unsafe extern "C" fn(Status) -> *const c_char;
    last_error = "ncclGetLastError": unsafe extern "C" fn(ncclComm_t) -> *const c_char;
    unique_id = "ncclGetUniqueId": unsafe extern "C" fn(*mut ncclUniqueId) -> Status;
    init_rank = "ncclCommInitRank": unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> Status;
    finalize = "ncclCommFinalize": OfComm;
    destroy = "ncclCommDestroy": OfComm;
    abort = "ncclCommAbort": OfComm;
    count = "ncclCommCount": IntOfComm;
    device = "ncclCommCuDevice": IntOfComm;
    user_rank = "ncclCommUserRank": IntOfComm;
    async_error = "ncclCommGetAsyncError": IntOfComm;
    group_start = "ncclGroupStart": unsafe extern "C" fn() -> Status;
    group_end = "ncclGroupEnd": unsafe extern "C" fn() -> Status;
    send = "ncclSend":
        unsafe extern "C" fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Status;
    receive = "ncclRecv":
        unsafe extern "C" fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> Status;
    all_gather = "ncclAllGather":
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> Status;
    all_reduce = "ncclAllReduce": unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        ncclComm_t,
        cudaStream_t,
    ) -> Status;
}

/// NCCL, ready for calls from any thread.
pub(crate) struct Nccl {
    version: Version,
    pub(crate) functions: Functions,
    /// Keeps the code of the functions loaded.
    _library: Library,
}

/// The NCCL library of this process.
///
/// # Errors
/// `Unavailable` if it is missing, broken, too old, or lacks a function.
pub(crate) fn nccl() -> Result<&'static Nccl, Error> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    let found = NCCL.get_or_init(|| find(env::var_os(VARIABLE).as_deref()));
    found.as_ref().map_err(|reason| Error::Unavailable { backend: NAME, reason: reason.clone() })
}

/// Finds NCCL in the folder `chosen`, if given, otherwise through the system's loader.
fn find(chosen: Option<&OsStr>) -> Result<Nccl, String> {
    let (candidates, advice) = match chosen.filter(|path| !path.is_empty()).map(Path::new) {
        None => {
            let names = NAMES.iter().map(PathBuf::from).collect();
            (names, format!("; fix: {INSTALL}, or set {VARIABLE} to the folder that holds it"))
        }
        Some(folder) => {
            let folders = SUBFOLDERS.map(|below| folder.join(below));
            let files: Vec<_> = folders.iter().flat_map(|folder| in_folder(folder, NAMES)).collect();
            let (folder, names) = (folder.display(), NAMES.join(" or "));
            (
                files,
                format!(
                    ": {VARIABLE} names {folder}, a folder that must hold {names}, itself or in lib or nvidia/nccl/lib"
                ),
            )
        }
    };
    let Opened { library, path } = open_first(candidates, "NCCL library", &advice)?;
    Nccl::new(library, &path)
}

impl Nccl {
    /// Checks a library that was loaded from this path or bare name.
    fn new(library: Library, path: &Path) -> Result<Nccl, String> {
        let path = path.display();
        // The version is checked before the functions, because an old NCCL lacks some.
        // SAFETY:
        // - type: nccl.h declares ncclGetVersion(int*) -> ncclResult_t, an int.
        let get_version = unsafe { function::<unsafe extern "C" fn(*mut c_int) -> Status>(&library, "ncclGetVersion") }
            .map_err(|error| format!("{path} is no NCCL: {error}"))?;
        let mut code = 0;
        // SAFETY:
        // - argument: a valid place for one int.
        let status = unsafe { get_version(&raw mut code) };
        if status != SUCCESS {
            return Err(format!("{path} is no working NCCL: ncclGetVersion gives error {status}"));
        }
        let version = Version::of_code(code);
        if version < OLDEST {
            return Err(format!("{path} is NCCL {version}, {OLDEST} is the oldest that works; fix: {INSTALL}"));
        }
        // SAFETY:
        // - types: as nccl.h has declared them since NCCL 2.14, the version that added
        //   ncclCommFinalize, the newest of them. C's enums are ints.
        let functions = unsafe { Functions::of(&library) }
            .map_err(|error| format!("NCCL {version}, {path}, is broken: {error}"))?;
        Ok(Nccl { version, functions, _library: library })
    }

    /// The version: major, minor, patch.
    pub(crate) fn version(&self) -> (u32, u32, u32) {
        (self.version.major, self.version.minor, self.version.patch)
    }

    /// NCCL's description of a result code.
    pub(crate) fn description(&self, status: Status) -> String {
        // SAFETY:
        // - argument: any value is allowed; NCCL has a text for unknown ones.
        // - string: terminated, and constant for as long as the library is loaded.
        unsafe { text((self.functions.error_string)(status)) }
    }

    /// NCCL's last error text, of this call or another; empty if there is none.
    pub(crate) fn last_error(&self) -> String {
        // SAFETY:
        // - communicator: not used, and may be null.
        // - string: in a buffer that is never freed and always ends in a zero. Another thread's
        //   failure may change it meanwhile, to other bytes, which are not expected to be text.
        unsafe { text((self.functions.last_error)(std::ptr::null_mut())) }
    }
}

/// A copy of a C string.
///
/// # Safety
/// `string` is null, or terminated and valid during this call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY:
    // - string: not null; otherwise the caller's promise.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).finish_non_exhaustive()
    }
}

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// Decodes NCCL's number: `1000 major + 100 minor + patch` up to version 2.8, later
    /// `10000 major + ...`.
    fn of_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        let per_major = if code < 10_000 { 1_000 } else { 10_000 };
        Version { major: code / per_major, minor: code % per_major / 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn both_ways_to_number_versions_are_read() {
        let texts = [2_408, 2_804, 20_906, 21_403, 22_809, 23_004].map(|code| Version::of_code(code).to_string());
        assert_eq!(texts, ["2.4.8", "2.8.4", "2.9.6", "2.14.3", "2.28.9", "2.30.4"]);
        assert!(Version::of_code(21_304) < OLDEST && Version::of_code(21_400) == OLDEST);
    }

    /// Only the named folder is searched.
    #[test]
    fn a_folder_without_nccl_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let reason = find(Some(folder.path().as_os_str())).expect_err("an empty folder");
        let path = folder.path().display();
        let expected = format!(
            "no NCCL library can be loaded: RMSNORM_NCCL names {path}, a folder that must hold libnccl.so.2 or libnccl.so, itself or in \
             lib or nvidia/nccl/lib"
        );
        assert_eq!(reason, expected);
    }

    #[test]
    fn libraries_are_found_where_packages_and_wheels_have_them() {
        for below in SUBFOLDERS {
            let folder = tempfile::tempdir().expect("a folder");
            let place = folder.path().join(below);
            fs::create_dir_all(&place).expect("a folder");
            fs::write(place.join("libnccl.so.2"), "no library").expect("a file");
            let reason = find(Some(folder.path().as_os_str())).expect_err("no library");
            let tried = format!("tried {} (", place.join("libnccl.so.2").display());
            assert!(reason.contains(&tried), "{reason}");
        }
    }

    #[test]
    fn another_library_is_no_nccl() {
        let Ok(Opened { library, path }) = open_first(["libc.so.6".into()], "", "") else { return };
        let reason = Nccl::new(library, &path).expect_err("no NCCL");
        assert!(reason.starts_with("libc.so.6 is no NCCL: ") && reason.contains("ncclGetVersion"), "{reason}");
    }
}
