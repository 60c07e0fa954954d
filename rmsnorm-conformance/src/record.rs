//! What a measured call ran, so that a figure can be traced to it, and is known to be old when it would run otherwise.

use rmsnorm_spec::{Error, Problem};
use sha2::{Digest, Sha256};

/// Characters of a hash: enough to tell texts apart, and short enough to stand beside a figure.
const HASH_CHARACTERS: usize = 16;

/// What a call runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The plan in one line, as the backend's tables of plans have it.
    pub plan: String,
    /// The first characters of SHA-256, in hexadecimal, of the texts of all that the plan runs.
    pub sources: String,
}

impl Record {
    /// A plan, and the texts of what it runs in their order.
    pub fn new(plan: String, texts: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let mut hash = Sha256::new();
        for text in texts {
            let text = text.as_ref();
            // The length keeps texts apart.
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        let mut sources = hexadecimal(&hash.finalize());
        sources.truncate(HASH_CHARACTERS);
        Record { plan, sources }
    }
}

/// Two digits a byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A backend that tells what a call would run on a device, without the device.
pub trait Recorded {
    /// What plans depend on besides the problem, as JSON.
    fn caps(&self) -> String;

    /// What a call runs where `caps` hold, with rows side by side at the start of their buffers.
    ///
    /// # Errors
    /// `Unsupported` if no such device was recorded, or has no plan for the problem.
    fn record(caps: &str, problem: &Problem) -> Result<Record, Error>;
}

/// Reads capabilities that [`Recorded::caps`] gave.
///
/// # Errors
/// `Unsupported` if they are another backend's, or another version's.
pub fn read_caps<C: serde::de::DeserializeOwned>(caps: &str) -> Result<C, Error> {
    serde_json::from_str(caps)
        .map_err(|error| Error::Unsupported { rule: format!("capabilities must be recorded by this backend: {error}") })
}

/// Capabilities as JSON.
pub fn write_caps(caps: &impl serde::Serialize) -> String {
    // Structs of numbers and names: what fails to be written has no caps to be read.
    serde_json::to_string(caps).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_tells_texts_and_their_borders_apart() {
        let hash = |texts: &[&str]| Record::new(String::new(), texts).sources;
        assert_eq!(hash(&["ab", "c"]).len(), HASH_CHARACTERS);
        assert_eq!(hash(&["ab", "c"]), hash(&["ab", "c"]));
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
        assert_ne!(hash(&["ab", "c"]), hash(&["ab", "d"]));
        assert_ne!(hash(&["ab"]), hash(&["ab", ""]));
    }
}
