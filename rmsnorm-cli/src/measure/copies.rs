//! The plain copy that operations are compared with.

use rmsnorm_core::Error;
use rmsnorm_core::conformance::Harness;
use rmsnorm_core::cpu::CpuBackend;
use rmsnorm_core::measure::tensor;

type Buffer = <CpuBackend as Harness>::Buffer<f32>;

/// Pairs of source and target, visited in turn like the sets of a workload, and placed in memory like its tensors.
pub struct Copies<'b> {
    backend: &'b CpuBackend,
    elements: usize,
    pairs: Vec<(Buffer, Buffer)>,
}

impl<'b> Copies<'b> {
    /// That many pairs of that many bytes each, rounded up to whole f32.
    ///
    /// # Errors
    /// What the backend says.
    pub fn new(backend: &'b CpuBackend, bytes: usize, pairs: usize) -> Result<Self, Error> {
        let elements = bytes.div_ceil(size_of::<f32>());
        let (from, to) = (tensor(1, elements), tensor(2, elements));
        let pair = |_| Ok((backend.upload(&from)?, backend.upload(&to)?));
        Ok(Copies { backend, elements, pairs: (0..pairs).map(pair).collect::<Result<_, Error>>()? })
    }

    /// Copies the pair of that number modulo their count, through the cache or past it.
    ///
    /// # Errors
    /// None that can happen: the lengths are equal.
    pub fn copy(&mut self, pair: usize, streaming: bool) -> Result<(), Error> {
        let count = self.pairs.len();
        let (from, to) = &mut self.pairs[pair % count];
        let from = self.backend.view(from, 0..self.elements);
        self.backend.copy(from, self.backend.view_mut(to, 0..self.elements), streaming)
    }
}
