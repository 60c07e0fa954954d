//! [`NcclId`]: the identifier that the ranks of a new communicator share.

use std::ffi::c_char;

use cudarc::nccl::sys::ncclUniqueId;
use rmsnorm_spec::Error;

use super::failure::NcclFailure;
use crate::library::nccl::{Nccl, SUCCESS};

/// The identifier of a new communicator. One rank creates it with
/// [`NcclComm::unique_id`](crate::NcclComm::unique_id) and sends its bytes to the other ranks, for
/// example through a file, a socket or MPI. It is valid for one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NcclId([u8; NcclId::BYTES]);

const _: () = assert!(size_of::<ncclUniqueId>() == NcclId::BYTES);

impl NcclId {
    /// Bytes of an identifier.
    pub const BYTES: usize = 128;

    /// The bytes, for sending.
    pub const fn as_bytes(&self) -> &[u8; NcclId::BYTES] {
        &self.0
    }

    /// An identifier from received bytes.
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
