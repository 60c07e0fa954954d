//! The properties of a device that plans depend on, read once per backend.

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, DriverError};
use std::fmt;

use crate::plan::Tuning;

/// The architecture that kernels are compiled for: 90 is sm_90.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Arch(pub(crate) u32);

impl Arch {
    /// The first architecture with clusters, and with programmatic dependent launch.
    pub(crate) const HOPPER: Arch = Arch(90);

    /// The architecture of a compute capability (major, minor).
    const fn of((major, minor): (i32, i32)) -> Self {
        Arch(major.unsigned_abs() * 10 + minor.unsigned_abs())
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

/// The inputs of a plan besides the problem and the alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    pub(crate) arch: Arch,
    /// Streaming multiprocessors.
    pub(crate) sms: u32,
    /// Bytes of shared memory that one block can have at most.
    pub(crate) shared_per_block_optin: u32,
    /// Bytes of shared memory of one multiprocessor, shared by its blocks.
    pub(crate) shared_per_sm: u32,
    /// Resident threads of one multiprocessor.
    pub(crate) threads_per_sm: u32,
    /// The largest cluster size that every device of the architecture supports; 1 without clusters.
    pub(crate) max_cluster: u32,
    /// Whether the blocks of a launch may wait for each other (cooperative launch).
    pub(crate) cooperates: bool,
    /// The tuning table: the built-in one, or one that was measured on this device.
    pub(crate) tuning: &'static Tuning,
}

impl Caps {
    pub(crate) fn read(context: &CudaContext) -> Result<Self, DriverError> {
        let read = |attribute| context.attribute(attribute).map(i32::unsigned_abs);
        let arch = Arch::of(context.compute_capability()?);
        let has_clusters = arch >= Arch::HOPPER && read(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)? != 0;
        Ok(Caps {
            arch,
            sms: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block_optin: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
            threads_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            max_cluster: if has_clusters { 8 } else { 1 },
            cooperates: read(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
            tuning: Tuning::H200,
        })
    }
}

/// Properties of GPUs that need not be present.
impl Caps {
    pub(crate) const fn h200() -> Self {
        Caps {
            arch: Arch(90),
            sms: 132,
            shared_per_block_optin: 227 << 10,
            shared_per_sm: 228 << 10,
            threads_per_sm: 2048,
            max_cluster: 8,
            cooperates: true,
            tuning: Tuning::H200,
        }
    }

    pub(crate) const fn a100() -> Self {
        Caps {
            arch: Arch(80),
            sms: 108,
            shared_per_block_optin: 163 << 10,
            shared_per_sm: 164 << 10,
            max_cluster: 1,
            ..Caps::h200()
        }
    }

    pub(crate) const fn t4() -> Self {
        Caps {
            arch: Arch(75),
            sms: 40,
            shared_per_block_optin: 64 << 10,
            shared_per_sm: 64 << 10,
            threads_per_sm: 1024,
            ..Caps::a100()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_their_names() {
        let names = [(7, 5), (8, 6), (9, 0), (12, 1)].map(|capability| Arch::of(capability).to_string());
        assert_eq!(names, ["sm_75", "sm_86", "sm_90", "sm_121"]);
        assert!(
            Arch::of((8, 9)) < Arch::HOPPER && Arch::of((9, 0)) == Arch::HOPPER && Arch::HOPPER < Arch::of((10, 0))
        );
    }
}
