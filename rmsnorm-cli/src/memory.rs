//! Memory whose size a file or its header determines. A file that needs more than the machine has
//! is an error.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::path::Path;

/// Bytes that stay free for small allocations, which are not checked: messages, names, lists, and
/// those of libraries.
const KEPT: usize = 4 << 20;

/// A vector of `len` elements of this value.
///
/// # Errors
/// The machine lacks the memory. The message calls the elements `what`.
pub fn filled<E: Clone>(what: &str, value: E, len: usize) -> Result<Vec<E>, String> {
    let mut elements = Vec::new();
    let bytes = len.saturating_mul(size_of::<E>());
    elements.try_reserve_exact(len).map_err(|_| no_room(what, bytes))?;
    room(0).map_err(|()| no_room(what, bytes))?;
    elements.resize(len, value);
    Ok(elements)
}

/// Checks that the machine has `bytes` bytes of free memory, before code that allocates them
/// without a check.
///
/// # Errors
/// It does not. The message calls the bytes `what`.
pub fn require(what: &str, bytes: usize) -> Result<(), String> {
    room(bytes).map_err(|()| no_room(what, bytes))
}

/// Reads a whole file.
///
/// # Errors
/// The file cannot be read, or the machine lacks the memory.
pub fn file(path: &Path) -> Result<Vec<u8>, String> {
    let refuse = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut file = File::open(path).map_err(refuse)?;
    // Pipes and devices have no valid size. They are read to their end, as far as memory suffices.
    let size = file.metadata().ok().filter(|metadata| metadata.is_file()).map_or(0, |metadata| metadata.len());
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let refuse_size = || no_room(&path.display().to_string(), size);
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| refuse_size())?;
    room(0).map_err(|()| refuse_size())?;
    file.read_to_end(&mut bytes).map_err(refuse)?;
    Ok(bytes)
}

fn room(bytes: usize) -> Result<(), ()> {
    let mut trial = Vec::<u8>::new();
    let outcome = trial.try_reserve_exact(bytes.saturating_add(KEPT)).map_err(|_| ());
    // Without this use the compiler would remove the allocation, and the trial would always
    // succeed.
    black_box(&trial);
    outcome
}

fn no_room(what: &str, bytes: usize) -> String {
    format!("{what} needs {bytes} bytes, more than this machine has free")
}
