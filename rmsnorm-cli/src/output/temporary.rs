//! Files that are still being written, under a name of their own beside the place that they will take.
//!
//! A killed program leaves such a file behind, and the next one that writes into the folder removes it. Whoever writes one
//! holds a lock on it, which the system takes away with the program: a file that can be locked is abandoned.

use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::path::Path;

use tempfile::NamedTempFile;

const PREFIX: &str = ".rmsnorm-";
const SUFFIX: &str = ".tmp";

/// The random characters between them, letters and digits.
const RANDOM: usize = 6;

/// So often another program may find a file between its creation and its lock, and take it for abandoned. Once is rare.
const TRIES: usize = 8;

/// A new file in that folder, locked. It vanishes when dropped.
///
/// # Errors
/// If the folder refuses.
pub fn create(folder: &Path) -> io::Result<NamedTempFile> {
    for _ in 0..TRIES {
        if let Some(file) = claim(unlocked(folder)?) {
            return Ok(file);
        }
    }
    Err(io::Error::other("temporary files vanish as soon as they are created"))
}

/// Locks a new file, unless another program was first.
fn claim(file: NamedTempFile) -> Option<NamedTempFile> {
    match file.as_file().try_lock() {
        // It may have come and gone before the lock.
        Ok(()) if !file.path().exists() => None,
        Err(TryLockError::WouldBlock) => None,
        // A file system without locks: there, nobody can take the file for abandoned either.
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

/// Temporary files are private by default; a result gets the permissions of any new file, less the umask.
#[cfg(unix)]
fn new_file_permissions() -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(0o666))
}

#[cfg(not(unix))]
fn new_file_permissions() -> Option<Permissions> {
    None
}

/// Removes what killed programs have left in that folder. What cannot be removed stays: it is in nobody's way, and no
/// reason to refuse a result.
pub fn remove_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(is_temporary);
        if is_ours && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let _ = remove_unlocked(&entry.path());
        }
    }
}

/// Removes a file unless someone holds its lock.
fn remove_unlocked(path: &Path) -> io::Result<()> {
    // Some file systems lock only what may be written.
    let file = File::options().write(true).open(path)?;
    file.try_lock()?;
    fs::remove_file(path)
}

/// Whether a name is one that [`create`] gives.
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
        // As by a kill: the file stays, its lock does not.
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
