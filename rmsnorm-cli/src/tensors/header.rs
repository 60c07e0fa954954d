//! The header of a safetensors file: the length of a JSON text, the text, and after it the elements.

use std::collections::HashSet;
use std::fmt;

use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;

use crate::memory;

/// The format allows no longer text.
const LONGEST: u64 = 100_000_000;

/// Bytes that the parsers need for each byte of text, at most. The worst is a list of digits: two bytes of text each, a
/// value of 32 bytes in a vector that has doubled, and a number of 8 bytes in another.
const PARSED: usize = 64;

/// The header, checked, and the elements that it describes: no more and no fewer.
///
/// # Errors
/// What is wrong with it, for a person.
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

/// Parsers take the last of two equal names and say nothing; what the first meant would be lost.
fn refuse_repetition(text: &str) -> Result<(), String> {
    serde_json::from_str::<Unrepeated>(text).map(|Unrepeated| ()).map_err(|error| match error.classify() {
        Category::Data => error.to_string(),
        Category::Io | Category::Syntax | Category::Eof => invalid(&error),
    })
}

/// Any value, if no object within has a name twice.
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
        // Names as they are meant: "\u0078" is "x".
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
