//! Compiled kernels on disk. The first process on a machine compiles a kernel, and no process does if a
//! package brought it.
//!
//! An entry is a file whose name is a hash of everything that its data was made from. It is written
//! under a temporary name and renamed, so a reader sees a whole entry or none. It holds a hash of
//! its data, so a damaged or foreign file is replaced instead of used. Anyone who can write to the
//! folder decides which code runs on the device.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use rmsnorm_tuning::folder;
use sha2::{Digest, Sha256};

/// The first bytes of an entry. They name its kind and change with its layout.
pub type Magic = [u8; 16];

type Hash = [u8; 32];

/// A hash of the texts that an entry was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id {
    magic: &'static Magic,
    hash: Hash,
}

impl Id {
    /// The hash of `magic` and `texts`. The length of each text is hashed too, so their boundaries
    /// count.
    pub fn of<'a>(magic: &'static Magic, texts: impl IntoIterator<Item = &'a str>) -> Id {
        let mut hash = Sha256::new().chain_update(magic);
        for text in texts {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        Id { magic, hash: hash.finalize().into() }
    }
}

/// A file name: 64 hexadecimal digits.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hash.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One file of the cache: magic, id, hash of the data, data.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    id: Id,
}

impl Entry {
    /// The entry of `id` in `folder`. Neither the file nor the folder has to exist.
    pub fn new(folder: &Path, id: Id) -> Entry {
        Entry { path: folder.join(id.to_string()), id }
    }

    /// The data last written. `None` if the file is missing, damaged or not an entry of this id.
    pub fn read(&self) -> Option<Vec<u8>> {
        let entry = fs::read(&self.path).ok()?;
        let rest = entry.strip_prefix(self.id.magic)?.strip_prefix(&self.id.hash)?;
        let (hash, data) = rest.split_first_chunk::<32>()?;
        (Hash::from(Sha256::digest(data)) == *hash).then(|| data.to_vec())
    }

    /// Stores `data` for later processes.
    ///
    /// # Errors
    /// Errors of the file system. The entry is then unchanged.
    pub fn write(&self, data: &[u8]) -> io::Result<()> {
        let folder = self.path.parent().ok_or(io::ErrorKind::NotFound)?;
        fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
        for part in [self.id.magic.as_slice(), &self.id.hash, &Hash::from(Sha256::digest(data)), data] {
            file.write_all(part)?;
        }
        file.persist(&self.path).map(|_| ()).map_err(|error| error.error)
    }
}

/// The entries of a backend. If the folder cannot be read or written, nothing is stored: kernels
/// are then compiled again, without an error.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    /// Entries that came with a package. They are read and never written.
    packaged: Option<PathBuf>,
}

impl Cache {
    /// The user's cache for the backend `backend`: in `RMSNORM_CACHE_DIR`, or in `rmsnorm/BACKEND`
    /// in the user's cache folder. Nothing is stored if the variable is empty, or if the user has
    /// no cache folder.
    pub fn of_user(backend: &str) -> Cache {
        Cache { folder: folder::of_user(backend), packaged: None }
    }

    /// This cache, which also reads the entries in `packaged`.
    #[must_use]
    pub fn with_packaged(self, packaged: Option<&Path>) -> Cache {
        Cache { packaged: packaged.map(Path::to_owned), ..self }
    }

    /// The user's entry of `id`, whether or not its file exists. `None` if nothing is stored.
    pub fn entry(&self, id: Id) -> Option<Entry> {
        self.folder.as_ref().map(|folder| Entry::new(folder, id))
    }

