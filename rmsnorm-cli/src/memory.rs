//! Memory for what a file or its header asks for. They may ask for more than there is, and that is an error like any other.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::path::Path;

/// Kept for all that is allocated without asking and does not grow with a file's size: messages, names, lists, and what
/// libraries need.
const KEPT: usize = 4 << 20;

/// So many elements of that value.
///
/// # Errors
/// If there is no room, with `what` they are.
pub fn filled<E: Clone>(what: &str, value: E, len: usize) -> Result<Vec<E>, String> {
    let mut elements = Vec::new();
    let bytes = len.saturating_mul(size_of::<E>());
    elements.try_reserve_exact(len).map_err(|_| no_room(what, bytes))?;
    room(0).map_err(|()| no_room(what, bytes))?;
    elements.resize(len, value);
    Ok(elements)
}

/// Whether there is room for so many bytes, for code that will allocate them without asking.
///
/// # Errors
/// If there is not, with `what` they are.
pub fn require(what: &str, bytes: usize) -> Result<(), String> {
    room(bytes).map_err(|()| no_room(what, bytes))
}

/// A whole file.
///
/// # Errors
/// Why it cannot be read.
pub fn file(path: &Path) -> Result<Vec<u8>, String> {
    let refuse = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut file = File::open(path).map_err(refuse)?;
    // What is no regular file has no size to believe in; it is read as far as memory goes.
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
    // The compiler would leave out an allocation that nobody uses, and call it a success.
    black_box(&trial);
    outcome
}

fn no_room(what: &str, bytes: usize) -> String {
    format!("{what} needs {bytes} bytes, which this machine cannot give")
}
