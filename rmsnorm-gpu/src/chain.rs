//! Additions one after the other in a sum, as kernels add. Error bounds follow from the longest chain, and math.md
//! section 4 limits it: [`rmsnorm_spec::depth`].

/// In a sum of so many terms, one after the other. The first is added to zero, which is exact.
pub const fn serial(terms: u64) -> u64 {
    terms.saturating_sub(1)
}

/// In a tree over so many terms.
pub const fn tree(terms: u64) -> u64 {
    terms.next_power_of_two().ilog2() as u64
}

/// In a sum whose terms so many threads share: those of a thread one after the other, then a tree over the threads.
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
