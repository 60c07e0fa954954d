//! Which processes have a rank's memory mapped.

use std::collections::hash_map::RandomState;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions, remove_file};
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, io, thread};

/// How long an owner waits for others to have closed what they have mapped.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it looks.
const INTERVAL: Duration = Duration::from_millis(1);

/// Tells the memory of one rank from all others on this machine.
pub(super) type Id = [u8; 16];

/// A number that no other has been given.
pub(super) fn random_id() -> Id {
    // The standard library seeds each of them by the system's random numbers.
    let half = || RandomState::new().build_hasher().finish();
    (u128::from(half()) << 64 | u128::from(half())).to_ne_bytes()
}

/// The owner's side: a file on which whoever maps the memory holds a shared lock. The system takes that back when a process ends, however
/// it does, so that the owner can tell when nobody has the memory mapped any more. CUDA asks that it is not freed before.
#[derive(Debug)]
pub(super) struct Users {
    file: File,
    path: PathBuf,
}

impl Users {
    /// Of memory that nobody knows of yet.
    pub(super) fn new(id: Id) -> io::Result<Self> {
        let path = path(id);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Users { file, path })
    }

    /// Whether nobody has the memory mapped, after a while at the most, and nobody can map it any more.
    pub(super) fn are_gone(&self) -> bool {
        self.are_gone_within(PATIENCE)
    }

    fn are_gone_within(&self, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            // Whatever kept the lock from being had: then it is not known.
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
        // A file that stays is empty, and its name is never used again.
        remove_file(&self.path).unwrap_or_default();
    }
}

/// The side of a process that maps the memory, for as long as it does.
#[derive(Debug)]
pub(super) struct User {
    file: File,
}

impl User {
    /// Says that the memory is about to be mapped.
    ///
    /// # Errors
    /// If its owner is gone, has given it up, or has other folders than this process.
    pub(super) fn new(id: Id) -> io::Result<Self> {
        let file = File::open(path(id))?;
        file.try_lock_shared()?;
        Ok(User { file })
    }
}

/// The lock ends with the file, but for a process that was forked meanwhile and has it, too.
impl Drop for User {
    fn drop(&mut self) {
        // Of one that fails there is nobody to tell: the owner waits, and leaves its memory.
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
