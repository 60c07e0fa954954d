//! Why a device has no plan for a valid call.

use rmsnorm_spec::Error;

/// The rule that the device, or WGSL, sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    /// Spin locks need threads that get on.
    #[error(
        "the wgpu backend has GradReduction::Partials and Atomics, got Locks {{ groups: {groups} }}: WGSL does not promise \
         that a thread that holds a lock gets on"
    )]
    Locks { groups: u32 },
    #[error(
        "codes along columns are made of {rows} rows, which must fit a storage buffer binding of this device: {most} do"
    )]
    Columnwise { rows: u64, most: u64 },
    #[error("a row must fit a storage buffer binding of this device: at most {most} bytes, got {bytes}")]
    Row { bytes: u64, most: u64 },
    /// Beside the row sums.
    #[error(
        "the workspace must fit a storage buffer binding of this device: at most {most} bytes, one row of partial sums takes \
         {bytes}"
    )]
    Workspace { bytes: u64, most: u64 },
    #[error(
        "a sum over {rows} rows takes at most {most} additions one after the other; the partial sums that fit a storage \
         buffer binding of this device would take {additions}"
    )]
    Partials { rows: u64, additions: u64, most: u64 },
    /// Two dimensions have no more.
    #[error("a dispatch of this device has at most {most} workgroups, got {groups}")]
    Grid { groups: u64, most: u64 },
    #[error(
        "kernels need workgroups of 64 threads and 4096 bytes, the device has {threads} threads and {workgroup_bytes} bytes"
    )]
    Device { threads: u32, workgroup_bytes: u32 },
}

impl From<Unfit> for Error {
    fn from(unfit: Unfit) -> Self {
        Error::Unsupported { rule: unfit.to_string() }
    }
}
