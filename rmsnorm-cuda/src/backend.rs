//! [`CudaBackend`]: a stream, and the kernels of its context.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};
use rmsnorm_spec::Error;

use crate::caps::Caps;
use crate::error::{device_error, unavailable};
use crate::kernel::Kernels;
use crate::{compile, library};

/// The oldest driver with every function that this crate calls: 12.0 added launches with
/// attributes.
const OLDEST_DRIVER: Version = Version { major: 12, minor: 0 };

/// Normalizes tensors on an NVIDIA GPU, on a CUDA stream that the caller provides.
///
/// A clone is cheap. All backends of a process on one context share its loaded kernels, which stay
/// loaded until the process ends. Calls may come from any thread.
///
/// # Tensors
/// Arguments are views of [`CudaSlice`](cudarc::driver::CudaSlice)s: `x.as_view()`,
/// `y.as_view_mut()`, or ranges, `x.slice(a..b)`. A slice of another context gives
/// [`Error::InvalidArgument`]. For memory of another framework use
/// [`BorrowedSlice`](crate::BorrowedSlice), for its stream [`on_raw`](Self::on_raw).
///
/// # Ordering
/// A call enqueues its work on the stream and returns; it never waits, and copies nothing. With
/// several streams in one context, cudarc orders the accesses to a slice by events. Calls of this
/// backend take part in that, as launches through cudarc do. A stream of [`on_raw`](Self::on_raw)
/// does not count as one of several.
///
/// # Memory
/// A backward call with `dweight` or `dbias` needs a workspace of [`NormBackend::workspace_len`]
/// elements. The caller passes it, or the call allocates and frees it in stream order, from a pool
/// that keeps up to 256 MiB for the next call. If the device has no stream-ordered allocation, a
/// call without a workspace returns [`Error::Unsupported`]. [`NormBackend::backward_with_statistics`] may
/// need more than `workspace_len`; it then allocates its own workspace. A call that finds a tensor's own
/// scale (`ScaleKind::Current`) allocates some words, unless one block handles all rows.
///
/// # CUDA graphs
/// Calls may be captured on any stream except the default stream. cudarc's events cannot be
/// captured. Use `CudaContext::per_thread_stream` in a context without other streams, where cudarc
/// needs no events, or turn events off with `CudaContext::disable_event_tracking`. Call
/// [`NormBackend::prepare`] before the capture: it compiles the kernels, up to a second each. A
/// workspace that is not passed in becomes part of the graph, and such a graph cannot be a child
/// graph.
///
/// [`NormBackend::workspace_len`]: rmsnorm_spec::NormBackend::workspace_len
/// [`NormBackend::backward_with_statistics`]: rmsnorm_spec::NormBackend::backward_with_statistics
/// [`NormBackend::prepare`]: rmsnorm_spec::NormBackend::prepare
///
/// # Example
/// ```no_run
/// use rmsnorm_cuda::{Backward, CudaBackend, Forward, spec::{NormBackend, NormSpec, bf16}};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let backend = CudaBackend::new(0)?;
/// let stream = backend.stream();
/// let (rows, cols) = (4096, 8192);
/// let norm = NormSpec::rms(rows, cols, 1e-6);
/// let x = stream.alloc_zeros::<bf16>(rows * cols)?;
/// let weight = stream.clone_htod(&vec![bf16::ONE; cols])?;
/// let mut y = stream.alloc_zeros::<bf16>(rows * cols)?;
/// let mut rstd = stream.alloc_zeros::<f32>(rows)?;
/// let args = Forward::new(x.as_view(), y.as_view_mut()).weight(weight.as_view()).rstd(rstd.as_view_mut());
/// backend.forward(&norm, args)?;
///
/// let dy = stream.alloc_zeros::<bf16>(rows * cols)?;
/// let mut dx = stream.alloc_zeros::<bf16>(rows * cols)?;
/// let mut dweight = stream.alloc_zeros::<bf16>(cols)?;
/// let args = Backward::new(dy.as_view(), x.as_view(), rstd.as_view(), dx.as_view_mut());
/// backend.backward(&norm, args.weight(weight.as_view()).dweight(dweight.as_view_mut()))?;
/// let y: Vec<bf16> = stream.clone_dtoh(&y)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CudaBackend {
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    driver: Version,
    device: Arc<str>,
}

