//! Where results go: stdout, or a file that appears complete or not at all.

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

/// What came of printing to stdout, once the last of it has left. A reader that has gone away
/// (`rmsnorm devices | head -1`) is no failure.
///
/// # Errors
/// If stdout did not take it.
pub fn printed(outcome: io::Result<()>) -> Result<(), Failure> {
    match outcome.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Input(format!("cannot write to stdout: {error}")))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Prints a line to stderr. If that is closed or full, nobody is left to be told, and the exit code still says how it
/// went.
pub fn tell(line: &str) {
    let _ = io::stderr().write_all(format!("{}\n", one_line(line)).as_bytes());
}

/// Names from files may hold anything; control characters must neither break the line nor reach the terminal.
fn one_line(message: &str) -> String {
    message.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
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
    /// As [`OutputFile::new`].
    pub fn new(path: &Path) -> Result<Self, Failure> {
        if path == Path::new("-") { Ok(Output::Stdout) } else { OutputFile::new(path).map(Output::File) }
    }

    /// Writes everything at once.
    ///
    /// # Errors
    /// If the destination cannot take it; a file is left as it was then.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Output::Stdout => print(&String::from_utf8_lossy(bytes)),
            Output::File(file) => file.write(&[bytes]),
        }
    }
}

/// A file to be written beside its place and then renamed.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    folder: PathBuf,
}

impl OutputFile {
    /// The file at that path, which may exist. Nothing is created yet: an interrupted program leaves nothing behind.
    ///
    /// # Errors
    /// If the path cannot become a file, so that a long computation does not end in this error.
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

    /// Writes the whole file, part after part: what a file is made of need not lie in memory a second time.
    ///
    /// # Errors
    /// If the folder or the disk refuses; what was at the path before is still there then.
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
