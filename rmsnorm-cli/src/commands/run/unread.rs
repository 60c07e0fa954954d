//! What a file has that has no part in the result: a misspelt name, a later version's, or one about codes where there are none.

use super::quantize::about_codes;
use super::request::{INPUTS, SCALE};
use super::settings::KEYS;
use crate::args::{QuantizeArgs, SettingArgs};
use crate::tensors::TensorFile;

/// Who wrote a file, and for what: the savers of PyTorch, JAX and TensorFlow leave it in every one. No norm depends on it.
const FORMAT: &str = "format";

/// Names in their alphabetical order, and why the first of them is not read.
#[derive(Debug)]
pub struct Unread {
    /// Keys of metadata.
    pub metadata: Vec<String>,
    /// Tensors.
    pub tensors: Vec<String>,
    why: Option<String>,
}

impl Unread {
    /// What of the file is not read under these flags.
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
    /// If there is anything: the name, what is wrong with it, and what to do.
    pub fn refuse(&self) -> Result<(), String> {
        self.why.clone().map_or(Ok(()), Err)
    }
}

/// The names that are not read, and why the first is not.
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
            "is about codes: give --codes, such as --codes e4m3".to_owned()
        } else {
            let known = [known, about_codes].concat();
            let nearest = nearest(name, &known);
            format!("is not known, the nearest known is {nearest:?} of {}: correct it", known.join(", "))
        };
        format!("{kind} {name:?} {why}, or give --allow-unknown to go without it")
    });
    (unread, why)
}

/// The known name that a misspelt one is most like, by the letters in common and by the edits between.
fn nearest<'k>(name: &str, known: &[&'k str]) -> &'k str {
    let name = name.to_lowercase();
    let likeness = |known: &&str| strsim::jaro(&name, known) + strsim::normalized_damerau_levenshtein(&name, known);
    known.iter().copied().max_by(|one, other| likeness(one).total_cmp(&likeness(other))).unwrap_or_default()
}
