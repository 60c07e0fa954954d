//! All-reduce sums, in an order that NCCL chooses.

use cudarc::driver::{CudaView, CudaViewMut};
use cudarc::nccl::sys::ncclDataType_t;
use rmsnorm_dist::check_len;
use rmsnorm_spec::{DType, Element, Error};

use super::comm::NcclComm;

impl NcclComm {
    /// Writes the sum of `from` over all ranks to `to`, in an order that NCCL chooses.
    ///
    /// The order depends on the length, the position of an element, the machine and NCCL's version.
    /// NCCL may round to the type after each rank. Every rank gets the same bits; another run, or
    /// another number of rows, may give other bits.
    ///
    /// # Errors
    /// `Length` if `to` is not as long as `from`, and `InvalidArgument` if one is in another
    /// context, before anything is sent; `Device` if NCCL fails.
    pub fn all_reduce_sum<T: Element>(&self, from: CudaView<'_, T>, to: CudaViewMut<'_, T>) -> Result<(), Error> {
        let len = from.len();
        check_len("to", len, to.len())?;
        let (from, to) = (self.read("from", from)?, self.write("to", to)?);
        self.begin()?;
        self.sum::<T>(from.address, to.address, len)
    }

    /// [`all_reduce_sum`](Self::all_reduce_sum) in place: replaces this rank's `tensor` with the
    /// sum.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum), except `Length`.
    pub fn all_reduce_sum_in_place<T: Element>(&self, tensor: CudaViewMut<'_, T>) -> Result<(), Error> {
        let len = tensor.len();
        let tensor = self.write("tensor", tensor)?;
        self.begin()?;
        self.sum::<T>(tensor.address, tensor.address, len)
    }

    /// Sums tensors of `len` elements, which the caller keeps in use until this returns.
    fn sum<T: Element>(&self, from: u64, to: u64, len: usize) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY:
        // - stream: of the communicator's device, whose context is current;
        // - memory: `len` elements of that type at each address, used in the order of the stream.
        unsafe { self.handle.all_reduce_sum(from, to, len, dtype::<T>(), self.stream.cu_stream().cast()) }?;
        Ok(())
    }
}

/// NCCL's name of the type.
const fn dtype<T: Element>() -> ncclDataType_t {
    match T::DTYPE {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
    }
}
