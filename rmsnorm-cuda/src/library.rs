//! Finds NVIDIA's libraries at run time, when they are first needed; none is needed at build time.
//!
//! cudarc loads the driver itself, and panics if it is missing or incomplete. This module therefore
//! looks for the driver first, under cudarc's names and in its order, and reports problems as
//! [`Error::Unavailable`]. Only this crate calls NVRTC and NCCL. Each library is searched once per
//! process, and stays loaded.

/// Declares the functions of a library that this crate calls: a Rust name, the symbol, and the type
/// in the library's header.
macro_rules! functions {
    ($($name:ident = $symbol:literal: $type:ty;)*) => {
        /// As the header declares them.
        pub(crate) struct Functions {
            $(pub(crate) $name: $type,)*
        }

        impl Functions {
            /// # Safety
            /// The library gives its functions these types.
            ///
            /// # Errors
            /// The library lacks a function.
            unsafe fn of(library: &Library) -> Result<Functions, String> {
                // SAFETY:
                // - types: the caller's promise.
                unsafe { Ok(Functions { $($name: function::<$type>(library, $symbol)?,)* }) }
            }
        }
    };
}

#[cfg(feature = "nccl")]
pub(crate) mod nccl;
mod nvrtc;

use std::env;
use std::ffi::{OsStr, OsString, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;
use rmsnorm_spec::Error;

use crate::error::unavailable;
pub(crate) use nvrtc::{Failure, Nvrtc};

/// The environment variable that names an NVRTC library, or the folder that holds one, to use
/// instead of any other.
const NVRTC_VARIABLE: &str = "RMSNORM_NVRTC";

/// File names of the driver, for the system's loader.
const DRIVER_NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// The oldest and the newest of the driver functions that the backend calls. A driver that has
/// these has all of them.
const DRIVER_FUNCTIONS: [&str; 6] =
    ["cuInit", "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString", "cuMemAllocAsync", "cuLaunchKernelEx"];

/// File names of NVRTC with their major version of CUDA, for the system's loader.
const NVRTC_NAMES: &[(c_int, &str)] = if cfg!(windows) {
    &[(13, "nvrtc64_130_0.dll"), (12, "nvrtc64_120_0.dll"), (11, "nvrtc64_112_0.dll")]
} else {
    &[(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12"), (11, "libnvrtc.so.11.2")]
};

/// The file name of NVRTC in a developer toolkit, of any version.
const NVRTC_PLAIN_NAME: &str = if cfg!(windows) { "nvrtc.dll" } else { "libnvrtc.so" };

/// The fix of a missing driver.
const INSTALL_DRIVER: &str = "install NVIDIA's driver (Debian: apt install nvidia-driver, Ubuntu: ubuntu-drivers install), \
     or start the container with the GPUs (docker run --gpus all)";

/// The fix of a driver that is too old. Its version is the first that supports CUDA 12.0.
pub(crate) const UPDATE_DRIVER: &str = "install NVIDIA's driver 525 or later, then restart the machine";

/// The fix of a missing NVRTC, for a driver of CUDA 13 or later.
const INSTALL_NVRTC_13: &str = "pip install nvidia-cuda-nvrtc, and outside of Python also export \
     RMSNORM_NVRTC=$(python3 -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')/lib";

/// The fix of a missing NVRTC, for a driver of CUDA 12, which loads no code of a later compiler.
const INSTALL_NVRTC_12: &str = "pip install nvidia-cuda-nvrtc-cu12, and outside of Python also export \
     RMSNORM_NVRTC=$(python3 -c 'import nvidia.cuda_nvrtc as m; print(list(m.__path__)[0])')/lib";

/// Checks that the driver can be loaded, and that this crate and cudarc can use it.
///
/// # Errors
/// `Unavailable` if it is missing, broken, a stub of the toolkit, or so old that it lacks a
/// function.
pub(crate) fn require_driver() -> Result<(), Error> {
    driver().map(|_| ())
}

/// Checks that NVRTC can be loaded.
///
/// # Errors
/// `Unavailable` if it is missing, broken, or lacks a function.
pub(crate) fn require_nvrtc() -> Result<(), Error> {
    nvrtc().map(|_| ())
}

/// The NVRTC library of this process.
///
/// # Errors
/// As [`require_nvrtc`].
pub(crate) fn nvrtc() -> Result<&'static Nvrtc, Error> {
    static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    let find = || find_nvrtc(env::var_os(NVRTC_VARIABLE).as_deref(), OTHER_FOLDERS.get().map_or(&[], Vec::as_slice));
    NVRTC.get_or_init(find).as_ref().map_err(unavailable)
}

/// Folders that are searched for NVRTC before the usual places.
static OTHER_FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Makes NVRTC be searched in these folders first, unless `RMSNORM_NVRTC` is set: in all of them
/// for the best version, then for the next. Only the first call of the process has an effect. Call
/// it before any use of CUDA.
pub fn look_for_nvrtc_in(folders: Vec<PathBuf>) {
    let _ = OTHER_FOLDERS.set(folders);
}

fn driver() -> Result<&'static Driver, Error> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::find(DRIVER_NAMES)).as_ref().map_err(unavailable)
}

/// The loaded driver. It is kept, as cudarc may load it again at any time.
#[derive(Debug)]
struct Driver {
    version: c_int,
    _library: Library,
}

impl Driver {
    fn find(names: &[&str]) -> Result<Driver, String> {
        let fix = format!("; fix: {INSTALL_DRIVER}");
        let Opened { library, path } = open_first(names.iter().map(PathBuf::from), "NVIDIA driver", &fix)?;
        let path = path.display();
        type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY:
        // - type: the driver API documents cuDriverGetVersion(int*) -> CUresult, an int.
        let get_version = unsafe { function::<Version>(&library, "cuDriverGetVersion") }
            .map_err(|error| format!("{path} is not an NVIDIA driver: {error}{fix}"))?;
        let mut version = 0;
        // SAFETY:
        // - argument: a valid place for one int.
        // - state: this function needs no cuInit.
        let status = unsafe { get_version(&mut version) };
        if status != 0 {
            return Err(format!(
                "{path} is not a working NVIDIA driver: cuDriverGetVersion gives error {status}; fix: remove the CUDA \
                 toolkit's folder `stubs` from LD_LIBRARY_PATH, or {INSTALL_DRIVER}"
            ));
        }
        for name in DRIVER_FUNCTIONS {
            // SAFETY:
            // - type: only looked up, never called or read through.
            unsafe { function::<*const ()>(&library, name) }.map_err(|error| {
                format!("the NVIDIA driver {path} is too old or broken: {error}; fix: {UPDATE_DRIVER}")
            })?;
        }
        Ok(Driver { version, _library: library })
    }
}

/// Finds NVRTC at `chosen`, if given, otherwise in `others` and the usual places.
fn find_nvrtc(chosen: Option<&OsStr>, others: &[PathBuf]) -> Result<Nvrtc, String> {
    let others = if chosen.is_some() { &[] } else { others };
    let chosen = chosen.filter(|path| !path.is_empty()).map(Path::new);
    let driver_major = driver().map_or(c_int::MAX, |driver| driver.version / 1000);
    let names = nvrtc_names(driver_major);
    let (candidates, advice) = match chosen {
        None => {
            let mut places = best_first(others, &names);
            places.extend(usual_places(&names, toolkit_folders()));
            let install = if driver_major < 13 { INSTALL_NVRTC_12 } else { INSTALL_NVRTC_13 };
            (places, format!("; fix: {install}"))
        }
        Some(path) if path.is_dir() => {
            let folder = format!(": {NVRTC_VARIABLE} is the folder {}", path.display());
            let fix = format!("set {NVRTC_VARIABLE} to the folder that holds it, or unset it");
            (in_folder(path, &names), format!("{folder}, which must hold one of {}; fix: {fix}", names.join(", ")))
        }
        Some(path) => {
            let fix = format!("set {NVRTC_VARIABLE} to an NVRTC library or to its folder, or unset it");
            (vec![path.to_owned()], format!("; fix: {fix}"))
        }
    };
    let Opened { library, path } = open_first(candidates, "NVRTC library", &advice)?;
    Nvrtc::new(library, &path)
}

/// NVRTC's file names, best first. A driver loads no code of a newer CUDA release, so newer
/// versions come last.
fn nvrtc_names(driver_major: c_int) -> Vec<&'static str> {
    let (usable, too_new): (Vec<_>, Vec<_>) = NVRTC_NAMES.iter().partition(|(major, _)| *major <= driver_major);
    let plain = [NVRTC_PLAIN_NAME];
    usable.into_iter().map(|(_, name)| name).chain(plain).chain(too_new.into_iter().map(|(_, name)| name)).collect()
}

