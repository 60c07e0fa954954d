//! Compiled programs on disk, so that only the first process on a machine waits for the compiler.
//!
//! An entry is a file named by a hash of everything that went into the program. It is written under another name and
//! renamed, so that it is seen whole or not at all; and it holds its own hash, so that one that is damaged or foreign is
//! not used but replaced. Where the folder cannot be read or written, there is no cache, and nobody is told.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::{env, fmt, fs, io};

use sha2::{Digest, Sha256};

/// The folder of the entries; empty: no cache.
const FOLDER_VARIABLE: &str = "RMSNORM_CACHE_DIR";

/// The first bytes of an entry. They change with its layout.
const MAGIC: &[u8; 16] = b"rmsnorm cubin 1\n";

type Hash = [u8; 32];

/// What a program was made from, as a hash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(Hash);

impl Id {
    /// Of these texts. Every one counts, and so does where it ends.
    pub(crate) fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Id {
        let mut hash = Sha256::new().chain_update(MAGIC);
        for text in texts {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        Id(hash.finalize().into())
    }
}

/// As a file name: 64 hexadecimal digits.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A folder of compiled programs, or none. Whoever can write to it decides what runs on the device.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The cache of this process's user.
    pub(crate) fn of_user() -> Cache {
        Cache { folder: folder(|name| env::var_os(name).map(PathBuf::from)) }
    }

    /// The program of that id, or what `make` gives, which is then kept.
    ///
    /// # Errors
    /// Those of `make` only.
    pub(crate) fn get_or<E>(&self, id: &Id, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let Some(folder) = &self.folder else { return make() };
        let path = folder.join(id.to_string());
        if let Some(cubin) = read(&path, id) {
            return Ok(cubin);
        }
        let cubin = make()?;
        // Without a cache the program still runs.
        let _: Result<(), io::Error> = write(folder, &path, id, &cubin);
        Ok(cubin)
    }
}

/// Where entries belong, given the environment.
fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(folder) = variable(FOLDER_VARIABLE) {
        return Some(folder).filter(|folder| !folder.as_os_str().is_empty());
    }
    // A relative path means nothing here; the XDG specification says to ignore it.
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let caches = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else {
        absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))
    };
    Some(caches?.join("rmsnorm").join("cuda"))
}

/// An entry: magic, id, hash of the program, program. `None` if anything about it is wrong.
fn read(path: &Path, id: &Id) -> Option<Vec<u8>> {
    let entry = fs::read(path).ok()?;
    let rest = entry.strip_prefix(MAGIC)?.strip_prefix(&id.0)?;
    let (hash, cubin) = rest.split_first_chunk::<32>()?;
    (Hash::from(Sha256::digest(cubin)) == *hash).then(|| cubin.to_vec())
}

