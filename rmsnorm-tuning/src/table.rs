//! A table as data. A ladder is a list of rungs; a rung has the settings for a range of row
//! lengths.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::Deserialize;

/// All numbers that the plans of a backend look up. The backend chooses the names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Numbers that do not depend on the row length.
    #[serde(default)]
    pub numbers: BTreeMap<String, u64>,
    /// The rungs of each ladder, in ascending order of `up_to`.
    #[serde(default)]
    pub ladders: BTreeMap<String, Vec<Rung>>,
}

/// The settings for lengths above the previous rung's `up_to`, and at most this `up_to`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Rung {
    /// The longest length of this rung, in the backend's units.
    pub up_to: u32,
    /// Empty where another ladder or another kernel handles these lengths.
    #[serde(flatten)]
    pub best: Entry,
}

/// The settings of a rung, as named numbers. Numbers with their default value are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Entry(BTreeMap<String, Value>);

/// One number or a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(untagged)]
enum Value {
    Number(u32),
    List(Vec<u32>),
}

impl Table {
    /// The rungs of the ladder `name`.
    ///
    /// # Errors
    /// A message, if there is no such ladder.
    pub fn ladder(&self, name: &str) -> Result<&[Rung], String> {
        self.ladders.get(name).map(Vec::as_slice).ok_or_else(|| format!("it has no ladder {name:?}"))
    }

    /// The number `name`.
    ///
    /// # Errors
    /// A message, if there is no such number, or it is outside `least..=most`.
    pub fn number(&self, name: &str, least: u64, most: u64) -> Result<u64, String> {
        let number = *self.numbers.get(name).ok_or_else(|| format!("it has no number {name:?}"))?;
        if (least..=most).contains(&number) {
            return Ok(number);
        }
        Err(format!("{name} is {number}, which is not from {least} to {most}"))
    }

    /// Checks that every ladder and every number of this table has a name that `expected` has.
    ///
    /// # Errors
    /// A message with the first unknown name.
    pub fn has_no_more_than(&self, expected: &Table) -> Result<(), String> {
        let unknown = self.ladders.keys().find(|name| !expected.ladders.contains_key(*name));
        match unknown.or_else(|| self.numbers.keys().find(|name| !expected.numbers.contains_key(*name))) {
            Some(name) => Err(format!("unknown ladder or number {name:?}")),
            None => Ok(()),
        }
    }
}

impl Entry {
    /// An entry without numbers: the rung has no settings.
    pub fn none() -> Entry {
        Entry::default()
    }

    /// Adds one number.
    #[must_use]
    pub fn with(mut self, name: &str, number: u32) -> Entry {
        self.0.insert(name.to_owned(), Value::Number(number));
        self
    }

    /// Adds one number, unless it is `usual`, the default value.
    #[must_use]
    pub fn with_unless(self, usual: u32, name: &str, number: u32) -> Entry {
        if number == usual { self } else { self.with(name, number) }
    }

    /// Adds a list.
    #[must_use]
    pub fn with_list(mut self, name: &str, numbers: &[u32]) -> Entry {
        self.0.insert(name.to_owned(), Value::List(numbers.to_vec()));
        self
    }

    /// Whether the entry has no numbers.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The number `name`.
    ///
    /// # Errors
    /// A message, if it is missing or a list.
    pub fn number(&self, name: &str) -> Result<u32, String> {
        match self.0.get(name) {
            Some(Value::Number(number)) => Ok(*number),
            Some(Value::List(_)) => Err(format!("{name} is a list, not a number")),
            None => Err(format!("{name} is missing")),
        }
    }

    /// The number `name`, or `usual` if it is missing.
    ///
    /// # Errors
    /// A message, if it is a list.
    pub fn number_or(&self, usual: u32, name: &str) -> Result<u32, String> {
        if self.0.contains_key(name) { self.number(name) } else { Ok(usual) }
    }

    /// The list `name`.
    ///
    /// # Errors
    /// A message, if it is missing or a number.
    pub fn list(&self, name: &str) -> Result<&[u32], String> {
        match self.0.get(name) {
            Some(Value::List(numbers)) => Ok(numbers),
            Some(Value::Number(_)) => Err(format!("{name} is a number, not a list")),
            None => Err(format!("{name} is missing")),
        }
    }

    /// Checks that every name of this entry is in `names`.
    ///
    /// # Errors
    /// A message with the first unknown name.
    pub fn has_only(&self, names: &[&str]) -> Result<(), String> {
        match self.0.keys().find(|name| !names.contains(&name.as_str())) {
            Some(name) => Err(format!("unknown name {name:?}, expected one of {names:?}")),
            None => Ok(()),
        }
    }
}

/// As TOML, without the braces: `threads = 256, blocks = 8`.
impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.0.iter().enumerate() {
            f.write_str(if index > 0 { ", " } else { "" })?;
            match value {
                Value::Number(number) => write!(f, "{name} = {number}")?,
                Value::List(numbers) => write!(f, "{name} = {numbers:?}")?,
            }
        }
        Ok(())
    }
}

/// As TOML: numbers, then ladders with one line per rung.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::from("[numbers]\n");
        for (name, number) in &self.numbers {
            writeln!(text, "{name} = {number}")?;
        }
        text += "\n[ladders]\n";
        for (name, rungs) in &self.ladders {
            writeln!(text, "{name:?} = [")?;
            for Rung { up_to, best } in rungs {
                let best = if best.is_none() { String::new() } else { format!(", {best}") };
                writeln!(text, "    {{ up_to = {up_to}{best} }},")?;
            }
            text += "]\n";
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let rungs = vec![
            Rung { up_to: 96, best: Entry::none() },
            Rung { up_to: 128, best: Entry::none().with("threads", 32).with_unless(1, "groups", 1) },
            Rung { up_to: u32::MAX, best: Entry::none().with_list("packs", &[3, 4]).with("most", 5) },
        ];
        Table {
            numbers: [("split_bytes".to_owned(), 10 << 20)].into(),
            ladders: [("16.forward".to_owned(), rungs), ("32.empty".to_owned(), vec![])].into(),
        }
    }

    #[test]
    fn a_table_reads_back() {
        let text = table().to_string();
        assert_eq!(toml::from_str::<Table>(&text).as_ref(), Ok(&table()), "{text}");
        assert!(text.contains("    { up_to = 128, threads = 32 },\n"), "{text}");
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        let table = table();
        assert_eq!(table.ladder("none"), Err("it has no ladder \"none\"".into()));
        assert_eq!(table.number("split_bytes", 0, 1), Err("split_bytes is 10485760, which is not from 0 to 1".into()));
        assert_eq!(table.has_no_more_than(&table), Ok(()));
        assert_eq!(table.has_no_more_than(&Table::default()), Err("unknown ladder or number \"16.forward\"".into()));
        let entry = Entry::none().with("threads", 32).with_list("packs", &[1]);
        assert_eq!((entry.number("threads"), entry.number_or(7, "groups")), (Ok(32), Ok(7)));
        assert_eq!(entry.number("packs"), Err("packs is a list, not a number".into()));
        assert_eq!(entry.list("threads"), Err("threads is a number, not a list".into()));
        assert_eq!(entry.has_only(&["threads"]), Err("unknown name \"packs\", expected one of [\"threads\"]".into()));
    }
}
