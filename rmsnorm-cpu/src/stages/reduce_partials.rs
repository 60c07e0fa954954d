//! The second stage of the weight gradients: adds the blocks' partial rows in order. math.md, (11) and (12).

use super::Stage;
use crate::lanes::{self, Any, Fenced, LANES, Out, Simd};

/// Partial rows and the gradient that they add up to, or a range of its columns.
pub(crate) struct PartialRows<'a> {
    /// `blocks` rows of `cols` sums; `cols` is the length of the whole gradient.
    pub(crate) partials: &'a [f32],
    pub(crate) cols: usize,
    /// The first column of `gradient`.
    pub(crate) first: usize,
    pub(crate) gradient: Out<'a, Any>,
    /// Whether the sums are added to the content of `gradient`, which was then made from a slice of
    /// values.
    pub(crate) accumulates: bool,
}

impl PartialRows<'_> {
    /// The columns before a group of lanes, and the rest. Only the last group of the row can be
    /// short.
    pub(crate) fn split_at_group(self, group: usize) -> (Self, Self) {
        let col = group * LANES;
        let (low, high) = self.gradient.split_at(col);
        (PartialRows { gradient: low, ..self }, PartialRows { gradient: high, first: self.first + col, ..self })
    }
}

/// Writes the gradient.
impl Stage for PartialRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        let (first, len) = (self.first, self.gradient.len());
        let through_cache = Fenced::<S>::new(false);
        lanes::for_each_piece!(0, len, piece => {
            let mut sums = S::splat(0.0);
            for partials in self.partials.chunks_exact(self.cols) {
                sums = S::add(sums, lanes::load::<S, f32, _>(&partials[first..][..len], piece));
            }
            if self.accumulates {
                let held = lanes::input_or_overwritten(None, &self.gradient).load::<S, _>(piece);
                sums = S::add(held, sums);
            }
            self.gradient.store_or_stream::<S, _>(piece, sums, through_cache.stores());
        });
    }
}
