//! A device with its kernels and memory, as calls share it.

use std::sync::{Arc, Mutex, PoisonError};

use rmsnorm_spec::Error;
use wgpu::{Buffer, BufferDescriptor, BufferUsages, Device};

use crate::caps::Caps;
use crate::error::{scoped, unsupported};
use crate::kernel::Kernels;

/// A device, and the parts of a backend that its calls use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) device: Device,
    pub(crate) caps: Caps,
    /// A key contains the whole tile, so backends with different tables can share kernels.
    pub(crate) kernels: Arc<Kernels>,
    /// The workspace of calls without one.
    workspace: Mutex<Option<Buffer>>,
}

impl Shared {
    pub(crate) fn new(device: Device, caps: Caps, kernels: Arc<Kernels>) -> Self {
        Shared { device, caps, kernels, workspace: Mutex::default() }
    }

    /// Drops the compiled kernels and the workspace. A browser reports an invalid object only after it
    /// was kept.
    pub(crate) fn forget(&self) {
        self.kernels.forget();
        self.workspace.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The backend's workspace, at least `len` f32. Each call's use is contiguous in one encoder,
    /// and encoders of a queue run in order, so calls can share it. wgpu would zero a new buffer
    /// each time.
    pub(crate) fn workspace(&self, len: u64) -> Result<Buffer, Error> {
        let size = len.saturating_mul(size_of::<f32>() as u64);
        let mut kept = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = kept.as_ref().filter(|buffer| buffer.size() >= size) {
            return Ok(buffer.clone());
        }
        let most = self.device.limits().max_buffer_size;
        if size > most {
            let rule = format!("a buffer of this device has at most {most} bytes, got a workspace of {size}");
            return Err(unsupported(rule));
        }
        // Only a buffer that was created is kept; in a browser until its error is known.
        let buffer = scoped(&self.device, "making the workspace", || {
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST;
            let label = Some("rmsnorm workspace");
            Ok(self.device.create_buffer(&BufferDescriptor { label, size, usage, mapped_at_creation: false }))
        })?;
        Ok(kept.insert(buffer).clone())
    }
}
