//! The header of a safetensors file: the length of a JSON text, the text, and after it the
//! elements.

use std::collections::HashSet;
use std::fmt;

use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;

use crate::memory;

/// The longest text that the format allows, in bytes.
const LONGEST: u64 = 100_000_000;

/// The most bytes that the parsers need for each byte of text. The worst case is a list of digits:
/// each takes two bytes of text, a value of 32 bytes in a vector that has doubled, and a number of
/// 8 bytes in another vector.
const PARSED: usize = 64;

/// The checked header and the elements that it describes.
///
/// # Errors
/// The bytes are not a valid safetensors file, or have more or fewer elements than the header
/// describes.
pub fn split(file: &[u8]) -> Result<(Metadata, &[u8]), String> {
    let truncated = || "the file ends within its header: it is truncated or not a safetensors file".to_owned();
    let (&len, rest) = file.split_first_chunk().ok_or_else(truncated)?;
    let len = u64::from_le_bytes(len);
    if len > LONGEST {
        return Err(invalid(&format!("its header would have {len} bytes, more than {LONGEST}")));
    }
    let (text, elements) = rest.split_at_checked(len as usize).ok_or_else(truncated)?;
    memory::require("the header", text.len().saturating_mul(PARSED))?;
    let text = str::from_utf8(text).map_err(|error| invalid(&error))?;
    refuse_repetition(text)?;
    let header: Metadata = serde_json::from_str(text).map_err(|error| invalid(&error))?;
    if header.data_len() != elements.len() {
        return Err("the file is shorter or longer than its header says: it is truncated or damaged".into());
    }
    Ok((header, elements))
}

fn invalid(why: &dyn fmt::Display) -> String {
    format!("not a valid safetensors file: {why}")
}

/// Refuses a name that comes twice in an object: parsers take the last value without a message.
fn refuse_repetition(text: &str) -> Result<(), String> {
    serde_json::from_str::<Unrepeated>(text).map(|Unrepeated| ()).map_err(|error| match error.classify() {
        Category::Data => error.to_string(),
        Category::Io | Category::Syntax | Category::Eof => invalid(&error),
    })
}

/// Any JSON value whose objects have no name twice.
struct Unrepeated;

impl<'de> Deserialize<'de> for Unrepeated {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Unrepeated)
    }
}

impl<'de> Visitor<'de> for Unrepeated {
    type Value = Unrepeated;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        // Escapes in names are decoded: "\u0078" is "x".
        while let Some(name) = object.next_key::<String>()? {
            if names.contains(&name) {
                return Err(A::Error::custom(format!("the header has {name:?} twice")));
            }
            names.insert(name);
            object.next_value::<Unrepeated>()?;
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while let Some(Unrepeated) = list.next_element()? {}
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }
}
