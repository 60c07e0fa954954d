//! Where calls go instead of being submitted: into an encoder, a compute pass, or a list that is encoded later.

use std::ops::Deref;

use wgpu::{CommandEncoder, ComputePass};

use rmsnorm_spec::Error;

use crate::backend::WgpuBackend;

/// What commands are encoded into: `&mut encoder` or `&mut pass`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Target<'a, 'p> {
    /// An encoder in which no pass is open. Calls that follow one another share a compute pass of their own.
    Encoder(&'a mut CommandEncoder),
    /// An open compute pass. Its pipeline and its bind group 0 are others afterwards. A pass cannot zero memory, so calls with
    /// `GradReduction::Atomics` take an encoder.
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

/// A backend whose calls are kept, in their order, until [`encode`](Self::encode): made by [`WgpuBackend::recorder`].
///
/// It is a [`WgpuBackend`] by reference, and so for code that is generic over
/// [`NormBackend`](rmsnorm_spec::NormBackend). Clones of that backend keep their calls in the same list. What is not encoded
/// when the recorder and they are dropped never runs. `batch` and the `encode_` methods of that backend do not wait for what is
/// kept.
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

    /// Encodes the calls that were made since the last time.
    ///
    /// # Errors
    /// `InvalidArgument` for a call that the target cannot take: nothing is encoded then, and the calls stay. `Device` if
    /// the device does not take the commands; they may be in the target, and are not kept.
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
