//! [`NcclId`]: what the ranks of one communicator agree on first.

use std::ffi::c_char;

use cudarc::nccl::sys::ncclUniqueId;
use rmsnorm_spec::Error;

use super::failure::NcclFailure;
use crate::library::nccl::{Nccl, SUCCESS};

/// What the ranks of a communicator have in common before they know each other. One of them makes it, by
/// [`NcclComm::unique_id`](crate::NcclComm::unique_id), and sends its bytes to the others by whatever means the program has: a file, a
/// socket, MPI. It serves for one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NcclId([u8; NcclId::BYTES]);

const _: () = assert!(size_of::<ncclUniqueId>() == NcclId::BYTES);

impl NcclId {
    /// Bytes of one.
    pub const BYTES: usize = 128;

    /// The bytes, to be sent.
    pub const fn as_bytes(&self) -> &[u8; NcclId::BYTES] {
        &self.0
    }

    /// From bytes that were sent.
    pub const fn from_bytes(bytes: [u8; NcclId::BYTES]) -> Self {
        NcclId(bytes)
    }

    pub(super) fn new(nccl: &Nccl) -> Result<Self, Error> {
        let mut id = ncclUniqueId { internal: [0; NcclId::BYTES] };
        // SAFETY:
        // - pointer: to a local of the type that the call writes.
        let status = unsafe { (nccl.functions.unique_id)(&raw mut id) };
        if status != SUCCESS {
            return Err(NcclFailure::new(nccl, "ncclGetUniqueId", status).into());
        }
        Ok(NcclId(id.internal.map(|byte| byte as u8)))
    }

    pub(super) fn to_raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as c_char) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_kept_on_every_way() {
        let bytes = std::array::from_fn(|index| (index * 5) as u8);
        let id = NcclId::from_bytes(bytes);
        assert_eq!(id.as_bytes(), &bytes);
        assert_eq!(id.to_raw().internal.map(|byte| byte as u8), bytes);
    }
}
