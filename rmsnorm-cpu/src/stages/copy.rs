//! A plain copy with the kernels' loads and stores. The kernels' speed is compared with it.

use super::{Stage, split};
use crate::lanes::{self, Fenced, Mix, Out, Simd};

/// A range to copy.
pub(crate) struct CopyRange<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) to: Out<'a, f32>,
    pub(crate) streaming: bool,
}

split!(['a] CopyRange<'a> { from, to; streaming });

/// Copies the range.
impl Stage for CopyRange<'_> {
    #[inline(always)]
    fn run<S: Simd, M: Mix>(&mut self) {
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