/// Candidates for the system's loader, followed by the files in `folders`.
fn usual_places(names: &[&str], folders: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    places.extend(folders.into_iter().flat_map(|folder| in_folder(&folder, names)));
    places
}

/// The files with these names in `folders`, sorted by name, in the order of `names`.
fn best_first(folders: &[PathBuf], names: &[&str]) -> Vec<PathBuf> {
    names.iter().flat_map(|&name| folders.iter().flat_map(move |folder| in_folder(folder, &[name]))).collect()
}

/// The files with these names in `folder`.
fn in_folder(folder: &Path, names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// The library folders of the toolkit's installers.
fn toolkit_folders() -> Vec<PathBuf> {
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(env::var_os).filter(|root| !root.is_empty());
    let roots = named.chain(cfg!(unix).then(|| OsString::from("/usr/local/cuda")));
    roots.map(|root| Path::new(&root).join(if cfg!(windows) { "bin" } else { "lib64" })).collect()
}

/// A library, and the path or bare name that it was loaded from.
struct Opened {
    library: Library,
    path: PathBuf,
}

/// The first library that can be loaded.
///
/// # Errors
/// None can: the names that were tried, followed by `advice`.
fn open_first(paths: impl IntoIterator<Item = PathBuf>, what: &str, advice: &str) -> Result<Opened, String> {
    let (mut tried, mut broken) = (Vec::new(), String::new());
    for path in paths {
        // SAFETY:
        // - initializers: the driver's, NVRTC's and NCCL's may run on any thread at any time, and a
        //   process that uses CUDA runs them anyway. A user who names a file vouches for it.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(Opened { library, path }),
            Err(error) => {
                let error = error_chain(&error);
                // A file that exists but cannot be loaded has a more specific error.
                if !error.contains("No such file") {
                    broken += &format!(" ({error})");
                }
                tried.push(path.display().to_string());
            }
        }
    }
    let tried = if tried.is_empty() { String::new() } else { format!(", tried {}", tried.join(", ")) };
    Err(format!("no {what} can be loaded{tried}{broken}{advice}"))
}

