//! [`UninitBackend`]: outputs in uninitialized memory.

use crate::CpuBackend;

/// A [`CpuBackend`] with outputs of type `&mut [MaybeUninit<T>]`: they need not be zeroed first,
/// which takes longer than a norm in newly mapped memory. Same kernels, same bits. Made by
/// [`CpuBackend::uninit`]; to get results in vectors, call [`CpuBackend::forward_vec`].
///
/// # What is written
/// If a call succeeds, it has written every element of every given output: `rows * cols` of a
/// matrix, without the gaps between strided rows. If it fails, it may have written any of them or
/// none. The contents of a workspace are unspecified after a call.
///
/// Calls that read an output return [`Error::Unsupported`](rmsnorm_spec::Error::Unsupported): calls in place, with `folds_amax`, or
/// that accumulate gradients.
///
/// # Example
/// ```
/// use rmsnorm_cpu::{CpuBackend, UninitBackend, spec::{Error, Forward, NormSpec}};
/// # fn main() -> Result<(), Error> {
/// let (norm, x) = (NormSpec::rms(2, 2, 0.0), [3.0f32, 3.0, -5.0, 5.0]);
/// let mut y = Vec::with_capacity(x.len());
/// let out = &mut y.spare_capacity_mut()[..x.len()];
/// CpuBackend::new().uninit().forward(&norm, Forward::<UninitBackend, f32>::new(&x, out))?;
/// // SAFETY:
/// // - length: within the capacity;
/// // - contents: the call has succeeded, so it has written every element of y.
/// unsafe { y.set_len(x.len()) };
/// assert_eq!(y, [1.0, 1.0, -1.0, 1.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct UninitBackend(pub(crate) CpuBackend);

impl CpuBackend {
    /// This backend, with outputs that may be uninitialized before a call.
    pub fn uninit(&self) -> UninitBackend {
        UninitBackend(self.clone())
    }
}
