//! A table as data.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::Deserialize;

/// Everything that a backend's plans look up, by names that are the backend's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Numbers that are not by length.
    #[serde(default)]
    pub numbers: BTreeMap<String, u64>,
    /// Rungs in the order of their limits.
    #[serde(default)]
    pub ladders: BTreeMap<String, Vec<Rung>>,
}

/// What is done with lengths from the limit of the rung before up to this one's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Rung {
    /// The longest.
    pub up_to: u32,
    /// Empty where another ladder, or another way, has these lengths.
    #[serde(flatten)]
    pub best: Entry,
}

/// What stands on a rung, as named numbers. What has its usual value is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Entry(BTreeMap<String, Value>);

/// One number, or several.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(untagged)]
enum Value {
    Number(u32),
    List(Vec<u32>),
}

impl Table {
    /// The rungs of that ladder.
    ///
    /// # Errors
    /// If there is no such ladder, in words.
    pub fn ladder(&self, name: &str) -> Result<&[Rung], String> {
        self.ladders.get(name).map(Vec::as_slice).ok_or_else(|| format!("it has no ladder {name:?}"))
    }

    /// That number.
    ///
    /// # Errors
    /// If there is no such number, or it is not within these limits, in words.
    pub fn number(&self, name: &str, least: u64, most: u64) -> Result<u64, String> {
        let number = *self.numbers.get(name).ok_or_else(|| format!("it has no number {name:?}"))?;
        if (least..=most).contains(&number) {
            return Ok(number);
        }
        Err(format!("{name} is {number}, which is not from {least} to {most}"))
    }

    /// Whether it has no other ladders and numbers than the expected.
    ///
    /// # Errors
    /// The first that is not expected, in words.
    pub fn has_no_more_than(&self, expected: &Table) -> Result<(), String> {
        let unknown = self.ladders.keys().find(|name| !expected.ladders.contains_key(*name));
        match unknown.or_else(|| self.numbers.keys().find(|name| !expected.numbers.contains_key(*name))) {
            Some(name) => Err(format!("nothing is called {name:?}")),
            None => Ok(()),
        }
    }
}

impl Entry {
    /// Without numbers: nothing stands on the rung.
    pub fn none() -> Entry {
        Entry::default()
    }

    /// With one number more.
    #[must_use]
    pub fn with(mut self, name: &str, number: u32) -> Entry {
        self.0.insert(name.to_owned(), Value::Number(number));
        self
    }

    /// With one number more, unless it is the usual one.
    #[must_use]
    pub fn with_unless(self, usual: u32, name: &str, number: u32) -> Entry {
        if number == usual { self } else { self.with(name, number) }
    }

    /// With several numbers under one name.
    #[must_use]
    pub fn with_list(mut self, name: &str, numbers: &[u32]) -> Entry {
        self.0.insert(name.to_owned(), Value::List(numbers.to_vec()));
        self
    }

    /// Whether nothing stands on the rung.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of that name.
    ///
    /// # Errors
    /// If there is none, or there are several, in words.
    pub fn number(&self, name: &str) -> Result<u32, String> {
        match self.0.get(name) {
            Some(Value::Number(number)) => Ok(*number),
            Some(Value::List(_)) => Err(format!("{name} is a list, not a number")),
            None => Err(format!("{name} is missing")),
        }
    }

    /// The number of that name, or the usual one.
    ///
    /// # Errors
    /// If there are several, in words.
    pub fn number_or(&self, usual: u32, name: &str) -> Result<u32, String> {
        if self.0.contains_key(name) { self.number(name) } else { Ok(usual) }
    }

    /// The numbers of that name.
    ///
    /// # Errors
    /// If there is no list of that name, in words.
    pub fn list(&self, name: &str) -> Result<&[u32], String> {
        match self.0.get(name) {
            Some(Value::List(numbers)) => Ok(numbers),
            Some(Value::Number(_)) => Err(format!("{name} is a number, not a list")),
            None => Err(format!("{name} is missing")),
        }
    }

    /// Whether it has no other names than these.
    ///
    /// # Errors
    /// The first other name, in words.
    pub fn has_only(&self, names: &[&str]) -> Result<(), String> {
        match self.0.keys().find(|name| !names.contains(&name.as_str())) {
            Some(name) => Err(format!("nothing is called {name:?}")),
            None => Ok(()),
        }
    }
}

/// As TOML has it between braces: `threads = 256, blocks = 8`.
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

/// As TOML: numbers, then ladders with a line for each rung.
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
        assert_eq!(table.has_no_more_than(&Table::default()), Err("nothing is called \"16.forward\"".into()));
        let entry = Entry::none().with("threads", 32).with_list("packs", &[1]);
        assert_eq!((entry.number("threads"), entry.number_or(7, "groups")), (Ok(32), Ok(7)));
        assert_eq!(entry.number("packs"), Err("packs is a list, not a number".into()));
        assert_eq!(entry.list("threads"), Err("threads is a number, not a list".into()));
        assert_eq!(entry.has_only(&["threads"]), Err("nothing is called \"packs\"".into()));
    }
}
