//! The choice of a backend at run time: names of devices, what is on this machine, and one enum over all backends.
//!
//! A backend that was not built in keeps its name here, so that the answer to "where is it?" is a sentence. Code that
//! knows its backend at compile time needs nothing of this.

use std::fmt;
use std::str::FromStr;

use crate::Error;
#[cfg(feature = "conformance")]
use crate::conformance::Harness;
#[cfg(feature = "cpu")]
use crate::cpu::CpuBackend;

/// Names of the backends that this crate will have, with the reason why they are not here.
const NOT_BUILT_IN: [(&str, &str); 2] = [
    ("cuda", "not built in: this build has no cuda backend (yet)"),
    ("wgpu", "not built in: this build has no wgpu backend (yet)"),
];

/// A device that a backend runs on, by name. Its [`Display`](fmt::Display) form is what [`FromStr`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// `cpu`: this machine's processor.
    Cpu,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// The device of that name.
    ///
    /// # Errors
    /// `Unavailable` for a backend that this build lacks, `Unsupported` for a name that no backend has.
    fn from_str(name: &str) -> Result<Self, Error> {
        if name == "cpu" {
            return Ok(Device::Cpu);
        }
        match NOT_BUILT_IN.into_iter().find(|&(backend, _)| backend == name) {
            Some((backend, reason)) => Err(Error::Unavailable { backend, reason: reason.into() }),
            None => Err(Error::Unsupported { rule: format!("a backend is one of cpu, cuda and wgpu, got {name:?}") }),
        }
    }
}

/// Whether a device can be used on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Availability {
    /// The device's name; where it can be used, [`Device`] reads it.
    pub name: String,
    /// What the device is, or why it cannot be used.
    pub status: Result<String, String>,
}

/// Every device of every backend: what is on this machine and, for what is not, why. Never panics.
pub fn available() -> Vec<Availability> {
    let status = match AnyBackend::open(Device::Cpu) {
        Ok(backend) => Ok(backend.to_string()),
        Err(Error::Unavailable { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    };
    let cpu = Availability { name: Device::Cpu.to_string(), status };
    let absent = NOT_BUILT_IN.map(|(name, reason)| Availability { name: name.into(), status: Err(reason.into()) });
    std::iter::once(cpu).chain(absent).collect()
}

/// A backend chosen at run time.
///
/// Match on it where the tensors' types are known for each backend; with the feature `conformance`, `dispatch` runs
/// code that is generic over all of them. Its [`Display`](fmt::Display) form says what the device is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyBackend {
    /// The CPU backend.
    #[cfg(feature = "cpu")]
    Cpu(CpuBackend),
}

impl AnyBackend {
    /// The backend of that device, ready to use.
    ///
    /// # Errors
    /// `Unavailable` if this build or this machine lacks it.
    pub fn open(device: Device) -> Result<Self, Error> {
        match device {
            #[cfg(feature = "cpu")]
            Device::Cpu => Ok(AnyBackend::Cpu(CpuBackend::new())),
            #[cfg(not(feature = "cpu"))]
            Device::Cpu => {
                let reason = "not built in: rmsnorm-core was built without its feature `cpu`".into();
                Err(Error::Unavailable { backend: "cpu", reason })
            }
        }
    }

    /// The device it runs on.
    pub fn device(&self) -> Device {
        match *self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(_) => Device::Cpu,
        }
    }

    /// The CPU backend, if it is that.
    #[cfg(feature = "cpu")]
    pub fn as_cpu(&self) -> Option<&CpuBackend> {
        match self {
            AnyBackend::Cpu(backend) => Some(backend),
        }
    }

    /// Runs a task on the backend, whichever it is.
    #[cfg(feature = "conformance")]
    #[cfg_attr(not(feature = "cpu"), expect(unused_variables, reason = "without a backend there is no value to match"))]
    pub fn dispatch<K: Task>(&self, task: K) -> K::Output {
        match *self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(ref backend) => task.run(backend),
        }
    }
}

impl fmt::Display for AnyBackend {
    #[cfg_attr(not(feature = "cpu"), expect(unused_variables, reason = "without a backend there is no value to match"))]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            #[cfg(feature = "cpu")]
            AnyBackend::Cpu(ref backend) => write!(f, "{backend}"),
        }
    }
}

/// Work that runs on any backend: a closure that is generic over its argument, which Rust has no syntax for.
#[cfg(feature = "conformance")]
pub trait Task {
    /// What the work gives.
    type Output;

    /// Does the work on this backend. The harness moves data there and back.
    fn run<H: Harness>(self, harness: &H) -> Self::Output;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_name_is_read_back() {
        assert_eq!(Device::Cpu.to_string().parse::<Device>().unwrap(), Device::Cpu);
    }

    #[test]
    fn device_unknown_name_lists_the_names() {
        let message = "tpu".parse::<Device>().unwrap_err().to_string();
        assert_eq!(message, r#"unsupported: a backend is one of cpu, cuda and wgpu, got "tpu""#);
    }

    #[test]
    fn device_not_built_in_says_so() {
        let message = "cuda".parse::<Device>().unwrap_err().to_string();
        assert_eq!(message, "the cuda backend is not available: not built in: this build has no cuda backend (yet)");
    }

    #[test]
    fn available_has_every_backend_once_and_tells_the_truth() {
        let list = available();
        assert_eq!(list.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["cpu", "cuda", "wgpu"]);
        for device in list {
            let opened = device.name.parse().and_then(AnyBackend::open);
            assert_eq!(opened.map(|backend| backend.to_string()).ok(), device.status.ok(), "{}", device.name);
        }
    }
}
