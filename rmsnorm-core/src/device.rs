//! The choice of a backend at run time: device names, the devices of this machine, and one enum
//! over all backends.
//!
//! Backends that are not compiled in keep their device names, so that opening one returns an error
//! with the reason. Code that knows its backend at compile time does not need this module.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "conformance")]
use crate::conformance::Harness;
#[cfg(feature = "cpu")]
use crate::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use crate::cuda::CudaBackend;
#[cfg(feature = "wgpu")]
use crate::wgpu::WgpuBackend;
use crate::{Error, NormBackend};

/// The name of a device that a backend runs on. [`FromStr`] parses its [`Display`](fmt::Display)
/// form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// `cpu`: the CPU of this machine.
    Cpu,
    /// `cuda`: the first CUDA device. `cuda:1`: the CUDA device with ordinal 1.
    Cuda(usize),
    /// `wgpu`: the first wgpu adapter. `wgpu:1`: the adapter with index 1.
    Wgpu(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Formats into a string first, so that a width pads the whole name.
        let name = match self {
            Device::Cpu => "cpu".into(),
            Device::Cuda(0) => "cuda".into(),
            Device::Cuda(ordinal) => format!("cuda:{ordinal}"),
            Device::Wgpu(0) => "wgpu".into(),
            Device::Wgpu(ordinal) => format!("wgpu:{ordinal}"),
        };
        f.pad(&name)
    }
}

/// A text that names no device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseDeviceError {
    expected: &'static str,
    got: String,
}

impl fmt::Display for ParseDeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a device is {}, got {:?}", self.expected, self.got)
    }
}

impl std::error::Error for ParseDeviceError {}

impl FromStr for Device {
    type Err = ParseDeviceError;

    /// Parses a device name, also of devices that this build or machine lacks. `cuda:0` is `cuda`.
    ///
    /// # Errors
    /// [`ParseDeviceError`] for other texts.
    fn from_str(name: &str) -> Result<Self, ParseDeviceError> {
        let refuse = |expected| ParseDeviceError { expected, got: name.into() };
        let (backend, number) = name.split_once(':').map_or((name, None), |(backend, number)| (backend, Some(number)));
        let (numbered, expected): (fn(usize) -> Device, _) = match (backend, number) {
            ("cpu", None) => return Ok(Device::Cpu),
            ("cuda", _) => (Device::Cuda, "cuda or cuda:N with N = 0, 1, .."),
            ("wgpu", _) => (Device::Wgpu, "wgpu or wgpu:N with N = 0, 1, .."),
            (_, _) => return Err(refuse("one of cpu, cuda and wgpu")),
        };
        let Some(number) = number else { return Ok(numbered(0)) };
        // `parse` alone would accept a sign.
        let ordinal = number.parse().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()));
        ordinal.map(numbered).ok_or_else(|| refuse(expected))
    }
}

/// Whether a device can be used on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Availability {
    /// The device.
    pub device: Device,
    /// The device's description, or why it cannot be used. The reason ends with `; fix: ` and the command or step that
    /// makes it usable, where the backend knows one.
    pub status: Result<String, String>,
    /// The tuning table that plans its calls, in words; `None` if the device cannot be used.
    pub tuning: Option<String>,
}

/// Lists every device of every backend, with the reason for those that cannot be used. Never
/// panics.
///
/// A backend without a device has one entry, under its own name. The call opens every GPU, which
/// takes a moment each.
///
/// # Example
/// ```
/// for entry in rmsnorm_core::available() {
///     match entry.status {
///         Ok(description) => println!("{}: {description}", entry.device),
///         Err(reason) => println!("{}: not available: {reason}", entry.device),
///     }
/// }
/// ```
pub fn available() -> Vec<Availability> {
    let cuda = (0..cuda_devices()).map(Device::Cuda);
    let wgpu = (0..wgpu_devices()).map(Device::Wgpu);
    std::iter::once(Device::Cpu).chain(cuda).chain(wgpu).map(probe).collect()
}

fn probe(device: Device) -> Availability {
    let (status, tuning) = match AnyBackend::open(device) {
        Ok(backend) => (Ok(backend.to_string()), Some(backend.tuning())),
        Err(Error::Unavailable { reason, .. }) => (Err(reason), None),
        Err(error) => (Err(error.to_string()), None),
    };
    Availability { device, status, tuning }
}

/// The number of CUDA devices to list. Without any, opening the first one returns the reason.
#[cfg(feature = "cuda")]
fn cuda_devices() -> usize {
    CudaBackend::device_count().unwrap_or(1)
}

/// One entry, with the reason why it cannot be used.
#[cfg(not(feature = "cuda"))]
const fn cuda_devices() -> usize {
    1
}

