//! Tensors in memory that another library owns.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, sys};
use rmsnorm_spec::{AnyElement, Error};

use crate::backend::CudaBackend;
use crate::error::device_error;

/// Device memory that another library owns (a tensor of PyTorch, JAX or burn, a DLPack capsule),
/// borrowed for `'a`.
///
/// Dropping it frees nothing. In a context with cudarc's events on, each slice has two events, and
/// dropping it may make the stream wait for them: keep the stream alive until then, and capture
/// nothing meanwhile. For a range use [`CudaView::slice`] on [`as_view`](Self::as_view).
///
/// # Example
/// ```no_run
/// # use rmsnorm_cuda::{BorrowedSlice, CudaBackend, Forward, cudarc::driver::sys::{CUdeviceptr, CUstream}};
/// # use rmsnorm_cuda::spec::{Error, NormBackend, NormSpec, bf16};
/// # struct Tensor { address: CUdeviceptr, len: usize }
/// # fn norm(backend: &CudaBackend, their_stream: CUstream, their_x: Tensor, their_y: Tensor) -> Result<(), Error> {
/// // SAFETY:
/// // - stream: of the backend's context, and alive until this function returns;
/// // - memory: theirs, initialized, alive until this function returns, used on their stream only; only we use y.
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

impl<T: AnyElement> BorrowedSlice<'_, T> {
    /// `len` elements of `T` at `address`, to be used on the backend's stream.
    ///
    /// # Safety
    /// - Memory: `len` elements of `T` lie at `address`, in the backend's context, and stay there
    ///   for `'a`, and until all work that was enqueued with them is done. With `len` 0 any address
    ///   is valid.
    /// - Order: the caller orders every other read or write of the elements, on another stream or
    ///   the host, with the backend's stream; cudarc's events do not cover the owner's uses.
    /// - Contents: elements are written before a call reads them.
    /// - Sharing: memory that a call writes has one `BorrowedSlice` at a time. Memory that is only
    ///   read may have many.
    ///
    /// # Errors
    /// `InvalidArgument` if `address` is not a multiple of the element size; `Device` if the
    /// context is lost.
    pub unsafe fn new(backend: &CudaBackend, address: sys::CUdeviceptr, len: usize) -> Result<Self, Error> {
        if len > 0 && !address.is_multiple_of(size_of::<T>() as u64) {
            let storage = T::STORAGE;
            let rule = format!("a {storage} tensor must begin at a multiple of its element size, got {address:#x}");
            return Err(Error::InvalidArgument { arg: "address", rule });
        }
        // cudarc panics if it cannot create its events, so a lost context is reported here.
        backend.stream().context().bind_to_thread().map_err(device_error("before memory is borrowed"))?;
        // SAFETY:
        // - memory: the caller's promise;
        // - ownership: none is taken: `drop` leaks the slice, so the slice never frees the address.
        let slice = unsafe { backend.stream().upgrade_device_ptr(address, len) };
        Ok(BorrowedSlice { slice: ManuallyDrop::new(slice), owner: PhantomData })
    }

    /// All elements, for reading.
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// All elements, for writing.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }
}

impl<T> Drop for BorrowedSlice<'_, T> {
    fn drop(&mut self) {
        // SAFETY:
        // - taken once, here, and not used after.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Releases the stream and the events, but not the memory, which belongs to its owner.
        let _ = slice.leak();
    }
}
