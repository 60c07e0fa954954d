//! Output to stdout, or to a file that appears complete or not at all.

mod temporary;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Prints to stdout.
///
/// # Errors
/// As [`printed`].
pub fn print(text: &str) -> Result<(), Failure> {
    printed(io::stdout().write_all(text.as_bytes()))
}

/// Flushes stdout and returns the outcome of printing to it. A closed pipe (`rmsnorm devices | head
/// -1`) is no failure.
///
/// # Errors
/// Stdout cannot be written.
pub fn printed(outcome: io::Result<()>) -> Result<(), Failure> {
    match outcome.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Input(format!("cannot write to stdout: {error}")))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A destination for the bytes of a whole file.
#[derive(Debug)]
pub enum Output {
    /// The standard output.
    Stdout,
    /// A file.
    File(OutputFile),
}

impl Output {
    /// The destination that `--json` names: a path, or `-` for stdout.
    ///
    /// # Errors
    /// The errors of [`OutputFile::new`].
    pub fn new(path: &Path) -> Result<Self, Failure> {
        if path == Path::new("-") { Ok(Output::Stdout) } else { OutputFile::new(path).map(Output::File) }
    }

    /// Writes all bytes at once.
    ///
    /// # Errors
    /// The destination cannot be written. An existing file is unchanged then.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Output::Stdout => print(&String::from_utf8_lossy(bytes)),
            Output::File(file) => file.write(&[bytes]),
        }
    }
}

/// A file that is written under a temporary name in the same folder and then renamed.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    folder: PathBuf,
}

impl OutputFile {
    /// The file at `path`, which may exist. Nothing is created yet, so that an interrupted program
    /// leaves no file.
    ///
    /// # Errors
    /// The path cannot become a file. Checked before a long computation, whose result would be
    /// lost.
    pub fn new(path: &Path) -> Result<Self, Failure> {
        let refuse = |why: &str| Failure::Input(format!("cannot write {}: {why}", path.display()));
        // The parent of a bare file name is the empty path.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if path.file_name().is_none() || path.is_dir() {
            return Err(refuse("it is a folder"));
        }
        // Renaming over a device such as /dev/null would destroy it.
        if fs::metadata(path).is_ok_and(|existing| !existing.is_file()) {
            return Err(refuse("it is not a regular file"));
        }
        if !folder.is_dir() {
            return Err(refuse(&format!("there is no folder {}", folder.display())));
        }
        Ok(OutputFile { path: path.to_owned(), folder: folder.to_owned() })
    }

    /// Writes the parts of the file one after the other, so that they need not be joined in memory.
    ///
    /// # Errors
    /// The folder or the disk cannot be written. An existing file at the path is unchanged then.
    pub fn write(&self, parts: &[&[u8]]) -> Result<(), Failure> {
        self.write_then_rename(parts)
            .map_err(|error| Failure::Input(format!("cannot write {}: {error}", self.path.display())))
    }

    fn write_then_rename(&self, parts: &[&[u8]]) -> io::Result<()> {
        temporary::remove_abandoned(&self.folder);
        let mut beside = temporary::create(&self.folder)?;
        parts.iter().try_for_each(|part| beside.write_all(part))?;
        beside.persist(&self.path)?;
        Ok(())
    }
}
