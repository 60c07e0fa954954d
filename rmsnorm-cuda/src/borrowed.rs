//! Memory of another owner as tensors of calls.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, sys};
use rmsnorm_spec::{Error, Stored};

use crate::backend::CudaBackend;
use crate::error::device_error;

/// Device memory that something else owns (a tensor of PyTorch, JAX or burn, a DLPack capsule), for as long as `'a`.
///
/// Nothing is freed when it is dropped. In a context with cudarc's events on, each has two of them, and dropping it may make the
/// stream wait for them: the stream lives until then, and no capture is under way. [`CudaView::slice`] takes a range of
/// [`as_view`](Self::as_view).
///
/// # Example
/// ```no_run
/// # use rmsnorm_cuda::{BorrowedSlice, CudaBackend, Forward, cudarc::driver::sys::{CUdeviceptr, CUstream}};
/// # use rmsnorm_cuda::spec::{Error, NormBackend, NormSpec, bf16};
/// # struct Tensor { address: CUdeviceptr, len: usize }
/// # fn norm(backend: &CudaBackend, their_stream: CUstream, their_x: Tensor, their_y: Tensor) -> Result<(), Error> {
/// // SAFETY:
/// // - stream: of the backend's context, and alive until this function returns;
/// // - memory: theirs, initialized, alive until this function returns, used on their stream only, y by nobody else.
/// let (backend, x, mut y) = unsafe {
///     let backend = backend.on_raw(their_stream);
///     let x = BorrowedSlice::<bf16>::new(&backend, their_x.address, their_x.len)?;
///     let y = BorrowedSlice::<bf16>::new(&backend, their_y.address, their_y.len)?;
///     (backend, x, y)
/// };
/// let norm = NormSpec::rms(their_x.len / 4096, 4096, 1e-6);
/// backend.forward(&norm, Forward::new(x.as_view(), y.as_view_mut()))
/// # }
/// ```
#[derive(Debug)]
pub struct BorrowedSlice<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    owner: PhantomData<&'a mut [T]>,
}

impl<T: Stored> BorrowedSlice<'_, T> {
    /// `len` elements from that address, to be used on the backend's stream.
    ///
    /// # Safety
    /// - Memory: `len` elements of `T` lie at `address`, in the backend's context, and stay there for `'a`, and until the
    ///   work that was enqueued with them is done. With no element the address does not matter.
    /// - Order: whatever else reads or writes them, on another stream or the host, is ordered with the backend's stream by
    ///   the caller; cudarc's events know nothing of the memory's owner.
    /// - Contents: elements are written before a call reads them.
    /// - Sharing: of memory that some call writes there is one `BorrowedSlice` at a time. Memory that is only read may have
    ///   many.
    ///
    /// # Errors
    /// `InvalidArgument` if the address is no multiple of the element's size; `Device` if the context is lost.
    pub unsafe fn new(backend: &CudaBackend, address: sys::CUdeviceptr, len: usize) -> Result<Self, Error> {
        if len > 0 && !address.is_multiple_of(size_of::<T>() as u64) {
            let rule = format!("a {} tensor begins at a multiple of its element's size, got {address:#x}", T::STORAGE);
            return Err(Error::InvalidArgument { arg: "address", rule });
        }
        // cudarc panics where it cannot make its events.
        backend.stream().context().bind_to_thread().map_err(device_error("before memory is borrowed"))?;
        // SAFETY:
        // - memory: the caller's promise;
        // - ownership: none is taken, for `drop` lets go of the address before the slice would free it.
        let slice = unsafe { backend.stream().upgrade_device_ptr(address, len) };
        Ok(BorrowedSlice { slice: ManuallyDrop::new(slice), owner: PhantomData })
    }

    /// All of it, to be read.
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// All of it, to be written.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }
}

impl<T> Drop for BorrowedSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY:
        // - taken once, here, and not used after.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Lets go of the stream and the events; the memory is not ours to free.
        let _ = slice.leak();
    }
}
