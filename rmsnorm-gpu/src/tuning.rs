//! Ladders: tables of what was measured to be best, by the length of a row.
//!
//! A ladder's limits rise, so that one search finds the rung of a length. What a length counts, and what stands on a rung, is a
//! backend's own.

use std::borrow::Cow;

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
