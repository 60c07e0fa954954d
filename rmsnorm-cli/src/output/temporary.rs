//! Temporary files: they are written in the folder of the result and then renamed.
//!
//! A killed program leaves its temporary file, and the next program that writes into the folder
//! removes it. A program locks its file while it writes, and the system releases the lock when the
//! program ends: an unlocked file is abandoned.

use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::path::Path;

use tempfile::NamedTempFile;

const PREFIX: &str = ".rmsnorm-";
const SUFFIX: &str = ".tmp";

/// The number of random letters and digits between prefix and suffix.
const RANDOM: usize = 6;

/// Attempts to create a file. Another program may remove a file between its creation and its lock,
/// which is rare.
const TRIES: usize = 8;

/// Creates a locked file in the folder. It is deleted when dropped.
///
/// # Errors
/// The folder cannot be written.
pub fn create(folder: &Path) -> io::Result<NamedTempFile> {
    for _ in 0..TRIES {
        if let Some(file) = claim(unlocked(folder)?) {
            return Ok(file);
        }
    }
    Err(io::Error::other("temporary files vanish as soon as they are created"))
}

/// Locks a new file. `None` if another program has locked or removed it.
fn claim(file: NamedTempFile) -> Option<NamedTempFile> {
    match file.as_file().try_lock() {
        // Another program locked, removed and unlocked it.
        Ok(()) if !file.path().exists() => None,
        Err(TryLockError::WouldBlock) => None,
        // On a file system without locks no other program can remove the file either.
        Ok(()) | Err(TryLockError::Error(_)) => Some(file),
    }
}

fn unlocked(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX).rand_bytes(RANDOM);
    let permissions = new_file_permissions();
    if let Some(permissions) = permissions {
        builder.permissions(permissions);
    }
    builder.tempfile_in(folder)
}

/// Read and write for everyone, less the umask, as for any new file. The default of temporary files
/// is private.
#[cfg(unix)]
fn new_file_permissions() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn new_file_permissions() -> Option<Permissions> {
    None
}

/// Removes the temporary files of killed programs from the folder. Files that cannot be removed
/// stay, without an error.
pub fn remove_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(is_temporary);
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = remove_unlocked(&entry.path());
        }
    }
}

/// Removes a file unless a program holds its lock.
fn remove_unlocked(path: &Path) -> io::Result<()> {
    // Some file systems lock only files that are open for writing.
    let file = File::options().write(true).open(path)?;
    file.try_lock()?;
    fs::remove_file(path)
}

/// Whether a name has the form of the names that [`create`] gives.
fn is_temporary(name: &str) -> bool {
    let random = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX));
    random.is_some_and(|random| random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_again_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(folder.path()).unwrap();
        assert!(is_temporary(file.path().file_name().unwrap().to_str().unwrap()));
        for other in [".rmsnorm-abc12.tmp", ".rmsnorm-abc1234.tmp", ".rmsnorm-ab-123.tmp", ".rmsnorm-abc123", "out"] {
            assert!(!is_temporary(other), "{other}");
        }
    }

    #[test]
    fn a_file_is_removed_once_its_writer_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(folder.path()).unwrap();
        remove_abandoned(folder.path());
        assert!(file.path().exists());
        // As after a kill: the file stays, without a lock.
        let (_, path) = file.keep().unwrap();
        remove_abandoned(folder.path());
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_was_found_before_its_lock_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let found = || {
            let file = unlocked(folder.path()).unwrap();
            let other = File::open(file.path()).unwrap();
            other.lock().unwrap();
            (file, other)
        };
        let (file, _other) = found();
        assert!(claim(file).is_none());
        let (file, other) = found();
        fs::remove_file(file.path()).unwrap();
        drop(other);
        assert!(claim(file).is_none());
        assert!(claim(unlocked(folder.path()).unwrap()).is_some());
    }

    #[test]
    fn a_file_is_whole_however_often_another_program_cleans() {
        let folder = tempfile::tempdir().unwrap();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    remove_abandoned(folder.path());
                }
            });
            for i in 0..200 {
                let path = folder.path().join(i.to_string());
                create(folder.path()).unwrap().persist(&path).unwrap();
                assert!(path.exists());
            }
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