    /// The data stored under `id`. If there is none, calls `make` and stores its result.
    ///
    /// # Errors
    /// Errors of `make` only.
    pub fn get_or<E>(&self, id: Id, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let (own, packaged) = (self.entry(id), self.packaged.as_ref().map(|folder| Entry::new(folder, id)));
        if let Some(data) = own.iter().chain(&packaged).find_map(Entry::read) {
            return Ok(data);
        }
        let data = make()?;
        // An entry that cannot be written is made again next time.
        let _: Option<Result<(), io::Error>> = own.map(|own| own.write(&data));
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::env;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    const DATA: &[u8] = b"compiled";

    const MAGIC: &Magic = b"rmsnorm test  1\n";

    /// The entry made from `texts`.
    fn within(folder: &tempfile::TempDir, texts: &[&str]) -> Entry {
        Entry::new(&folder.path().join("not/yet/there"), Id::of(MAGIC, texts.iter().copied()))
    }

    fn entry() -> (tempfile::TempDir, Entry) {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = within(&folder, &["source", "option"]);
        (folder, entry)
    }

    #[test]
    fn what_was_written_is_read() {
        let (folder, file) = entry();
        assert_eq!(file.read(), None);
        for data in [DATA, b"", b"later"] {
            file.write(data).expect("a writable folder");
            assert_eq!(file.read().as_deref(), Some(data));
        }
        let other = within(&folder, &["sourceo", "ption"]);
        assert_eq!(other.read(), None);
    }

    /// Flips each bit, cuts at each length, and tries files that are no entry.
    #[test]
    fn a_damaged_entry_is_not_used() {
        let (_folder, file) = entry();
        file.write(DATA).expect("a writable folder");
        let entry = fs::read(&file.path).expect("an entry");
        let flipped = (0..entry.len() * 8).map(|bit| {
            let mut entry = entry.clone();
            entry[bit / 8] ^= 1 << (bit % 8);
            entry
        });
        let cut = (0..entry.len()).map(|len| entry[..len].to_vec());
        let longer = [[&entry[..], b"x"].concat(), [b"x", &entry[..]].concat(), vec![0; 100]];
        for damaged in flipped.chain(cut).chain(longer) {
            fs::write(&file.path, &damaged).expect("a writable entry");
            assert_eq!(file.read(), None, "{damaged:?}");
        }
        file.write(DATA).expect("a writable folder");
        assert_eq!(file.read().as_deref(), Some(DATA));
    }

    #[test]
    fn an_entry_of_something_else_is_not_used() {
        let (folder, file) = entry();
        file.write(DATA).expect("a writable folder");
        let other = within(&folder, &["another"]);
        fs::copy(&file.path, &other.path).expect("a copy");
        assert_eq!(other.read(), None);
    }

    #[test]
    fn what_is_in_the_way_is_no_cache() {
        let (_folder, file) = entry();
        fs::create_dir_all(&file.path).expect("a folder in the file's place");
        assert!(file.write(DATA).is_err());
        assert_eq!(file.read(), None);
        let left = fs::read_dir(file.path.parent().expect("a folder")).expect("a folder").count();
        assert_eq!(left, 1, "nothing half-written stays");
    }

    fn cache(folder: &tempfile::TempDir) -> Cache {
        Cache { folder: Some(folder.path().join("not/yet/there")), packaged: None }
    }

    /// The data from the cache, and whether it had to be made.
    fn get(cache: &Cache, texts: &[&str]) -> (Vec<u8>, bool) {
        let mut made = false;
        let Ok(data) = cache.get_or(Id::of(MAGIC, texts.iter().copied()), || {
            made = true;
            Ok::<_, Infallible>(DATA.to_vec())
        });
        (data, made)
    }

    #[test]
    fn what_is_kept_is_made_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = cache(&folder);
        assert_eq!(get(&cache, &["source", "option"]), (DATA.to_vec(), true));
        assert_eq!(get(&cache, &["source", "option"]), (DATA.to_vec(), false));
        assert!(get(&cache, &["source", "other option"]).1);
        let entry = cache.entry(Id::of(MAGIC, ["source", "option"])).expect("a folder");
        fs::write(&entry.path, b"damaged").expect("a writable entry");
        assert_eq!(get(&cache, &["source", "option"]), (DATA.to_vec(), true));
        assert_eq!(get(&cache, &["source", "option"]), (DATA.to_vec(), false));
    }

    /// They need not be made, with or without a cache of the user, and are not copied there. The
    /// user's own entry comes first.
    #[test]
    fn what_came_with_a_package_is_not_made() {
        let (package, folder) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let id = Id::of(MAGIC, ["source"]);
        let packaged = Entry::new(package.path(), id);
        packaged.write(b"packaged").expect("a writable folder");
        for cache in [cache(&folder), Cache { folder: None, packaged: None }] {
            let cache = cache.with_packaged(Some(package.path()));
            assert_eq!(get(&cache, &["source"]), (b"packaged".to_vec(), false));
            assert_eq!(get(&cache, &["another"]), (DATA.to_vec(), true));
            fs::write(&packaged.path, b"damaged").expect("a writable entry");
            assert_eq!(get(&cache, &["source"]), (DATA.to_vec(), true));
            assert_eq!(fs::read(&packaged.path).expect("an entry"), b"damaged", "the package is not written");
            packaged.write(b"packaged").expect("a writable folder");
        }
        let own = cache(&folder).with_packaged(Some(package.path()));
        assert_eq!(get(&own, &["source"]), (DATA.to_vec(), false));
    }

