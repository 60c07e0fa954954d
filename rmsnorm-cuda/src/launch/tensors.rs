//! Views to addresses, and cudarc's bookkeeping of who uses what.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice, SyncOnDrop, sys};
use rmsnorm_spec::{Error, Rows};

use crate::backend::place;
use crate::params::Matrix;

/// The tensors of a call on their way to addresses. Until this is dropped, after the last step was enqueued, cudarc
/// takes them to be in use; what follows on other streams then waits for the stream.
pub(super) struct Tensors<'a> {
    stream: &'a CudaStream,
    cols: usize,
    uses: [Option<SyncOnDrop<'a>>; Tensors::MOST],
    len: usize,
}

impl<'a> Tensors<'a> {
    /// Backward's count: dy, x, weight, mean, rstd, dresidual_out, dx, dweight, dbias, workspace.
    const MOST: usize = 10;

    pub(super) fn new(stream: &'a CudaStream, cols: usize) -> Self {
        Tensors { stream, cols, uses: [const { None }; Tensors::MOST], len: 0 }
    }

    /// The address of a tensor that is read; 0 if there is none.
    pub(super) fn read<T>(&mut self, name: &'static str, view: Option<CudaView<'a, T>>) -> Result<u64, Error> {
        let Some(view) = view else { return Ok(0) };
        self.check_context(name, view.stream())?;
        Ok(self.hold(view.view_ptr(self.stream)))
    }

    /// The address of a tensor that is written; 0 if there is none.
    pub(super) fn write<T>(&mut self, name: &'static str, view: Option<CudaViewMut<'a, T>>) -> Result<u64, Error> {
        let Some(view) = view else { return Ok(0) };
        self.check_context(name, view.stream())?;
        Ok(self.hold(view.view_ptr_mut(self.stream)))
    }

    pub(super) fn read_rows<T>(
        &mut self,
        name: &'static str,
        rows: Option<Rows<CudaView<'a, T>>>,
    ) -> Result<Matrix, Error> {
        let Some(rows) = rows else { return Ok(Matrix::default()) };
        let row_stride = rows.stride(self.cols) as u64;
        Ok(Matrix { data: self.read(name, Some(rows.view))?, row_stride })
    }

    pub(super) fn write_rows<T>(
        &mut self,
        name: &'static str,
        rows: Option<Rows<CudaViewMut<'a, T>>>,
    ) -> Result<Matrix, Error> {
        let Some(rows) = rows else { return Ok(Matrix::default()) };
        let row_stride = rows.stride(self.cols) as u64;
        Ok(Matrix { data: self.write(name, Some(rows.view))?, row_stride })
    }

    fn hold(&mut self, (address, in_use): (sys::CUdeviceptr, SyncOnDrop<'a>)) -> u64 {
        debug_assert!(self.len < Tensors::MOST, "a use would end before it began: raise Tensors::MOST");
        if let Some(slot) = self.uses.get_mut(self.len) {
            *slot = Some(in_use);
            self.len += 1;
        }
        address
    }

    fn check_context(&self, name: &'static str, stream: &CudaStream) -> Result<(), Error> {
        let (theirs, ours) = (stream.context(), self.stream.context());
        if theirs == ours {
            return Ok(());
        }
        let rule = format!(
            "tensors lie in the context of the backend's stream, got {name} in {} for a stream of {}",
            place(theirs),
            place(ours)
        );
        Err(Error::Unsupported { rule })
    }
}
