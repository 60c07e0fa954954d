//! What the driver has compiled, on disk, so that only the first process on a machine waits for it.
//!
//! One file for each adapter and driver. It is written under another name and renamed, so that it is seen whole or not
//! at all; and it holds its own hash, so that one that is damaged or foreign is not used but replaced. Where the folder
//! cannot be read or written, there is no cache, and nobody is told.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use sha2::{Digest, Sha256};

/// The folder of the files; empty: no cache.
const FOLDER_VARIABLE: &str = "RMSNORM_CACHE_DIR";

/// The first bytes of a file. They change with its layout.
const MAGIC: &[u8; 16] = b"rmsnorm wgpu  1\n";

type Hash = [u8; 32];

/// The file of one adapter and driver.
#[derive(Debug)]
pub(crate) struct File {
    path: PathBuf,
    id: Hash,
}

impl File {
    /// The file of this process's user for an adapter that these texts tell apart from all others; `None` where the user
    /// has no folder or wants none.
    pub(crate) fn of_user(texts: &[&str]) -> Option<File> {
        Some(File::within(&folder(|name| env::var_os(name).map(PathBuf::from))?, texts))
    }

    fn within(folder: &Path, texts: &[&str]) -> File {
        let mut hash = Sha256::new().chain_update(MAGIC);
        for text in texts {
            // Where a text ends counts.
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        let id = Hash::from(hash.finalize());
        let name: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        File { path: folder.join(name), id }
    }

    /// What was kept last; `None` if nothing, or anything about it is wrong.
    pub(crate) fn read(&self) -> Option<Vec<u8>> {
        let entry = fs::read(&self.path).ok()?;
        let rest = entry.strip_prefix(MAGIC)?.strip_prefix(&self.id)?;
        let (hash, data) = rest.split_first_chunk::<32>()?;
        (Hash::from(Sha256::digest(data)) == *hash).then(|| data.to_vec())
    }

    /// Keeps this for the next process.
    ///
    /// # Errors
    /// Those of the file system; the file is then as it was.
    pub(crate) fn write(&self, data: &[u8]) -> io::Result<()> {
        let folder = self.path.parent().ok_or(io::ErrorKind::NotFound)?;
        fs::create_dir_all(folder)?;
        let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
        for part in [MAGIC.as_slice(), &self.id, &Hash::from(Sha256::digest(data)), data] {
            file.write_all(part)?;
        }
        file.persist(&self.path).map(|_| ()).map_err(|error| error.error)
    }
}

/// Where files belong, given the environment.
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
    Some(caches?.join("rmsnorm").join("wgpu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &[u8] = b"compiled";

    fn file() -> (tempfile::TempDir, File) {
        let folder = tempfile::tempdir().expect("a folder");
        let file = File::within(&folder.path().join("not/yet/there"), &["adapter", "driver"]);
        (folder, file)
    }

    #[test]
    fn what_was_written_is_read() {
        let (folder, file) = file();
        assert_eq!(file.read(), None);
        for data in [DATA, b"", b"later"] {
            file.write(data).expect("a writable folder");
            assert_eq!(file.read().as_deref(), Some(data));
        }
        let other = File::within(&folder.path().join("not/yet/there"), &["adapterd", "river"]);
        assert_eq!(other.read(), None);
    }

    /// Every single bit, every length, and what is not a file of ours at all.
    #[test]
    fn a_damaged_file_is_not_used() {
        let (_folder, file) = file();
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
    fn a_file_of_another_adapter_is_not_used() {
        let (folder, file) = file();
        file.write(DATA).expect("a writable folder");
        let other = File::within(&folder.path().join("not/yet/there"), &["another"]);
        fs::copy(&file.path, &other.path).expect("a copy");
        assert_eq!(other.read(), None);
    }

    #[test]
    fn what_is_in_the_way_is_no_cache() {
        let (_folder, file) = file();
        fs::create_dir_all(&file.path).expect("a folder in the file's place");
        assert!(file.write(DATA).is_err());
        assert_eq!(file.read(), None);
        let left = fs::read_dir(file.path.parent().expect("a folder")).expect("a folder").count();
        assert_eq!(left, 1, "nothing half-written stays");
    }

    #[test]
    fn the_environment_says_where_files_belong() {
        let at = |set: &[(&str, &str)]| {
            folder(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value)))
        };
        assert_eq!(at(&[]), None);
        assert_eq!(at(&[("RMSNORM_CACHE_DIR", "here"), ("HOME", "/home/a")]), Some("here".into()));
        assert_eq!(at(&[("RMSNORM_CACHE_DIR", ""), ("HOME", "/home/a")]), None);
        if cfg!(unix) {
            assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.cache/rmsnorm/wgpu".into()));
            assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "/c")]), Some("/c/rmsnorm/wgpu".into()));
            assert_eq!(at(&[("HOME", "/home/a"), ("XDG_CACHE_HOME", "c")]), Some("/home/a/.cache/rmsnorm/wgpu".into()));
            assert_eq!(at(&[("HOME", "")]), None);
        }
    }
}
