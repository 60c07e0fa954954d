//! Ladders: tables of the fastest measured settings per row length.
//!
//! The limits of a ladder increase, so one binary search finds the rung of a length. Each backend
//! defines the unit of a length and the settings on a rung.

use std::borrow::Cow;

use rmsnorm_tuning::file::revision;
use rmsnorm_tuning::{Entry, Table};

/// Rungs in increasing order of their limits; built in, or measured on a device.
pub type Ladder<T> = Cow<'static, [Rung<T>]>;

/// The settings for lengths above the previous rung's limit, up to this one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung<T> {
    /// The longest length.
    pub up_to: u32,
    /// The settings. `None` if another table or another method handles these lengths.
    pub best: Option<T>,
}

/// A rung with settings, for lengths up to a limit.
pub const fn up_to<T: Copy>(up_to: u32, best: T) -> Rung<T> {
    Rung { up_to, best: Some(best) }
}

/// A rung without settings: another table handles these lengths.
pub const fn none_up_to<T: Copy>(up_to: u32) -> Rung<T> {
    Rung { up_to, best: None }
}

/// The settings on the rung of this length. `None` above the last rung.
pub fn find<T: Copy>(ladder: &[Rung<T>], length: usize) -> Option<T> {
    ladder.get(ladder.partition_point(|rung| (rung.up_to as usize) < length))?.best
}

/// Whether every limit is greater than the previous one.
pub fn rises<T>(ladder: &[Rung<T>]) -> bool {
    ladder.is_sorted_by(|before, after| before.up_to < after.up_to)
}

/// The rungs of a ladder in the form of a tuning table.
pub fn to_rungs<T: Copy>(ladder: &[Rung<T>], entry: impl Fn(T) -> Entry) -> Vec<rmsnorm_tuning::Rung> {
    let best = |rung: &Rung<T>| rung.best.map_or_else(Entry::none, &entry);
    ladder.iter().map(|rung| rmsnorm_tuning::Rung { up_to: rung.up_to, best: best(rung) }).collect()
}

/// Replaces a built-in ladder with the ladder `name` of `table`. `best` reads the settings on a
/// rung.
///
/// # Errors
/// A text that names the invalid rung and the reason.
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
    // Equal rungs stay borrowed from the built-in ladder.
    if rungs[..] != ladder[..] {
        *ladder = Cow::Owned(rungs);
    }
    Ok(())
}

/// A hash of everything that a tuned table depends on. `texts` is the revision of the programs'
/// texts. `meaning` is increased when tables change their meaning but programs and built-in rungs
/// do not.
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
