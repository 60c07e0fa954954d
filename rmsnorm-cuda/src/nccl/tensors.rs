//! Converts views to addresses, and keeps cudarc's guards of the views.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice, SyncOnDrop, sys};
use rmsnorm_spec::Error;

use super::comm::NcclComm;
use crate::backend::place;

/// A tensor of a call. cudarc treats it as in use until this is dropped, after the call was
/// enqueued; later work on other streams then waits for the communicator's stream.
pub(super) struct Tensor<'a> {
    pub(super) address: sys::CUdeviceptr,
    _in_use: SyncOnDrop<'a>,
}

impl NcclComm {
    /// A tensor to read, in the order of the communicator's stream.
    pub(super) fn read<'a, T>(&'a self, arg: &'static str, view: CudaView<'a, T>) -> Result<Tensor<'a>, Error> {
        self.check_context(arg, view.stream())?;
        let (address, in_use) = view.view_ptr(&self.stream);
        Ok(Tensor { address, _in_use: in_use })
    }

    /// A tensor to write, which may also be read first.
    pub(super) fn write<'a, T>(&'a self, arg: &'static str, view: CudaViewMut<'a, T>) -> Result<Tensor<'a>, Error> {
        self.check_context(arg, view.stream())?;
        let (address, in_use) = view.view_ptr_mut(&self.stream);
        Ok(Tensor { address, _in_use: in_use })
    }

    fn check_context(&self, arg: &'static str, theirs: &CudaStream) -> Result<(), Error> {
        let (theirs, ours) = (theirs.context(), self.stream.context());
        if theirs == ours {
            return Ok(());
        }
        let (theirs, ours) = (place(theirs), place(ours));
        let rule = format!("tensors must be in the context of the communicator's stream, {ours}, got one in {theirs}");
        Err(Error::InvalidArgument { arg, rule })
    }
}
