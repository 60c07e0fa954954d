//! Sums over a row. Blocks are added pairwise, so that errors grow with the logarithm of the
//! length, even if every addition rounds in the same direction.

use super::{LANES, Simd};

/// Columns of a block. A lane adds 64 terms of a block. A sum of 64 equal terms has an error of at
/// most 16 units of roundoff, and its root an error of at most 8.
pub(crate) const BLOCK: usize = 64 * LANES;

/// Sums over a row of `cols` elements, as `[f32; N]`. The block returns the `[S::Lanes; N]` to add
/// for each piece; `piece` is as in [`for_each_piece`](super::for_each_piece).
macro_rules! sum_up {
    ($simd:ident, $cols:expr, $piece:ident => $terms:block) => {{
        let cols = $cols;
        let (mut blocks, mut start) = ($crate::lanes::Blocks::new(), 0);
        loop {
            let end = cols.min(start + $crate::lanes::BLOCK);
            let mut sums = [$simd::splat(0.0); _];
            $crate::lanes::for_each_piece_between!(start, 0, end, $piece => {
                sums = $crate::lanes::add_all::<$simd, _>(sums, $terms);
            });
            let sums = $crate::lanes::fold_all::<$simd, _>(sums);
            if end == cols {
                break blocks.total(sums);
            }
            blocks.add(sums);
            start = end;
        }
    }};
}
pub(crate) use sum_up;

#[inline(always)]
pub(crate) fn add_all<S: Simd, const N: usize>(sums: [S::Lanes; N], terms: [S::Lanes; N]) -> [S::Lanes; N] {
    let mut all = sums;
    for (sum, term) in all.iter_mut().zip(terms) {
        *sum = S::add(*sum, term);
    }
    all
}

#[inline(always)]
pub(crate) fn fold_all<S: Simd, const N: usize>(sums: [S::Lanes; N]) -> [f32; N] {
    let mut all = [0.0; N];
    for (fold, sum) in all.iter_mut().zip(sums) {
        *fold = S::fold(sum);
    }
    all
}

/// Levels of pairs: enough for any row in memory, which has at most 2^43 elements.
const LEVELS: usize = 32;

/// The sums of the blocks so far. They are carried like the digits of a binary counter of blocks.
pub(crate) struct Blocks<const N: usize> {
    count: usize,
    /// Entry i is the sum of 2^i blocks if bit i of `count` is set. `None` for most rows, which are
    /// one block.
    of_pairs: Option<[[f32; N]; LEVELS]>,
}

impl<const N: usize> Blocks<N> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Blocks { count: 0, of_pairs: None }
    }

    // Not inlined into loops, like the ends of rows.
    #[inline(never)]
    pub(crate) fn add(&mut self, sums: [f32; N]) {
        let of_pairs = self.of_pairs.get_or_insert([[0.0; N]; LEVELS]);
        let level = self.count.trailing_ones() as usize;
        let carried = of_pairs[..level].iter().fold(sums, |sums, &earlier| plus(earlier, sums));
        of_pairs[level] = carried;
        self.count += 1;
    }

    /// The sum of all blocks, including the last one.
    #[inline(always)]
    pub(crate) fn total(&self, last: [f32; N]) -> [f32; N] {
        if self.count == 0 { last } else { self.added_up(last) }
    }

    #[inline(never)]
    fn added_up(&self, last: [f32; N]) -> [f32; N] {
        let Some(of_pairs) = &self.of_pairs else { return last };
        let (mut sums, mut levels) = (last, self.count);
        while levels != 0 {
            sums = plus(of_pairs[levels.trailing_zeros() as usize], sums);
            levels &= levels - 1;
        }
        sums
    }
}

fn plus<const N: usize>(a: [f32; N], b: [f32; N]) -> [f32; N] {
    std::array::from_fn(|i| a[i] + b[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest number of additions that a term passes through among the blocks. Runs the
    /// counter with depths instead of sums.
    fn depth(blocks: usize) -> u32 {
        let mut of_pairs = [None; LEVELS];
        for block in 1..blocks {
            let level = (block - 1usize).trailing_ones() as usize;
            let carried = of_pairs[..level]
                .iter_mut()
                .fold(0, |depth: u32, earlier: &mut Option<u32>| depth.max(earlier.take().unwrap()) + 1);
            of_pairs[level] = Some(carried);
        }
        of_pairs.into_iter().flatten().fold(0, |depth, earlier| depth.max(earlier) + 1)
    }

    #[test]
    fn blocks_are_as_deep_as_a_balanced_tree() {
        for blocks in 1usize..5000 {
            assert_eq!(depth(blocks), blocks.next_power_of_two().ilog2(), "{blocks} blocks");
        }
    }

    /// Sums of integers are exact, so a lost or repeated block shows.
    #[test]
    fn all_blocks_are_added() {
        let mut blocks = Blocks::new();
        for block in 1..2000u16 {
            let (n, sum) = (f32::from(block), f32::from(block) * f32::from(block + 1) / 2.0);
            assert_eq!(blocks.total([n, -n]), [sum, -sum]);
            blocks.add([n, -n]);
        }
    }

    /// Tiny terms survive only if neighbours are added first, then pairs of pairs.
    #[test]
    fn neighbours_are_added_first() {
        let tiny = f32::EPSILON / 2.0;
        let mut blocks = Blocks::new();
        for [sum] in [[1.0], [tiny], [tiny]] {
            blocks.add([sum]);
        }
        assert_eq!(blocks.total([tiny]), [1.0 + 2.0 * tiny]);
    }
}
