//! [`Collective`] with NCCL: sends and receives of bytes.

use cudarc::driver::{CudaView, CudaViewMut, result};
use rmsnorm_dist::{Collective, RowShares, check_len};
use rmsnorm_spec::{AnyElement, Element, Error};

use super::comm::NcclComm;
use super::exchange;
use super::tensors::Tensor;
use crate::CudaBackend;
use crate::error::device_error;

/// Calls are enqueued on the communicator's stream; for the order of tensors see [`NcclComm`].
impl Collective<CudaBackend> for NcclComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_to_all<T: AnyElement>(
        &self,
        shares: &RowShares,
        from: CudaView<'_, T>,
        to: CudaViewMut<'_, T>,
    ) -> Result<(), Error> {
        self.check_shares(shares)?;
        let own = shares.elements(self.rank);
        check_len("from", shares.len(), from.len())?;
        check_len("to", own.len().saturating_mul(self.ranks), to.len())?;
        let (from, to) = (self.read("from", from)?, self.write("to", to)?);
        self.begin()?;
        let size = size_of::<T>();
        let own = exchange::bytes(own, size);
        // SAFETY:
        // - memory: the share lies within `from`, which has all shares, and the part within `to`,
        //   which has one part per rank, as was checked.
        unsafe { self.copy(&from, own.start, &to, self.rank * own.len(), own.len()) }?;
        self.exchange(shares, exchange::all_to_all(shares, self.rank, size), &from, &to)
    }

    fn all_gather<T: AnyElement>(
        &self,
        shares: &RowShares,
        from: CudaView<'_, T>,
        to: CudaViewMut<'_, T>,
    ) -> Result<(), Error> {
        self.check_shares(shares)?;
        let own = shares.elements(self.rank);
        check_len("from", own.len(), from.len())?;
        check_len("to", shares.len(), to.len())?;
        let (from, to) = (self.read("from", from)?, self.write("to", to)?);
        self.begin()?;
        let own = exchange::bytes(own, size_of::<T>());
        // SAFETY:
        // - memory: the share is all of `from` and lies within `to`, which has all shares, as was
        //   checked.
        unsafe { self.copy(&from, 0, &to, own.start, own.len()) }?;
        self.gather(shares, size_of::<T>(), &to)
    }

    fn all_gather_in_place<T: AnyElement>(&self, shares: &RowShares, tensor: CudaViewMut<'_, T>) -> Result<(), Error> {
        self.check_shares(shares)?;
        check_len("tensor", shares.len(), tensor.len())?;
        let tensor = self.write("tensor", tensor)?;
        self.begin()?;
        self.gather(shares, size_of::<T>(), &tensor)
    }

    fn all_reduce<T: Element>(&self, from: CudaView<'_, T>, to: CudaViewMut<'_, T>) -> Result<(), Error> {
        self.all_reduce_sum(from, to)
    }

    fn all_reduce_in_place<T: Element>(&self, tensor: CudaViewMut<'_, T>) -> Result<(), Error> {
        self.all_reduce_sum_in_place(tensor)
    }
}

impl NcclComm {
    /// The bytes of every rank, by rank. Waits for all ranks.
    #[cfg(feature = "peers")]
    pub(crate) fn gather_bytes<const N: usize>(&self, own: &[u8; N]) -> Result<Vec<[u8; N]>, Error> {
        let shares = RowShares { units: self.ranks, unit: N, ranks: self.ranks };
        let upload = || {
            let mut all = self.stream.alloc_zeros::<i8>(shares.len())?;
            let mut place = all.slice_mut(shares.elements(self.rank));
            self.stream.memcpy_htod(&own.map(|byte| byte as i8), &mut place)?;
            Ok(all)
        };
        let mut all = upload().map_err(device_error("before ranks exchange bytes"))?;
        self.all_gather_in_place(&shares, all.as_view_mut())?;
        let download = || {
            let all = self.stream.clone_dtoh(&all)?;
            self.stream.synchronize()?;
            Ok(all)
        };
        let all = download().map_err(device_error("download of the ranks' bytes"))?;
        let (parts, _) = all.as_chunks::<N>();
        Ok(parts.iter().map(|part| part.map(|byte| byte as u8)).collect())
    }

    /// Sends this rank's share, and receives the other shares, at their places in the tensor.
    fn gather(&self, shares: &RowShares, size: usize, tensor: &Tensor<'_>) -> Result<(), Error> {
        match exchange::equal(shares, size) {
            Some(len) if self.has_work(shares) => {
                // SAFETY:
                // - stream: of the communicator's device, whose context is current;
                // - memory: a part of `len` bytes for each rank lies from the start of the tensor
                //   on, as was checked, and is used in the order of the stream.
                unsafe {
                    self.handle.all_gather(tensor.address, self.rank * len, len, self.stream.cu_stream().cast())
                }?;
                Ok(())
            }
            Some(_) => Ok(()),
            None => self.exchange(shares, exchange::all_gather(shares, self.rank, size), tensor, tensor),
        }
    }

    /// Copies `len` bytes from one tensor to another, in stream order.
    ///
    /// # Safety
    /// - memory: both ranges lie within their tensors.
    unsafe fn copy(
        &self,
        from: &Tensor<'_>,
        from_byte: usize,
        to: &Tensor<'_>,
        to_byte: usize,
        len: usize,
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        let (from, to) = (from.address + from_byte as u64, to.address + to_byte as u64);
        // SAFETY:
        // - context: current on this thread, and the context of the stream and of both tensors;
        // - memory: by the contract of this function; this copy is done before later work on the
        //   stream;
        // - overlap: a view that is written shares no memory with another.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream.cu_stream()) }
            .map_err(device_error("cuMemcpyDtoDAsync"))
    }

    /// Sends to and receives from the other ranks. The tensors have the lengths that the shares
    /// require.
    fn exchange(
        &self,
        shares: &RowShares,
        exchanges: impl Iterator<Item = exchange::Exchange>,
        from: &Tensor<'_>,
        to: &Tensor<'_>,
    ) -> Result<(), Error> {
        if !self.has_work(shares) {
            return Ok(());
        }
        let others = exchanges.filter(|exchange| exchange.peer.unsigned_abs() as usize != self.rank);
        // SAFETY:
        // - stream: of the communicator's device, whose context is current;
        // - memory: exchanges lie within tensors of these lengths (`exchange`'s tests), and the
        //   tensors are used in the order of the stream.
        unsafe { self.handle.exchange(others, from.address, to.address, self.stream.cu_stream().cast()) }?;
        Ok(())
    }

    /// Whether there are elements to send and other ranks. If so, every rank sends or receives
    /// something.
    fn has_work(&self, shares: &RowShares) -> bool {
        self.ranks > 1 && !shares.is_empty()
    }

    /// Call it after the tensors were turned into addresses, and before anything is enqueued.
    pub(super) fn begin(&self) -> Result<(), Error> {
        // Reports an earlier error that cudarc could not return, for example in its waits for
        // events.
        self.stream.context().bind_to_thread().map_err(device_error("before a collective call"))?;
        Ok(self.handle.check()?)
    }

    fn check_shares(&self, shares: &RowShares) -> Result<(), Error> {
        if shares.ranks == self.ranks {
            return Ok(());
        }
        let rule =
            format!("RowShares::ranks must be {}, the ranks of the communicator, got {}", self.ranks, shares.ranks);
        Err(Error::InvalidArgument { arg: "shares", rule })
    }
}