fn write(folder: &Path, path: &Path, id: &Id, cubin: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
    for part in [MAGIC.as_slice(), &id.0, &Hash::from(Sha256::digest(cubin)), cubin] {
        file.write_all(part)?;
    }
    file.persist(path).map(|_| ()).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    const CUBIN: &[u8] = b"the code";

    struct Folder {
        folder: tempfile::TempDir,
        cache: Cache,
        id: Id,
    }

    impl Folder {
        fn new() -> Folder {
            let folder = tempfile::tempdir().expect("a folder");
            let cache = Cache { folder: Some(folder.path().join("not/yet/there")) };
            Folder { folder, cache, id: Id::of(["source", "option"]) }
        }

        /// What the cache gives, and whether the program had to be made for it.
        fn get(&self) -> (Vec<u8>, bool) {
            get(&self.cache, &self.id)
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("not/yet/there").join(self.id.to_string())
        }
    }

    fn get(cache: &Cache, id: &Id) -> (Vec<u8>, bool) {
        let mut made = false;
        let Ok(cubin) = cache.get_or(id, || {
            made = true;
            Ok::<_, Infallible>(CUBIN.to_vec())
        });
        (cubin, made)
    }

    #[test]
    fn a_program_is_made_once() {
        let folder = Folder::new();
        assert_eq!(folder.get(), (CUBIN.to_vec(), true));
        assert_eq!(folder.get(), (CUBIN.to_vec(), false));
        let other = Id::of(["source", "other option"]);
        assert!(get(&folder.cache, &other).1);
    }

    #[test]
    fn a_failure_is_handed_on_and_not_kept() {
        let folder = Folder::new();
        assert_eq!(folder.cache.get_or(&folder.id, || Err("no")), Err("no"));
        assert!(folder.get().1);
    }

    /// Every single bit, every length, and what is not an entry at all.
    #[test]
    fn a_damaged_entry_is_replaced() {
        let folder = Folder::new();
        folder.get();
        let entry = fs::read(folder.path()).expect("an entry");
        let flipped = (0..entry.len() * 8).map(|bit| {
            let mut entry = entry.clone();
            entry[bit / 8] ^= 1 << (bit % 8);
            entry
        });
        let cut = (0..entry.len()).map(|len| entry[..len].to_vec());
        let longer = [[&entry[..], b"x"].concat(), [b"x", &entry[..]].concat(), b"\x7fELF".to_vec(), vec![0; 100]];
        for damaged in flipped.chain(cut).chain(longer) {
            fs::write(folder.path(), &damaged).expect("a writable entry");
            assert_eq!(folder.get(), (CUBIN.to_vec(), true), "{damaged:?}");
            assert_eq!(fs::read(folder.path()).expect("an entry"), entry);
        }
    }

    #[test]
    fn an_entry_of_another_program_is_replaced() {
        let folder = Folder::new();
        folder.get();
        let moved = Folder { id: Id::of(["another"]), ..folder };
        let from = moved.path().with_file_name(Id::of(["source", "option"]).to_string());
        fs::copy(from, moved.path()).expect("a copy");
        assert!(moved.get().1);
        assert!(!moved.get().1);
    }

    #[test]
    fn a_folder_in_the_way_is_no_cache() {
        let folder = Folder::new();
        fs::create_dir_all(folder.path()).expect("a folder in the entry's place");
        assert_eq!(folder.get(), (CUBIN.to_vec(), true));
        assert_eq!(folder.get(), (CUBIN.to_vec(), true));
        let left = fs::read_dir(folder.path().parent().expect("a folder")).expect("a folder").count();
        assert_eq!(left, 1, "nothing half-written stays");
    }

    /// A file where the folder should be: root may write anywhere else.
    #[test]
    fn an_unwritable_folder_is_no_cache() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let id = Id::of(["source"]);
        for folder in [Some(file.path().join("folder")), None] {
            let cache = Cache { folder };
            assert_eq!(get(&cache, &id), (CUBIN.to_vec(), true));
            assert_eq!(get(&cache, &id), (CUBIN.to_vec(), true));
        }
    }

    #[test]
    fn threads_that_write_at_once_all_see_a_whole_entry() {
        let folder = Folder::new();
        let cubin: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for round in 0..50 {
                        let id = Id::of([round.to_string().as_str()]);
                        barrier.wait();
                        let Ok(got) = folder.cache.get_or(&id, || Ok::<_, Infallible>(cubin.clone()));
                        assert!(got == cubin);
                        let Ok(again) = folder.cache.get_or(&id, || Ok::<_, Infallible>(Vec::new()));
                        assert!(again == cubin, "the entry is there and whole");
                    }
                });
            }
        });
    }

    #[test]
    fn the_environment_says_where_entries_belong() {
        let at = |set: &[(&str, &str)]| {
            folder(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value)))
        };
        assert_eq!(at(&[]), None);
        assert_eq!(at(&[("RMSNORM_CACHE_DIR", "here"), ("HOME", "/home/a")]), Some("here".into()));
        assert_eq!(at(&[("RMSNORM_CACHE_DIR", ""), ("HOME", "/home/a")]), None);
        if cfg!(unix) {
            assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/rmsnorm/cuda".into()));
            assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/rmsnorm/cuda".into()));
            assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "c")]), Some("/home/a/.cache/rmsnorm/cuda".into()));
            assert_eq!(at(&[("HOME", "")]), None);
        }
    }

    #[test]
    fn ids_are_file_names() {
        let name = Id::of(["source"]).to_string();
        assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
    }
}
