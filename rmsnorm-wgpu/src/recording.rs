//! An encoder that calls go into, with the compute pass that they share.

use wgpu::{CommandEncoder, ComputePass};

use crate::launch::Work;

/// wgpu makes two command buffers of every compute pass, between which a device has nothing to do: dispatches that
/// follow one another share one.
pub(crate) struct Recording {
    /// Dropped before the encoder, which is locked while it is open.
    pass: Option<ComputePass<'static>>,
    encoder: CommandEncoder,
}

impl Recording {
    pub(crate) const fn new(encoder: CommandEncoder) -> Self {
        Recording { pass: None, encoder }
    }

    pub(crate) fn add(&mut self, work: &Work) {
        work.record(&mut self.encoder, &mut self.pass);
    }

    /// The encoder, with no pass open.
    pub(crate) fn finish(self) -> CommandEncoder {
        let Recording { pass, encoder } = self;
        drop(pass);
        encoder
    }
}
