//! One setting of `rmsnorm run`: its value, and where it is from.

use crate::tensors::TensorFile;

/// A value and its source, which the error message names.
pub(super) struct Setting<'a> {
    value: &'a str,
    source: String,
}

impl<'a> Setting<'a> {
    pub(super) fn find(key: &str, flag: &'a Option<String>, file: &'a TensorFile<'_>) -> Option<Self> {
        match flag {
            Some(value) => Some(Setting { value, source: format!("--{}", key.replace('_', "-")) }),
            None => file.metadata(key).map(|value| Setting { value, source: format!(r#"metadata "{key}""#) }),
        }
    }

    pub(super) fn parse<V>(self, parse: fn(&str) -> Result<V, &'static str>) -> Result<V, String> {
        parse(self.value).map_err(|expected| format!("{}: expected {expected}, got {:?}", self.source, self.value))
    }
}

pub(super) fn parse_number(text: &str) -> Result<f32, &'static str> {
    text.trim().parse().map_err(|_| "a number")
}
