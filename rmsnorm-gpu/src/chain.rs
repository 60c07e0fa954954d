//! Lengths of chains of additions in the kernels' sums. Error bounds follow from the longest chain,
//! and math.md section 4 limits it: [`rmsnorm_spec::depth`].

/// Additions in a serial sum of `terms`. The first term is added to zero, which is exact.
pub const fn serial(terms: u64) -> u64 {
    terms.saturating_sub(1)
}

/// Depth of a tree over `terms`.
pub const fn tree(terms: u64) -> u64 {
    terms.next_power_of_two().ilog2() as u64
}

/// Longest chain of a sum whose terms `threads` share: each thread adds its terms serially, then a
/// tree adds the threads' sums.
pub const fn shared(terms: u64, threads: u64) -> u64 {
    serial(terms.div_ceil(threads)) + tree(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_count_additions() {
        assert_eq!([0, 1, 2, 9].map(serial), [0, 0, 1, 8]);
        assert_eq!([0, 1, 2, 3, 4, 5, 1024, 1025].map(tree), [0, 0, 1, 2, 2, 3, 10, 11]);
        assert_eq!([(0, 4), (4, 4), (5, 4), (9, 1)].map(|(terms, threads)| shared(terms, threads)), [2, 2, 3, 8]);
    }
}
