//! Tensors and metadata of a file that the run does not use: misspelt names, names of a later
//! version, and settings of quantized results without `--codes`.

use super::quantize::about_codes;
use super::request::{INPUTS, SCALE};
use super::settings::KEYS;
use crate::args::{QuantizeArgs, SettingArgs};
use crate::tensors::TensorFile;

/// Metadata that PyTorch, JAX and TensorFlow write into every file. No norm depends on it.
const FORMAT: &str = "format";

/// The unused names in alphabetical order, and the message about the first.
#[derive(Debug)]
pub struct Unread {
    /// Keys of metadata.
    pub metadata: Vec<String>,
    /// Tensors.
    pub tensors: Vec<String>,
    why: Option<String>,
}

impl Unread {
    /// The names in the file that a run with these options does not use.
    pub fn of(file: &TensorFile<'_>, flags: &SettingArgs) -> Self {
        let has_codes = flags.quantize.codes.is_some() || file.metadata("codes").is_some();
        let flags = QuantizeArgs::default();
        let keys_about_codes = about_codes(&flags).map(|(key, _)| key);
        let keys = [&KEYS[..], &[FORMAT]].concat();
        let (metadata, why_key) = unread("metadata", file.keys(), &keys, &keys_about_codes, has_codes);
        let (tensors, why_tensor) = unread("tensor", file.names(), &INPUTS, &[SCALE], has_codes);
        Unread { metadata, tensors, why: why_key.or(why_tensor) }
    }

    /// # Errors
    /// There is an unused name. The message has the name, the reason and the fix.
    pub fn refuse(&self) -> Result<(), String> {
        self.why.clone().map_or(Ok(()), Err)
    }
}

/// The unused names of one kind, and the message about the first.
fn unread(
    kind: &str,
    names: Vec<String>,
    known: &[&str],
    about_codes: &[&str],
    has_codes: bool,
) -> (Vec<String>, Option<String>) {
    let is_about_codes = |name: &String| about_codes.contains(&name.as_str());
    let is_read = |name: &String| if is_about_codes(name) { has_codes } else { known.contains(&name.as_str()) };
    let unread: Vec<String> = names.into_iter().filter(|name| !is_read(name)).collect();
    let why = unread.first().map(|name| {
        let why = if is_about_codes(name) {
            "applies to quantized results: pass --codes, such as --codes e4m3".to_owned()
        } else {
            let known = [known, about_codes].concat();
            let nearest = nearest(name, &known);
            format!("is not known, the nearest known is {nearest:?} of {}: correct it", known.join(", "))
        };
        format!("{kind} {name:?} {why}, or pass --allow-unknown to ignore it")
    });
    (unread, why)
}

/// The known name that is most similar to a misspelt one, in letters and in edit distance.
fn nearest<'k>(name: &str, known: &[&'k str]) -> &'k str {
    let name = name.to_lowercase();
    let likeness = |known: &&str| strsim::jaro(&name, known) + strsim::normalized_damerau_levenshtein(&name, known);
    known.iter().copied().max_by(|one, other| likeness(one).total_cmp(&likeness(other))).unwrap_or_default()
}
