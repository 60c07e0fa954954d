//! Ladders: tables of what was measured to be best, by the length of a row.
//!
//! A ladder's limits rise, so that one search finds the rung of a length. What a length counts, and what stands on a rung, is a
//! backend's own.

use std::borrow::Cow;

use rmsnorm_tuning::file::revision;
use rmsnorm_tuning::{Entry, Table};

/// Rungs in the order of their limits. Built in, or measured on a device.
pub type Ladder<T> = Cow<'static, [Rung<T>]>;

/// What is done with lengths from the limit of the rung before up to this one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung<T> {
    /// The longest.
    pub up_to: u32,
    /// Nothing where another table, or another way, has these lengths.
    pub best: Option<T>,
}

/// The rung of lengths up to a limit.
pub const fn up_to<T: Copy>(up_to: u32, best: T) -> Rung<T> {
    Rung { up_to, best: Some(best) }
}

/// The rung of lengths that a ladder leaves to others.
pub const fn none_up_to<T: Copy>(up_to: u32) -> Rung<T> {
    Rung { up_to, best: None }
}

/// What stands on the rung of this length; `None` above the last.
pub fn find<T: Copy>(ladder: &[Rung<T>], length: usize) -> Option<T> {
    ladder.get(ladder.partition_point(|rung| (rung.up_to as usize) < length))?.best
}

/// Whether every limit is above the one before.
pub fn rises<T>(ladder: &[Rung<T>]) -> bool {
    ladder.is_sorted_by(|before, after| before.up_to < after.up_to)
}

/// A ladder's rungs as a table has them.
pub fn to_rungs<T: Copy>(ladder: &[Rung<T>], entry: impl Fn(T) -> Entry) -> Vec<rmsnorm_tuning::Rung> {
    let best = |rung: &Rung<T>| rung.best.map_or_else(Entry::none, &entry);
    ladder.iter().map(|rung| rmsnorm_tuning::Rung { up_to: rung.up_to, best: best(rung) }).collect()
}

/// Puts what a table has of that name in the place of the built-in ladder. `best` reads what stands on a rung.
///
/// # Errors
/// What of it is no rung, in words.
pub fn replace<T: Clone + PartialEq>(
    ladder: &mut Ladder<T>,
    table: &Table,
    name: &str,
    best: impl Fn(&Entry) -> Result<T, String>,
) -> Result<(), String> {
    let rung = |rung: &rmsnorm_tuning::Rung| {
        let best = if rung.best.is_none() { Ok(None) } else { best(&rung.best).map(Some) };
        let best = best.map_err(|reason| format!("{name} up to {}: {reason}", rung.up_to))?;
        Ok::<_, String>(Rung { up_to: rung.up_to, best })
    };
    let rungs = table.ladder(name)?.iter().map(rung).collect::<Result<Vec<_>, _>>()?;
    // What is built in is not held twice.
    if rungs[..] != ladder[..] {
        *ladder = Cow::Owned(rungs);
    }
    Ok(())
}

/// Tells programs and built-in tables apart that a table may be measured with. `texts` is the revision of the programs' texts; `meaning`
/// is counted up where tables mean something else though programs and built-in rungs are what they were.
pub fn revision_of(texts: u64, built_in: &Table, meaning: &str) -> String {
    revision([texts.to_string().as_str(), built_in.to_string().as_str(), env!("CARGO_PKG_VERSION"), meaning])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_has_the_first_rung_that_reaches_it() {
        let ladder = [up_to(2, 'a'), none_up_to(5), up_to(9, 'b')];
        let found = [0, 1, 2, 3, 5, 6, 9, 10].map(|length| find(&ladder, length));
        assert_eq!(found, [Some('a'), Some('a'), Some('a'), None, None, Some('b'), Some('b'), None]);
        assert_eq!(find::<char>(&[], 1), None);
    }

    #[test]
    fn limits_rise_or_not() {
        assert!(rises(&[up_to(2, 'a'), up_to(3, 'a')]) && rises::<char>(&[]));
        assert!(!rises(&[up_to(3, 'a'), up_to(3, 'b')]) && !rises(&[up_to(3, 'a'), up_to(2, 'b')]));
    }
}
