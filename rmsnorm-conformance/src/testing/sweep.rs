//! Sweeps: a test over thousands of calls runs a part of them, which an environment variable
//! selects.

use std::collections::HashSet;
use std::env;
use std::hash::Hash;

const SWEEP: &str = "RMSNORM_SWEEP";

/// The part of `all` that a test runs: one in `one_in`, and the first item of every kind. A number
/// in `RMSNORM_SWEEP` selects the part (default 0). `one_in` consecutive numbers cover everything.
/// Any other value, such as `all`, selects everything.
///
/// # Example
/// ```
/// # use rmsnorm_conformance::testing::swept;
/// // The first even and the first odd number are always taken.
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