impl CudaBackend {
    /// A backend that works on this stream. The caller may go on using the stream.
    ///
    /// # Errors
    /// `Unavailable` if the driver is too old, NVRTC is missing, or `RMSNORM_TUNING` names a table
    /// that does not fit; `Device` if the driver fails.
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self, Error> {
        library::require_driver()?;
        let driver = driver_version()?;
        library::require_nvrtc()?;
        let (major, minor) = compile::nvrtc_version()?;
        let nvrtc = Version { major, minor };
        let kernels = Kernels::of(stream.context(), driver.to_string(), format!("NVRTC {nvrtc}"))?;
        let device = describe(kernels.context(), kernels.caps(), driver, nvrtc);
        let device = device.map_err(device_error("cuDeviceGetName"))?.into();
        Ok(CudaBackend { stream, kernels, driver, device })
    }

    /// A backend on the default stream of device `ordinal`.
    ///
    /// # Errors
    /// `Unavailable` if the driver, NVRTC or the device is missing; `Device` if the driver fails.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let count = CudaBackend::device_count()?;
        // cudarc converts the number to a narrower integer, so it is checked here.
        if ordinal >= count {
            let plural = if count == 1 { "" } else { "s" };
            return Err(unavailable(format!("there is no device {ordinal}, only {count} device{plural}")));
        }
        library::require_nvrtc()?;
        let context = CudaContext::new(ordinal).map_err(device_error("cuDevicePrimaryCtxRetain"))?;
        CudaBackend::from_stream(context.default_stream())
    }

    /// A backend on the default stream of a device's primary context. PyTorch, JAX and every
    /// program that uses the CUDA runtime work in that context; use their memory and streams
    /// through [`BorrowedSlice`](crate::BorrowedSlice) and [`on_raw`](Self::on_raw). cudarc's
    /// events are off, so a borrowed tensor creates none.
    ///
    /// # Safety
    /// - Order: cudarc orders nothing between streams in this backend's context object. If calls on
    ///   several streams use one tensor, the caller orders these calls, and keeps the tensors that
    ///   they use alive until they are done.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub unsafe fn primary(ordinal: usize) -> Result<Self, Error> {
        let backend = CudaBackend::new(ordinal)?;
        // SAFETY:
        // - order: the caller's promise; the context object belongs to this backend alone, so no
        //   other code relies on its events.
        unsafe { backend.stream.context().disable_event_tracking() };
        Ok(backend)
    }

    /// This backend with the programs of large calls for every call. The suite's cases are small,
    /// and would otherwise mostly use other programs: rows held in registers, no partial sums.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    #[must_use]
    pub fn with_large_plans(&self) -> Self {
        let source = self.kernels.source().clone();
        CudaBackend {
            kernels: self.kernels.with_tuning(self.kernels.caps().tuning.with_large_plans(), source),
            ..self.clone()
        }
    }

    /// The tuning table that plans use, in words: `built in`, or a file and its date.
    pub fn tuning(&self) -> String {
        self.kernels.source().to_string()
    }

    /// The number of CUDA devices; at least 1.
    ///
    /// # Errors
    /// `Unavailable` if there is no device, no driver, or a driver that is too old or does not
    /// start.
    pub fn device_count() -> Result<usize, Error> {
        library::require_driver()?;
        driver_version()?;
        let count = CudaContext::device_count().map_err(|error| unavailable(start_failure(error)))?;
        match usize::try_from(count) {
            Ok(count @ 1..) => Ok(count),
            Ok(0) | Err(_) => Err(unavailable(format!("there is no CUDA device{}", find_device()))),
        }
    }

    /// The stream that calls are enqueued on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The newest CUDA release that the driver supports: major, minor. Some functions of [`cudarc`]
    /// panic if the driver lacks them.
    pub fn driver_version(&self) -> (u32, u32) {
        (self.driver.major, self.driver.minor)
    }

    /// The same backend on another stream of its context. Kernels stay compiled.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream belongs to another context.
    pub fn on(&self, stream: Arc<CudaStream>) -> Result<Self, Error> {
        if stream.context() != self.kernels.context() {
            let rule = format!(
                "must be of the backend's context, got a stream of {} for a backend on {}",
                place(stream.context()),
                place(self.kernels.context())
            );
            return Err(Error::InvalidArgument { arg: "stream", rule });
        }
        Ok(CudaBackend { stream, ..self.clone() })
    }

    /// The same backend on a stream that another library owns, such as PyTorch's current stream or
    /// the stream of an XLA custom call.
    ///
    /// # Safety
    /// - `stream` is a stream of the backend's context.
    /// - Its owner keeps it alive for as long as the backend, its clones and every holder of their
    ///   [`stream`](Self::stream).
    /// - The caller orders the work that the owner enqueues on it with work that goes through
    ///   cudarc.
    /// - cudarc does not count this stream. Unless the context is in multi-stream mode
    ///   (`CudaContext::is_in_multi_stream_mode`), the caller also orders and keeps alive the
    ///   memory that cudarc allocates, writes or frees on another stream.
    pub unsafe fn on_raw(&self, stream: sys::CUstream) -> Self {
        // SAFETY:
        // - stream: the caller's promises are the ones that `wrap_borrowed_stream` requires.
        let stream = unsafe { self.stream.context().wrap_borrowed_stream(stream) };
        CudaBackend { stream, ..self.clone() }
    }

    /// The number of loaded kernels of the context. For tests.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    pub fn kernel_count(&self) -> usize {
        self.kernels.len()
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The same backend with other kernels of its context.
    #[cfg(feature = "conformance")]
    pub(crate) fn with_kernels(&self, kernels: Arc<Kernels>) -> Self {
        CudaBackend { kernels, ..self.clone() }
    }
}