/// The number of adapters to list. Without any, opening the first one returns the reason.
#[cfg(feature = "wgpu")]
fn wgpu_devices() -> usize {
    WgpuBackend::device_count().unwrap_or(1)
}

/// One entry, with the reason why it cannot be used.
#[cfg(not(feature = "wgpu"))]
const fn wgpu_devices() -> usize {
    1
}

/// Evaluates an expression with the backend of any variant.
macro_rules! on_backend {
    ($any:expr, |$backend:ident| $expression:expr) => {
        match *$any {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(ref $backend) => $expression,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(ref $backend) => $expression,
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(ref $backend) => $expression,
        }
    };
}

/// A backend chosen at run time.
///
/// Match on it to pass tensors, whose types differ between backends. [`dispatch`](Self::dispatch)
/// runs code that is generic over backends; with the feature `conformance`, `dispatch_harness` also
/// runs code that moves data. Its [`Display`](fmt::Display) form describes the device.
///
/// # Example
/// ```
/// # #[cfg(feature = "cpu")] {
/// use rmsnorm_core::{AnyBackend, Device};
///
/// let device: Device = "cpu".parse()?; // or "cuda", "wgpu:1"
/// let backend = AnyBackend::open(device)?;
/// let cpu = backend.as_cpu().ok_or("not the CPU")?; // a `CpuBackend`, which takes slices
/// println!("{backend}: {} threads", cpu.threads());
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyBackend {
    /// The CPU backend.
    #[cfg(feature = "cpu")]
    Cpu(CpuBackend),
    /// The CUDA backend on one device.
    #[cfg(feature = "cuda")]
    Cuda(CudaBackend),
    /// The wgpu backend on one device.
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuBackend),
}

impl AnyBackend {
    /// Opens the backend of a device. On CUDA it uses the default stream.
    ///
    /// # Errors
    /// `Unavailable` if this build or this machine lacks it, `Device` if the device fails.
    pub fn open(device: Device) -> Result<Self, Error> {
        match device {
            #[cfg(feature = "cpu")]
            Device::Cpu => CpuBackend::try_new().map(AnyBackend::Cpu),
            #[cfg(not(feature = "cpu"))]
            Device::Cpu => Err(not_built_in("cpu")),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => CudaBackend::new(ordinal).map(AnyBackend::Cuda),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(not_built_in("cuda")),
            #[cfg(feature = "wgpu")]
            Device::Wgpu(ordinal) => WgpuBackend::new(ordinal).map(AnyBackend::Wgpu),
            #[cfg(not(feature = "wgpu"))]
            Device::Wgpu(_) => Err(not_built_in("wgpu")),
        }
    }

    /// The device of this backend. A wgpu device that the caller passed in has no index, and counts
    /// as the first.
    pub fn device(&self) -> Device {
        match *self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(ref backend) => Device::Cuda(backend.stream().context().ordinal()),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(ref backend) => Device::Wgpu(backend.ordinal().unwrap_or(0)),
        }
    }

    /// The tuning table that plans calls, in words: `built in`, or a file and its date.
    pub fn tuning(&self) -> String {
        on_backend!(self, |backend| backend.tuning())
    }

    /// The CPU backend, or `None` for another variant.
    #[cfg(feature = "cpu")]
    pub fn as_cpu(&self) -> Option<&CpuBackend> {
        match self {
            AnyBackend::Cpu(backend) => Some(backend),
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => None,
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => None,
        }
    }

    /// The CUDA backend, or `None` for another variant.
    #[cfg(feature = "cuda")]
    pub fn as_cuda(&self) -> Option<&CudaBackend> {
        match self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(_) => None,
            AnyBackend::Cuda(backend) => Some(backend),
            #[cfg(feature = "wgpu")]
            AnyBackend::Wgpu(_) => None,
        }
    }

    /// The wgpu backend, or `None` for another variant.
    #[cfg(feature = "wgpu")]
    pub fn as_wgpu(&self) -> Option<&WgpuBackend> {
        match self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            AnyBackend::Cuda(_) => None,
            AnyBackend::Wgpu(backend) => Some(backend),
        }
    }

    /// Runs a task on the backend of any variant.
    ///
    /// # Example
    /// The workspace length of a training step, on a device from a configuration:
    /// ```
    /// use rmsnorm_core::{AnyBackend, DType, Error, Norm, NormBackend, Problem, Task, Tensor};
    /// struct WorkspaceLen(Problem);
    /// impl Task for WorkspaceLen {
    ///     type Output = usize;
    ///     fn run<B: NormBackend>(self, backend: &B) -> usize {
    ///         backend.workspace_len(&self.0)
    ///     }
    /// }
    /// fn workspace_len(device: &str) -> Result<usize, Box<dyn std::error::Error>> {
    ///     let problem = Problem::backward(Norm::Rms, 4096, 1024, DType::F32, &[Tensor::Dweight]);
    ///     Ok(AnyBackend::open(device.parse()?)?.dispatch(WorkspaceLen(problem)))
    /// }
    /// # #[cfg(feature = "cpu")]
    /// assert_eq!(workspace_len("cpu")?, 64 * 1024);
    /// assert!(workspace_len("tpu").is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg_attr(
        not(any(feature = "cpu", feature = "cuda", feature = "wgpu")),
        expect(unused_variables, reason = "without a backend there is no value to match")
    )]
    pub fn dispatch<K: Task>(&self, task: K) -> K::Output {
        on_backend!(self, |backend| task.run(backend))
    }

    /// Runs a task that moves data, on the backend of any variant.
    #[cfg(feature = "conformance")]
    #[cfg_attr(
        not(any(feature = "cpu", feature = "cuda", feature = "wgpu")),
        expect(unused_variables, reason = "without a backend there is no value to match")
    )]
    pub fn dispatch_harness<K: HarnessTask>(&self, task: K) -> K::Output {
        on_backend!(self, |backend| task.run(backend))
    }
}

