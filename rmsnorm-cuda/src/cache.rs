//! Compiled programs on disk, or made anew where there is none. Where the folder cannot be read or written, there is no
//! cache, and nobody is told.

use std::io;
use std::path::PathBuf;

use rmsnorm_cache::{Entry, Id, Magic, folder_of_user};

/// The kind of the entries.
const MAGIC: &Magic = b"rmsnorm cubin 1\n";

/// What a program was made from: these texts.
pub(crate) fn id_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Id {
    Id::of(MAGIC, texts)
}

/// A folder of compiled programs, or none.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The cache of this process's user.
    pub(crate) fn of_user() -> Cache {
        Cache { folder: folder_of_user("cuda") }
    }

    /// The program of that id, or what `make` gives, which is then kept.
    ///
    /// # Errors
    /// Those of `make` only.
    pub(crate) fn get_or<E>(&self, id: &Id, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let Some(folder) = &self.folder else { return make() };
        let entry = Entry::new(folder, *id);
        if let Some(cubin) = entry.read() {
            return Ok(cubin);
        }
        let cubin = make()?;
        // Without a cache the program still runs.
        let _: Result<(), io::Error> = entry.write(&cubin);
        Ok(cubin)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Barrier;
    use std::{fs, thread};

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
            Folder { folder, cache, id: id_of(["source", "option"]) }
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
        let other = id_of(["source", "other option"]);
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
        let moved = Folder { id: id_of(["another"]), ..folder };
        let from = moved.path().with_file_name(id_of(["source", "option"]).to_string());
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
        let id = id_of(["source"]);
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
                        let id = id_of([round.to_string().as_str()]);
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
}
