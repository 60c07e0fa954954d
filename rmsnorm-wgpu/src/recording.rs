//! Recording: calls go into an encoder, a compute pass, or a list that is encoded later.

use std::ops::Deref;

use wgpu::{CommandEncoder, ComputePass};

use rmsnorm_spec::Error;

use crate::backend::WgpuBackend;

/// The target of encoding: `&mut encoder` or `&mut pass`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Target<'a, 'p> {
    /// An encoder without an open pass. Consecutive calls share a new compute pass.
    Encoder(&'a mut CommandEncoder),
    /// An open compute pass. Its pipeline and bind group 0 change. A pass cannot zero memory, so
    /// calls with `GradReduction::Atomics` need an encoder.
    Pass(&'a mut ComputePass<'p>),
}

impl<'a> From<&'a mut CommandEncoder> for Target<'a, '_> {
    fn from(encoder: &'a mut CommandEncoder) -> Self {
        Target::Encoder(encoder)
    }
}

impl<'a, 'p> From<&'a mut ComputePass<'p>> for Target<'a, 'p> {
    fn from(pass: &'a mut ComputePass<'p>) -> Self {
        Target::Pass(pass)
    }
}

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
    pub(crate) const fn new(backend: WgpuBackend) -> Self {
        Recorder { backend }
    }

    /// Encodes the calls made after the previous `encode`.
    ///
    /// # Errors
    /// `InvalidArgument` if the target cannot take a call: nothing is encoded, and the calls stay
    /// recorded. `Device` if the device rejects the commands: they may be in the target, and are no
    /// longer recorded.
    pub fn encode<'a, 'p: 'a>(&self, target: impl Into<Target<'a, 'p>>) -> Result<(), Error> {
        self.backend.encode_kept(target.into())
    }
}

impl Deref for Recorder {
    type Target = WgpuBackend;

    fn deref(&self) -> &WgpuBackend {
        &self.backend
    }
}