/// The device in words: `NVIDIA H200, sm_90, 132 SMs, 139.7 GiB, driver 13.0, NVRTC 13.0`.
impl fmt::Display for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend")
            .field("device", &self.device)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// Describes a context in a message.
pub(crate) fn place(context: &CudaContext) -> String {
    let kind = if context.is_primary() { "the primary context" } else { "a context" };
    format!("{kind} of device {}", context.ordinal())
}

fn describe(context: &CudaContext, caps: &Caps, driver: Version, nvrtc: Version) -> Result<String, DriverError> {
    let gib = context.total_mem()? as f64 / (1u64 << 30) as f64;
    let (name, arch, sms) = (context.name()?, caps.arch, caps.sms);
    Ok(format!("{name}, {arch}, {sms} SMs, {gib:.1} GiB, driver {driver}, NVRTC {nvrtc}"))
}

/// A CUDA version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u32,
    minor: u32,
}

impl Version {
    /// Decodes the driver's number, 1000 major + 10 minor; fails if it is older than
    /// [`OLDEST_DRIVER`].
    fn of_driver(number: i32) -> Result<Self, Error> {
        let number = number.unsigned_abs();
        let version = Version { major: number / 1000, minor: number % 1000 / 10 };
        if version < OLDEST_DRIVER {
            return Err(unavailable(format!(
                "the driver supports CUDA {version}, and {OLDEST_DRIVER} is the oldest that works; fix: {}",
                library::UPDATE_DRIVER
            )));
        }
        Ok(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The newest CUDA release that the driver supports; fails if it is too old. The driver library
/// must be loadable.
fn driver_version() -> Result<Version, Error> {
    let mut number = 0;
    // SAFETY:
    // - library: `require_driver` found it, and this call is in all versions of it;
    // - pointer: to a local of the type that the call writes.
    unsafe { sys::cuDriverGetVersion(&raw mut number) }.result().map_err(|error| unavailable(start_failure(error)))?;
    Version::of_driver(number)
}

fn start_failure(error: DriverError) -> String {
    let failure = crate::error::DriverFailure::new("the driver does not start", error);
    let fix = if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE {
        find_device()
    } else {
        "; fix: make `nvidia-smi` work; after an update of the driver, restart the machine".into()
    };
    format!("{failure}{fix}")
}

/// The fix where the driver sees no device.
fn find_device() -> String {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(devices) => format!("; fix: unset CUDA_VISIBLE_DEVICES, which is {devices:?}"),
        Err(_) => "; fix: make `nvidia-smi` list a GPU; a container needs docker run --gpus all".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_from_cuda_12_on_will_do() {
        let texts = [12000, 12010, 12090, 13000].map(|number| Version::of_driver(number).map(|it| it.to_string()).ok());
        assert_eq!(texts, ["12.0", "12.1", "12.9", "13.0"].map(|text| Some(text.to_owned())));
        for (number, text) in [(11080, "CUDA 11.8, and 12.0 is"), (11990, "CUDA 11.99, and 12.0 is")] {
            let refused = Version::of_driver(number).map(|it| it.to_string());
            assert!(matches!(&refused, Err(Error::Unavailable { reason, .. }) if reason.contains(text)), "{refused:?}");
        }
    }
}
