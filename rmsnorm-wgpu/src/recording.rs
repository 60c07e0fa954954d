//! Recording: calls go into a list that is encoded later.

use std::ops::Deref;
use std::sync::{Arc, PoisonError};

use rmsnorm_spec::Error;

use crate::backend::WgpuBackend;
use crate::error::scoped;
use crate::launch::{self, Target};

/// A backend that records its calls until [`encode`](Self::encode). Made by
/// [`WgpuBackend::recorder`].
///
/// It dereferences to a [`WgpuBackend`], for code that is generic over
/// [`NormBackend`](rmsnorm_spec::NormBackend). Clones of that backend record into the same list.
/// Calls that are not encoded before all of them are dropped never run. `batch` and the `encode_`
/// methods do not record into the list.
///
/// # Example
/// ```no_run
/// # use rmsnorm_wgpu::{Forward, WgpuBackend, WgpuSlice, spec::{Error, NormBackend, NormSpec}, wgpu};
/// # fn f(backend: &WgpuBackend, norm: &NormSpec, x: WgpuSlice<'_, f32>, y: WgpuSlice<'_, f32>, z: WgpuSlice<'_, f32>)
/// # -> Result<(), Error> {
/// /// Knows nothing of encoders.
/// fn twice<'a, B: NormBackend>(
///     backend: &B, norm: &NormSpec, x: B::In<'a, f32>, y: B::Out<'a, f32>, from_y: B::In<'a, f32>, z: B::Out<'a, f32>,
/// ) -> Result<(), Error> {
///     backend.forward(norm, rmsnorm_wgpu::spec::Forward::new(x, y))?;
///     backend.forward(norm, rmsnorm_wgpu::spec::Forward::new(from_y, z))
/// }
///
/// let recorder = backend.recorder();
/// twice(&*recorder, norm, x, y, y, z)?;
/// let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
/// recorder.encode(&mut encoder)?;
/// backend.queue().submit([encoder.finish()]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Recorder {
    backend: WgpuBackend,
}

impl Recorder {
    /// Encodes the calls made after the previous `encode`.
    ///
    /// # Errors
    /// `InvalidArgument` if the target cannot take a call: nothing is encoded, and the calls stay
    /// recorded. `Device` if the device rejects the commands: they may be in the target, and are no
    /// longer recorded.
    pub fn encode<'a, 'p: 'a>(&self, target: impl Into<Target<'a, 'p>>) -> Result<(), Error> {
        let Some(kept) = &self.backend.kept else { return Ok(()) };
        self.backend.check_health()?;
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        scoped(self.backend.device(), "encoding", || {
            launch::encode(&kept, target.into())?;
            // They are in the target now, even if the device reports an error.
            kept.clear();
            Ok(())
        })
    }
}

impl Deref for Recorder {
    type Target = WgpuBackend;

    fn deref(&self) -> &WgpuBackend {
        &self.backend
    }
}

impl WgpuBackend {
    /// A backend on the same device, with the same kernels, that records its calls until they are
    /// encoded.
    pub fn recorder(&self) -> Recorder {
        let mut backend = self.clone();
        backend.kept = Some(Arc::default());
        Recorder { backend }
    }

    /// Submits all calls that `calls` makes, in one submission. They share a compute pass, which
    /// saves about 7 us per call on an H200. The pass ends before a backward call with
    /// `GradReduction::Atomics`, which zeroes its workspace.
    ///
    /// # Errors
    /// Any error of `calls`, and nothing is submitted; `Device` if the submission fails.
    pub fn batch<O>(&self, calls: impl FnOnce(&Self) -> Result<O, Error>) -> Result<O, Error> {
        let recorder = self.recorder();
        let output = calls(&recorder)?;
        self.check_health()?;
        scoped(self.device(), "submitting a batch", || {
            let mut encoder = self.encoder();
            recorder.encode(&mut encoder)?;
            self.queue().submit([encoder.finish()]);
            Ok(output)
        })
    }
}
