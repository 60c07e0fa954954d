//! Paths of the user's cache folders.

use std::env;
use std::path::PathBuf;

/// Environment variable with the cache folder of all backends. Empty: no cache.
pub const FOLDER_VARIABLE: &str = "RMSNORM_CACHE_DIR";

/// The user's cache folder of a backend: `RMSNORM_CACHE_DIR`, or `rmsnorm/BACKEND` in the system's
/// cache folder of the user. `None` if there is no such folder, or the variable is empty.
pub fn of_user(backend: &str) -> Option<PathBuf> {
    folder(backend, System::HOST, |name| env::var_os(name).map(PathBuf::from))
}

/// Whether the user turned caches off: the variable is set and empty.
pub fn is_off() -> bool {
    env::var_os(FOLDER_VARIABLE).is_some_and(|folder| folder.is_empty())
}

/// Operating systems, by the location of a user's caches.
#[derive(Clone, Copy)]
enum System {
    Windows,
    MacOs,
    Other,
}

impl System {
    const HOST: System = if cfg!(windows) {
        System::Windows
    } else if cfg!(target_os = "macos") {
        System::MacOs
    } else {
        System::Other
    };
}

/// The cache folder of a backend, from the system and the environment.
fn folder(backend: &str, system: System, variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(folder) = variable(FOLDER_VARIABLE) {
        return Some(folder).filter(|folder| !folder.as_os_str().is_empty());
    }
    // The XDG specification says to ignore relative paths.
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let caches = match system {
        System::Windows => absolute("LOCALAPPDATA"),
        System::MacOs => absolute("HOME").map(|home| home.join("Library/Caches")),
        System::Other => absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache"))),
    };
    Some(caches?.join("rmsnorm").join(backend))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_where_entries_belong() {
        for backend in ["cuda", "wgpu"] {
            let on = |system, set: &[(&str, &str)]| {
                let value =
                    |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value));
                folder(backend, system, value)
            };
            for system in [System::Windows, System::MacOs, System::Other] {
                let at = |set| on(system, set);
                assert_eq!(at(&[]), None);
                assert_eq!(at(&[("RMSNORM_CACHE_DIR", "here"), ("HOME", "/home/a")]), Some("here".into()));
                assert_eq!(at(&[("RMSNORM_CACHE_DIR", ""), ("HOME", "/home/a")]), None);
                assert_eq!(at(&[("HOME", "")]), None);
            }
            if cfg!(unix) {
                let of = |caches: &str| Some(format!("{caches}/rmsnorm/{backend}").into());
                let at = |set| on(System::Other, set);
                assert_eq!(at(&[("HOME", "/home/a")]), of("/home/a/.cache"));
                assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), of("/c"));
                assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "c")]), of("/home/a/.cache"));
                let at = |set| on(System::MacOs, set);
                assert_eq!(at(&[("HOME", "/Users/a"), ("XDG_CACHE_HOME", "/c")]), of("/Users/a/Library/Caches"));
                assert_eq!(on(System::Windows, &[("LOCALAPPDATA", "/data"), ("HOME", "/a")]), of("/data"));
            }
        }
    }
}
