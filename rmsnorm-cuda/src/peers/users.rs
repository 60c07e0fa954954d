//! Tracks the processes that have a rank's memory mapped.

use std::collections::hash_map::RandomState;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions, remove_file};
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, io, thread};

/// How long an owner waits for other processes to unmap its memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// The interval between checks of the lock.
const INTERVAL: Duration = Duration::from_millis(1);

/// Identifies the memory of one rank on this machine.
pub(super) type Id = [u8; 16];

/// A random number, which no other rank has.
pub(super) fn random_id() -> Id {
    // The standard library seeds each state with random numbers of the system.
    let half = || RandomState::new().build_hasher().finish();
    (u128::from(half()) << 64 | u128::from(half())).to_ne_bytes()
}

/// The owner's side: a file on which every process that maps the memory holds a shared lock. The
/// system releases the lock when a process ends, however it ends, so the owner can tell when no
/// process has the memory mapped. CUDA requires that the memory is not freed earlier.
#[derive(Debug)]
pub(super) struct Users {
    file: File,
    path: PathBuf,
}

impl Users {
    /// For memory that no other process knows yet.
    pub(super) fn new(id: Id) -> io::Result<Self> {
        let path = path(id);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Users { file, path })
    }

    /// Waits up to [`PATIENCE`]; `true` if no process has the memory mapped, and none can map it
    /// from now on.
    pub(super) fn are_gone(&self) -> bool {
        self.are_gone_within(PATIENCE)
    }

    fn are_gone_within(&self, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            // Any failure to get the lock counts as "still mapped".
            if self.file.try_lock().is_ok() {
                return true;
            }
            if start.elapsed() >= patience {
                return false;
            }
            thread::sleep(INTERVAL);
        }
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        // A file that remains is empty, and its name is never used again.
        remove_file(&self.path).unwrap_or_default();
    }
}

/// A process's lock on memory that it maps, held while it is mapped.
#[derive(Debug)]
pub(super) struct User {
    file: File,
}

impl User {
    /// Takes the lock, before the memory is mapped.
    ///
    /// # Errors
    /// If the owner is gone, has given the memory up, or has another temporary folder than this
    /// process.
    pub(super) fn new(id: Id) -> io::Result<Self> {
        let file = File::open(path(id))?;
        file.try_lock_shared()?;
        Ok(User { file })
    }
}

/// Unlocks explicitly: a process that was forked meanwhile shares the file, and would keep the
/// lock.
impl Drop for User {
    fn drop(&mut self) {
        // A failure cannot be reported; the owner then waits, and leaves its memory allocated.
        self.file.unlock().unwrap_or_default();
    }
}

fn path(id: Id) -> PathBuf {
    let mut name = String::from("rmsnorm-peers-");
    for byte in id {
        // Writing to a string does not fail.
        write!(name, "{byte:02x}").unwrap_or_default();
    }
    env::temp_dir().join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn an_owner_waits_for_the_last_user() {
        let id = random_id();
        let users = Users::new(id).expect("a file");
        let both = [User::new(id).expect("a user"), User::new(id).expect("a second")];
        assert!(!users.are_gone_within(SHORT));
        let [first, second] = both;
        drop(first);
        assert!(!users.are_gone_within(SHORT));
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SHORT);
                drop(second);
            });
            assert!(users.are_gone_within(Duration::MAX));
        });
    }

    #[test]
    fn what_an_owner_has_given_up_is_not_mapped_any_more() {
        let id = random_id();
        let users = Users::new(id).expect("a file");
        assert!(users.are_gone());
        assert_eq!(User::new(id).expect_err("no user").kind(), io::ErrorKind::WouldBlock);
        drop(users);
        assert_eq!(User::new(id).expect_err("no file").kind(), io::ErrorKind::NotFound);
        assert_eq!(User::new(random_id()).expect_err("never was").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn ids_differ() {
        let ids: std::collections::BTreeSet<Id> = (0..100).map(|_| random_id()).collect();
        assert_eq!(ids.len(), 100);
    }
}