/// A function of a library.
///
/// # Safety
/// `F` is a pointer, and the type that the library gives the function.
///
/// # Errors
/// The library has no function `name`.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY:
    // - type: the caller's promise.
    let symbol = unsafe { library.get::<F>(name) };
    symbol.map(|symbol| *symbol).map_err(|error| error_chain(&error))
}

/// The system's error text, which libloading keeps as the source of its error.
fn error_chain(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn compilers_that_the_driver_understands_come_first() {
        let of = nvrtc_names;
        assert_eq!(of(c_int::MAX).first(), Some(&NVRTC_NAMES[0].1));
        assert_eq!(of(13).first(), Some(&NVRTC_NAMES[0].1));
        assert_eq!(of(12).first(), Some(&NVRTC_NAMES[1].1));
        assert_eq!(of(12).last(), Some(&NVRTC_NAMES[0].1));
        assert_eq!(of(11)[..2], [NVRTC_NAMES[2].1, NVRTC_PLAIN_NAME]);
        assert!([11, 12, 13].iter().all(|&major| of(major).len() == NVRTC_NAMES.len() + 1));
    }

    #[test]
    fn a_missing_library_says_what_was_tried_and_what_to_do() {
        let reason = Driver::find(&["libno-such.so", "libno-such.so.1"]).expect_err("no such library");
        assert_eq!(
            reason,
            "no NVIDIA driver can be loaded, tried libno-such.so, libno-such.so.1; fix: install NVIDIA's driver (Debian: \
             apt install nvidia-driver, Ubuntu: ubuntu-drivers install), or start the container with the GPUs (docker run \
             --gpus all)"
        );
    }

    #[test]
    fn a_library_that_cannot_be_loaded_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("libcuda.so");
        fs::write(&file, "no library").expect("a file");
        let name = file.to_str().expect("a name");
        let reason = Driver::find(&[name]).expect_err("no library");
        assert!(reason.contains(&format!("tried {name} (")), "{reason}");
    }

    #[test]
    fn another_library_is_no_driver_and_no_compiler() {
        let Ok(Opened { library, path }) = open_first(["libc.so.6".into()], "", "") else { return };
        let reason = Driver::find(&["libc.so.6"]).expect_err("no driver");
        assert!(reason.starts_with("libc.so.6 is not an NVIDIA driver: ") && reason.contains("cuDriverGetVersion"));
        let reason = Nvrtc::new(library, &path).expect_err("no compiler");
        assert!(reason.starts_with("libc.so.6 is no usable NVRTC") && reason.contains("nvrtcVersion"), "{reason}");
    }

    #[test]
    fn a_chosen_compiler_is_the_only_one_tried() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("no-such-file.so");
        let reason = find_nvrtc(Some(file.as_os_str()), &[]).expect_err("no such file");
        assert!(reason.contains(&format!("tried {}; fix: set RMSNORM_NVRTC to", file.display())), "{reason}");
        let reason = find_nvrtc(Some(folder.path().as_os_str()), &[]).expect_err("an empty folder");
        assert!(reason.contains("RMSNORM_NVRTC is the folder") && reason.contains(NVRTC_NAMES[0].1), "{reason}");
    }

    #[test]
    fn of_other_folders_the_best_version_is_tried_first_unless_one_is_chosen() {
        let root = tempfile::tempdir().expect("a folder");
        // The older version is in the first folder.
        let folders = [root.path().join("cuda_nvrtc"), root.path().join("cu13")];
        let [newest, older, _] = NVRTC_NAMES.iter().map(|(_, name)| *name).collect::<Vec<_>>()[..] else {
            panic!("three versions")
        };
        for (folder, name) in folders.iter().zip([older, newest]) {
            fs::create_dir(folder).expect("a folder");
            fs::write(folder.join(name), "no library").expect("a file");
        }
        let [first, second] = [folders[1].join(newest), folders[0].join(older)];
        assert_eq!(best_first(&folders, &nvrtc_names(c_int::MAX)), [first.clone(), second.clone()]);
        assert_eq!(best_first(&folders, &nvrtc_names(12)), [second, first.clone()]);
        let chosen = root.path().join("none.so");
        let reason = find_nvrtc(Some(chosen.as_os_str()), &folders).expect_err("no such file");
        assert!(!reason.contains(&first.display().to_string()), "{reason}");
    }
}
