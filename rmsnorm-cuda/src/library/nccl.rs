//! NCCL: the few of its functions that we call.
//!
//! cudarc has these too, but looks for `libnccl.so` and not for `libnccl.so.2`, as every package of NCCL has it, cannot be told of
//! another, and panics where the library or a function is missing. Its types are the ones used here, but for what functions return:
//! a later NCCL may have more codes than a Rust enum knows.

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;
use rmsnorm_spec::Error;

use super::{Opened, function, in_folder, open_first};

/// Names the folder that holds NCCL, to be used instead of any other.
const VARIABLE: &str = "RMSNORM_NCCL";

/// NCCL, where the system's loader looks, and in a folder. A library that the process has loaded under the first name already, as
/// PyTorch does, is the one that is found.
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];

/// Where NCCL is below a folder that is named: there, in one of NVIDIA's packages, in one of PyTorch's wheels.
const SUBFOLDERS: [&str; 3] = ["", "lib", "nvidia/nccl/lib"];

/// The oldest that has all of what is called, `ncclCommFinalize` last.
const OLDEST: Version = Version { major: 2, minor: 14, patch: 0 };

const INSTALL: &str = "install NCCL: the system's package libnccl2, or pip's nvidia-nccl-cu12 or -cu13";

/// ncclResult_t
pub(crate) type Status = c_int;
/// `ncclSuccess`
pub(crate) const SUCCESS: Status = 0;
/// `ncclInProgress`: of a communicator that does not block.
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
    /// The functions' code.
    _library: Library,
}

/// NCCL.
///
/// # Errors
/// `Unavailable`: it is missing, broken, too old, or lacks a function.
pub(crate) fn nccl() -> Result<&'static Nccl, Error> {
    static NCCL: OnceLock<Result<Nccl, String>> = OnceLock::new();
    let found = NCCL.get_or_init(|| find(env::var_os(VARIABLE).as_deref()));
    found.as_ref().map_err(|reason| Error::Unavailable { backend: crate::nccl::NAME, reason: reason.clone() })
}

/// NCCL where `chosen` says, if it does, else where the system's loader looks.
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
    /// From a library that was found under this path or bare name.
    fn new(library: Library, path: &Path) -> Result<Nccl, String> {
        let path = path.display();
        // Before the functions, as an old one lacks some.
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
        // - types: those that nccl.h has declared since NCCL 2.14, the last to be added being ncclCommFinalize. C's enums are ints.
        let functions = unsafe { Functions::of(&library) }
            .map_err(|error| format!("NCCL {version}, {path}, is broken: {error}"))?;
        Ok(Nccl { version, functions, _library: library })
    }

    /// Which it is: major, minor, patch.
    pub(crate) fn version(&self) -> (u32, u32, u32) {
        (self.version.major, self.version.minor, self.version.patch)
    }

    /// What a code means.
    pub(crate) fn description(&self, status: Status) -> String {
        // SAFETY:
        // - argument: any value is allowed; of those it does not know NCCL says so.
        // - string: terminated, and constant for as long as the library is loaded.
        unsafe { text((self.functions.error_string)(status)) }
    }

    /// What NCCL has last said of an error, of this call or another; empty if nothing.
    pub(crate) fn last_error(&self) -> String {
        // SAFETY:
        // - communicator: not used, and may be null.
        // - string: in a buffer that is never freed and always ends in a zero. Another thread's failure may change it meanwhile, to
        //   other bytes, which are not expected to be text.
        unsafe { text((self.functions.last_error)(std::ptr::null_mut())) }
    }
}

/// A copy of a string of C's.
///
/// # Safety
/// It is null, or terminated and valid during this call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY:
    // - string: not null; else the caller's promise.
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
    /// From NCCL's number: 1000 major + 100 minor + patch up to 2.8, 10000 major + 100 minor + patch since.
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

    /// A folder that is named is the only place that is tried.
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
