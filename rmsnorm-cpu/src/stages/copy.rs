//! A plain copy with the kernels' loads and stores. The kernels' speed is compared with it.

use super::Stage;
use crate::lanes::{self, Fenced, Out, Simd};

/// A range to copy.
pub(crate) struct CopyRange<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) to: Out<'a, f32>,
    pub(crate) streaming: bool,
}

impl CopyRange<'_> {
    /// The elements before `index`, and the rest.
    pub(crate) fn split_at(self, index: usize) -> (Self, Self) {
        let (from_low, from_high) = self.from.split_at(index);
        let (to_low, to_high) = self.to.split_at(index);
        (CopyRange { from: from_low, to: to_low, ..self }, CopyRange { from: from_high, to: to_high, ..self })
    }
}

/// Copies the range.
impl Stage for CopyRange<'_> {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        if !self.streaming {
            // memcpy is the fastest known copy through the cache.
            return self.to.copy_from_slice(self.from);
        }
        let fenced = Fenced::<S>::new(true);
        let stores = fenced.stores();
        lanes::for_each_piece!(stores.head(&self.to), self.to.len(), piece => {
            let lanes = lanes::load::<S, f32, _>(self.from, piece);
            lanes::store_or_stream::<S, f32, _>(&mut self.to, piece, lanes, stores);
        });
    }
}
