//! Sweeps: tests that ask the same of thousands of calls take some of them, and others the next time.

use std::collections::HashSet;
use std::env;
use std::hash::Hash;

const SWEEP: &str = "RMSNORM_SWEEP";

/// What a test goes through of `all`: one in `one_in` of them, and the first of every kind. A number in `RMSNORM_SWEEP` says which ones are
/// taken, 0 where there is none: `one_in` numbers in a row miss none. Anything else there, such as `all`, asks for all of them.
///
/// # Example
/// ```
/// # use rmsnorm_conformance::testing::swept;
/// // Of even and of odd numbers there is at least one.
/// let some = swept(&(0..100).collect::<Vec<_>>(), 10, |number| number % 2);
/// assert!(some.len() >= 10 && some.starts_with(&[0, 1]));
/// ```
pub fn swept<T: Clone, K: Eq + Hash>(all: &[T], one_in: usize, kind: impl Fn(&T) -> K) -> Vec<T> {
    match env::var(SWEEP).map_or(Ok(0), |asked| asked.parse()) {
        Ok(number) => part(all, one_in, number, kind),
        Err(_) => all.to_vec(),
    }
}

fn part<T: Clone, K: Eq + Hash>(all: &[T], one_in: usize, number: usize, kind: impl Fn(&T) -> K) -> Vec<T> {
    let mut kinds = HashSet::new();
    let mut is_taken = |index, item| kinds.insert(kind(item)) || index % one_in == number % one_in;
    all.iter().enumerate().filter(|&(index, item)| is_taken(index, item)).map(|(_, item)| item.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_miss_none() {
        let all: Vec<u32> = (0..23).collect();
        let mut seen: Vec<u32> = (7..11).flat_map(|number| part(&all, 4, number, |_| ())).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, all);
        assert_eq!(part(&all, 4, 9, |_| ()), [0, 1, 5, 9, 13, 17, 21]);
    }
}