/// The error for a backend that this build lacks. The feature has the backend's name.
#[cfg(not(all(feature = "cpu", feature = "cuda", feature = "wgpu")))]
fn not_built_in(backend: &'static str) -> Error {
    let reason = format!(
        "not built in: rmsnorm-core was built without its feature `{backend}`; fix: cargo add rmsnorm-core --features {backend}"
    );
    Error::Unavailable { backend, reason }
}

impl fmt::Display for AnyBackend {
    #[cfg_attr(
        not(any(feature = "cpu", feature = "cuda", feature = "wgpu")),
        expect(unused_variables, reason = "without a backend there is no value to match")
    )]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        on_backend!(self, |backend| write!(f, "{backend}"))
    }
}

/// Code that runs on any backend, for [`AnyBackend::dispatch`]: in effect a generic closure, which
/// Rust cannot express.
pub trait Task {
    /// The result.
    type Output;

    /// Runs the code on this backend.
    fn run<B: NormBackend>(self, backend: &B) -> Self::Output;
}

/// As [`Task`], for code that moves data, with `AnyBackend::dispatch_harness`.
#[cfg(feature = "conformance")]
pub trait HarnessTask {
    /// The result.
    type Output;

    /// Runs the code on this backend. The harness uploads and downloads data.
    fn run<H: Harness>(self, harness: &H) -> Self::Output;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_read_back() {
        let names = [
            (Device::Cpu, "cpu"),
            (Device::Cuda(0), "cuda"),
            (Device::Cuda(12), "cuda:12"),
            (Device::Wgpu(0), "wgpu"),
            (Device::Wgpu(3), "wgpu:3"),
        ];
        for (device, name) in names {
            assert_eq!(device.to_string(), name);
            assert_eq!(name.parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda:0".parse::<Device>().unwrap(), Device::Cuda(0));
        assert_eq!(format!("{:<7}|", Device::Cuda(3)), "cuda:3 |");
    }

    #[test]
    fn device_bad_number_is_refused() {
        for name in ["cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1:2", "cuda:99999999999999999999"] {
            let message = name.parse::<Device>().unwrap_err().to_string();
            assert_eq!(message, format!("a device is cuda or cuda:N with N = 0, 1, .., got {name:?}"));
        }
        let message = "wgpu:-1".parse::<Device>().unwrap_err().to_string();
        assert_eq!(message, r#"a device is wgpu or wgpu:N with N = 0, 1, .., got "wgpu:-1""#);
    }

    #[test]
    fn device_unknown_name_lists_the_names() {
        for name in ["tpu", "cud", "cudax", "CUDA", "cpu:0", ""] {
            let message = name.parse::<Device>().unwrap_err().to_string();
            assert_eq!(message, format!("a device is one of cpu, cuda and wgpu, got {name:?}"));
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn device_not_built_in_names_the_feature() {
        let message = AnyBackend::open(Device::Cuda(0)).unwrap_err().to_string();
        let expected = "not built in: rmsnorm-core was built without its feature `cuda`; fix: cargo add rmsnorm-core \
                        --features cuda";
        assert_eq!(message, format!("the cuda backend is not available: {expected}"));
    }

    #[test]
    fn available_has_every_backend_and_tells_the_truth() {
        let list = available();
        for device in [Device::Cpu, Device::Cuda(0), Device::Wgpu(0)] {
            assert_eq!(list.iter().filter(|entry| entry.device == device).count(), 1, "{device}");
        }
        for Availability { device, status, tuning } in list {
            let opened = AnyBackend::open(device).ok();
            assert_eq!(opened.as_ref().map(ToString::to_string), status.ok(), "{device}");
            assert_eq!(opened.as_ref().map(AnyBackend::tuning), tuning, "{device}");
        }
    }
}
