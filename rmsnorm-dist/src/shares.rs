//! [`RowShares`]: the rows of each rank.

use std::ops::Range;

/// Consecutive units (rows of a matrix), divided among ranks in order. All ranks get the same
/// number, except that the last ones may get fewer or none.
///
/// # Example
/// ```
/// # use rmsnorm_dist::RowShares;
/// // Seven rows of 4 columns on three ranks.
/// let shares = RowShares { units: 7, unit: 4, ranks: 3 };
/// assert_eq!([0, 1, 2].map(|rank| shares.units(rank)), [0..3, 3..6, 6..7]);
/// assert_eq!(shares.elements(1), 12..24);
/// assert_eq!((shares.len(), shares.units(3)), (28, 7..7));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShares {
    /// Number of units.
    pub units: usize,
    /// Elements of a unit.
    pub unit: usize,
    /// Number of ranks, at least 1.
    pub ranks: usize,
}

impl RowShares {
    /// The units of rank `rank`.
    pub fn units(&self, rank: usize) -> Range<usize> {
        let most = self.units.div_ceil(self.ranks.max(1));
        let begin = |rank: usize| rank.saturating_mul(most).min(self.units);
        begin(rank)..begin(rank.saturating_add(1))
    }

    /// The elements of rank `rank`. Saturates where an index exceeds `usize`.
    pub fn elements(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.units(rank);
        start.saturating_mul(self.unit)..end.saturating_mul(self.unit)
    }

    /// Elements of all ranks.
    pub fn len(&self) -> usize {
        self.units.saturating_mul(self.unit)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
