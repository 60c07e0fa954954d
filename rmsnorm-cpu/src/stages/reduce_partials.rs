//! The second stage of the weight gradients: adds the blocks' partial rows in order. math.md, (11) and (12).

use super::{Split, Stage};
use crate::lanes::{self, Any, Fenced, In, LANES, Mix, Out, Simd};

/// Partial rows and the gradient that they add up to, or a range of its columns.
pub(crate) struct PartialRows<'a> {
    /// `blocks` rows of `cols` sums; `cols` is the length of the whole gradient.
    pub(crate) partials: &'a [f32],
    pub(crate) cols: usize,
    /// The first column of `gradient`.
    pub(crate) first: usize,
    pub(crate) gradient: Out<'a, Any>,
    /// The values of `gradient`, if the sums are added to them.
    pub(crate) held: Option<In<'a, Any>>,
}

impl Split for PartialRows<'_> {
    /// At a group of lanes. Only the last group of the row can be short.
    fn split_at(self, group: usize) -> (Self, Self) {
        let col = group * LANES;
        let (low, high) = self.gradient.split_at(col);
        let (held, high_held) = self.held.map(|held| held.split_at(col)).unzip();
        let first = self.first + col;
        (PartialRows { gradient: low, held, ..self }, PartialRows { gradient: high, held: high_held, first, ..self })
    }
}

/// Writes the gradient.
impl Stage for PartialRows<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
        let (first, len) = (self.first, self.gradient.len());
        let through_cache = Fenced::<S>::new(false);
        lanes::for_each_piece!(0, len, piece => {
            let mut sums = S::splat(0.0);
            for partials in self.partials.chunks_exact(self.cols) {
                sums = S::add(sums, lanes::load::<S, f32, _>(&partials[first..][..len], piece));
            }
            if let Some(held) = self.held {
                sums = S::add(held.load::<S, _>(piece), sums);
            }
            self.gradient.store_or_stream::<S, _>(piece, sums, through_cache.stores());
        });
    }
}
