//! The workspace of a call: passed by the caller, or kept by the backend.

use std::ops::Range;

use rmsnorm_gpu::reduction::{ALIGNMENT, ALIGNMENT_SLACK};
use rmsnorm_spec::Error;
use wgpu::Buffer;

use super::tensors::View;
use crate::shared::Shared;

/// f32 in a buffer, starting at a multiple of 16 bytes.
#[derive(Debug)]
pub(super) struct Workspace {
    pub(super) buffer: Buffer,
    /// Bytes.
    pub(super) offset: u64,
    /// Bytes that the plan uses, rounded up to a multiple of 16.
    pub(super) len: u64,
}

impl Workspace {
    /// The call's workspace, or the backend's. `len` is in elements, with room for the alignment to
    /// 16 bytes.
    ///
    /// # Errors
    /// `Length` if the call's workspace is too short, for example because another backend computed
    /// its length. Errors of creating the backend's workspace.
    pub(super) fn of_call(shared: &Shared, view: Option<&View<'_>>, len: u64) -> Result<Self, Error> {
        let used = bytes_of(len.saturating_sub(ALIGNMENT_SLACK)).next_multiple_of(ALIGNMENT);
        let (buffer, offset, room) = match view {
            Some(view) => {
                let offset = view.offset.next_multiple_of(ALIGNMENT);
                (view.buffer.clone(), offset, (view.offset + bytes_of(view.len)).saturating_sub(offset))
            }
            None => (shared.workspace(len)?, 0, bytes_of(len)),
        };
        if room < used {
            // The kernels index without bounds checks, and a `Checked` call may have been checked
            // for another device.
            let (min, got) = (len as usize, view.map_or(0, |view| view.len as usize));
            return Err(Error::Length { arg: "workspace", min, max: usize::MAX, got });
        }
        Ok(Workspace { buffer, offset, len: used })
    }

    /// The byte range of `len` elements from element `first` on.
    pub(super) fn bytes(&self, first: u64, len: u64) -> Range<u64> {
        let start = self.offset + bytes_of(first);
        start..start + bytes_of(len)
    }
}

/// Bytes of f32.
pub(super) const fn bytes_of(elements: u64) -> u64 {
    elements * size_of::<f32>() as u64
}
