//! The second stage of the weight gradients: adds the blocks' partial rows in order. math.md, (11) and (12).

use rmsnorm_spec::Element;

use crate::lanes::{self, LANES, Out, Simd};

/// Partial rows and the gradient they add up to, or a range of its columns.
pub(crate) struct PartialRows<'a, W> {
    /// `blocks` rows of `cols` sums, where `cols` is the length of the whole gradient.
    pub(crate) partials: &'a [f32],
    pub(crate) cols: usize,
    /// The first column of `gradient`.
    pub(crate) first: usize,
    pub(crate) gradient: Out<'a, W>,
    /// Whether the sums are added to what `gradient` holds, which is made of a slice of values then.
    pub(crate) accumulates: bool,
}

impl<'a, W: Element> PartialRows<'a, W> {
    /// The same rows under another name of the gradient's element type.
    pub(crate) fn cast<V: Element>(self) -> PartialRows<'a, V> {
        PartialRows {
            partials: self.partials,
            cols: self.cols,
            first: self.first,
            gradient: self.gradient.cast(),
            accumulates: self.accumulates,
        }
    }

    /// The columns before that group of lanes, and the others: only the last group of the row is a short one.
    pub(crate) fn split_at_group(self, group: usize) -> (Self, Self) {
        let col = group * LANES;
        let (low, high) = self.gradient.split_at(col);
        (PartialRows { gradient: low, ..self }, PartialRows { gradient: high, first: self.first + col, ..self })
    }

    /// Writes the gradient.
    #[inline(always)]
    pub(crate) fn run<S: Simd>(mut self) {
        let (first, len) = (self.first, self.gradient.len());
        lanes::for_each_piece!(0, len, piece => {
            let mut sums = S::splat(0.0);
            for partials in self.partials.chunks_exact(self.cols) {
                sums = S::add(sums, lanes::load::<S, f32, _>(&partials[first..][..len], piece));
            }
            if self.accumulates {
                let held = lanes::load::<S, W, _>(lanes::input_or_overwritten(None, &self.gradient), piece);
                sums = S::add(held, sums);
            }
            lanes::store::<S, W, _>(&mut self.gradient, piece, sums);
        });
    }
}
