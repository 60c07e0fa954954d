//! Reasons why a device has no plan for a valid call.

use rmsnorm_spec::Error;

/// A rule of the device or of WGSL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    /// Spin locks need forward progress of other threads.
    #[error(
        "the wgpu backend supports GradReduction::Partials and Atomics, got Locks {{ groups: {groups} }}: WGSL does not \
         guarantee progress to a thread that holds a lock"
    )]
    Locks { groups: u32 },
    #[error(
        "the columnwise copy reads blocks of {rows} rows, which must fit a storage buffer binding, but this device can bind \
         {most} rows: call without codes_columnwise, or request a larger max_storage_buffer_binding_size"
    )]
    Columnwise { rows: u64, most: u64 },
    #[error("a row must fit a storage buffer binding of this device: at most {most} bytes, got {bytes}")]
    Row { bytes: u64, most: u64 },
    /// In addition to the row sums.
    #[error(
        "the workspace must fit a storage buffer binding of this device: at most {most} bytes, one row of partial sums takes \
         {bytes}"
    )]
    Workspace { bytes: u64, most: u64 },
    #[error(
        "a sum over {rows} rows may chain at most {most} additions, but the partial sums that fit a storage buffer binding of \
         this device need {additions}: pass fewer rows, or request a larger max_storage_buffer_binding_size"
    )]
    Partials { rows: u64, additions: u64, most: u64 },
    /// The product of the two dimensions.
    #[error("a dispatch of this device has at most {most} workgroups, got {groups}")]
    Grid { groups: u64, most: u64 },
    #[error(
        "kernels need workgroups of 64 threads and 4096 bytes, the device has {threads} threads and {workgroup_bytes} bytes"
    )]
    Device { threads: u32, workgroup_bytes: u32 },
}

impl From<PlanError> for Error {
    fn from(unfit: PlanError) -> Self {
        Error::Unsupported { rule: unfit.to_string() }
    }
}