    #[test]
    fn a_failure_is_handed_on_and_not_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(cache(&folder).get_or(Id::of(MAGIC, ["source"]), || Err("no")), Err("no"));
        assert!(get(&cache(&folder), &["source"]).1);
    }

    /// A file in the folder's place, because root may write everywhere else.
    #[test]
    fn where_nothing_can_be_kept_it_is_made_each_time() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        for folder in [Some(file.path().join("folder")), None] {
            let cache = Cache { folder, packaged: None };
            assert_eq!(get(&cache, &["source"]), (DATA.to_vec(), true));
            assert_eq!(get(&cache, &["source"]), (DATA.to_vec(), true));
        }
    }

    #[test]
    fn threads_that_write_at_once_all_see_a_whole_entry() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = cache(&folder);
        let whole: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for round in 0..50 {
                        let id = Id::of(MAGIC, [round.to_string().as_str()]);
                        barrier.wait();
                        let Ok(got) = cache.get_or(id, || Ok::<_, Infallible>(whole.clone()));
                        assert!(got == whole);
                        let Ok(again) = cache.get_or(id, || Ok::<_, Infallible>(Vec::new()));
                        assert!(again == whole, "the entry is there and whole");
                    }
                });
            }
        });
    }

    /// An entry longer than one read or one page, damaged at several places.
    #[test]
    fn a_large_entry_is_read_whole_and_checked() {
        let (_folder, file) = entry();
        let data: Vec<u8> = (0..1_100_001u32).map(|i| (i ^ i >> 8) as u8).collect();
        file.write(&data).expect("a writable folder");
        assert!(file.read() == Some(data));
        let entry = fs::read(&file.path).expect("an entry");
        for byte in [0, 15, 16, 47, 48, 79, 80, 1 << 16, 1 << 20, entry.len() - 1] {
            let mut damaged = entry.clone();
            damaged[byte] ^= 0x10;
            fs::write(&file.path, &damaged).expect("a writable entry");
            assert!(file.read().is_none(), "byte {byte}");
        }
        fs::write(&file.path, &entry[..entry.len() - 1]).expect("a writable entry");
        assert!(file.read().is_none(), "the last byte is missing");
    }

    /// A reader that has the old entry open still reads it: the new entry is another file, renamed.
    #[test]
    fn an_entry_is_replaced_and_not_overwritten() {
        let (folder, file) = entry();
        file.write(DATA).expect("a writable folder");
        let (old, link) = (fs::read(&file.path).expect("an entry"), folder.path().join("link"));
        fs::hard_link(&file.path, &link).expect("a second name");
        file.write(b"later").expect("a writable folder");
        assert_eq!(fs::read(link).expect("the old entry"), old);
        assert_eq!(file.read().as_deref(), Some(&b"later"[..]));
    }

    /// A concurrent reader finds one of the two entries, never a partial one and never none.
    #[test]
    fn a_reader_never_sees_half_an_entry() {
        let (folder, file) = entry();
        let entries: [Vec<u8>; 2] = [vec![1; 300_000], vec![2; 200_000]];
        file.write(&entries[0]).expect("a writable folder");
        let reader = within(&folder, &["source", "option"]);
        thread::scope(|scope| {
            let write = || (0..60).for_each(|i| file.write(&entries[i % 2]).expect("a writable folder"));
            let writer = scope.spawn(write);
            while !writer.is_finished() {
                let data = reader.read().expect("there is an entry at any moment");
                assert!(entries.contains(&data), "{} bytes", data.len());
            }
        });
    }

    /// Set in the child process that the next test starts.
    const CHILD: &str = "RMSNORM_CACHE_TEST_CHILD";

    /// Runs in a child process because it sets environment variables. Entries go to the folder in
    /// `RMSNORM_CACHE_DIR`, even if its name is not UTF-8. No file is written elsewhere first,
    /// because a rename must stay within one file system.
    #[cfg(unix)]
    #[test]
    fn entries_are_written_in_their_folder_only() {
        use std::os::unix::ffi::OsStrExt;
        if env::var_os(CHILD).is_some() {
            let entry = Cache::of_user("wgpu").entry(Id::of(MAGIC, ["child"])).expect("the variable is set");
            return entry.write(DATA).expect("a writable folder");
        }
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        let name = "cache::tests::entries_are_written_in_their_folder_only";
        let child = std::process::Command::new(env::current_exe().expect("this program"))
            .args(["--exact", name])
            .env(CHILD, "1")
            .env(folder::FOLDER_VARIABLE, &folder)
            .env("TMPDIR", parent.path().join("nowhere"))
            .output()
            .expect("a child");
        assert!(child.status.success(), "{child:?}");
        assert_eq!(Entry::new(&folder, Id::of(MAGIC, ["child"])).read().as_deref(), Some(DATA));
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1, "nothing else is left there");
    }

    #[test]
    fn ids_are_file_names() {
        for text in 0..300 {
            let name = Id::of(MAGIC, [text.to_string().as_str()]).to_string();
            assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
        }
    }

    /// Hashes the magic, then for each text its length (64 bits, little-endian) and its bytes.
    #[test]
    fn an_id_is_that_of_its_texts_and_of_nothing_else() {
        let long = "x".repeat(300);
        let bytes = [&MAGIC[..], &[6, 0, 0, 0, 0, 0, 0, 0], b"source", &[44, 1, 0, 0, 0, 0, 0, 0], long.as_bytes()];
        let expected: Hash = Sha256::digest(bytes.concat()).into();
        assert_eq!(Id::of(MAGIC, ["source", &long]).hash, expected);
        const OTHER: &Magic = b"rmsnorm test  2\n";
        assert_ne!(Id::of(OTHER, ["source"]).hash, Id::of(MAGIC, ["source"]).hash);
    }
}
