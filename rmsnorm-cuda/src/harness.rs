//! Access of the conformance suite to this backend.

use std::ops::Range;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DriverError};
use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_spec::depth::{policy_depth_rows, sum_depth};
use rmsnorm_spec::{AnyElement, DType, Error, Problem};

use crate::error::device_error;
use crate::{CudaBackend, launch, plan};

impl Harness for CudaBackend {
    type Backend = CudaBackend;
    type Buffer<T: AnyElement> = CudaSlice<T>;

    fn backend(&self) -> &CudaBackend {
        self
    }

    /// The reciprocal root is the device's estimate plus one Newton step, within 2 u, the error of
    /// a root and a division (math.md, section 8). Averages are products with a rounded `1 / cols`.
    /// Subnormals are kept.
    fn arithmetic(&self) -> Arithmetic {
        let exp_error = |z| (5.0 + 1.25 * z) * Arithmetic::IEEE.unit_roundoff;
        Arithmetic { exp_error, depth_cols: sum_depth, depth_rows: policy_depth_rows, ..Arithmetic::IEEE }
    }

    fn device(&self) -> String {
        self.to_string()
    }

    fn tuning(&self) -> String {
        CudaBackend::tuning(self)
    }

    fn plan(&self, problem: &Problem) -> String {
        plan::plan(problem, launch::dense_access_bytes(problem), self.kernels().caps()).to_string()
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        self.kernels().caps().tuning.cols_breakpoints()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)> {
        plan::unsplit_from(dtype, self.kernels().caps()).into_iter().collect()
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<CudaSlice<T>, Error> {
        self.upload_parts(data.len(), &[(0, data)])
    }

    fn upload_parts<T: AnyElement>(&self, len: usize, parts: &[(usize, &[T])]) -> Result<CudaSlice<T>, Error> {
        upload(self, len, parts).map_err(device_error("upload"))
    }

    fn download<T: AnyElement>(&self, buffer: &CudaSlice<T>) -> Result<Vec<T>, Error> {
        self.download_part(buffer, 0..buffer.len())
    }

    fn download_part<T: AnyElement>(&self, buffer: &CudaSlice<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        download(self, buffer, range).map_err(device_error("download"))
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a CudaSlice<T>, range: Range<usize>) -> CudaView<'a, T> {
        buffer.slice(range)
    }

    fn view_mut<'a, T: AnyElement>(&self, buffer: &'a mut CudaSlice<T>, range: Range<usize>) -> CudaViewMut<'a, T> {
        buffer.slice_mut(range)
    }
}

/// Copies bytes: cudarc's copies need a trait that [`AnyElement`] does not imply.
fn upload<T: AnyElement>(
    backend: &CudaBackend,
    len: usize,
    parts: &[(usize, &[T])],
) -> Result<CudaSlice<T>, DriverError> {
    let stream = backend.stream();
    // A device cannot allocate 0 bytes.
    // SAFETY:
    // - contents: the copies below set the parts; the bytes between them may hold anything, because
    //   every bit pattern is valid for bytes and for elements.
    let mut buffer = unsafe { stream.alloc::<u8>((len * size_of::<T>()).max(1)) }?;
    for (first, part) in parts.iter().filter(|(_, part)| !part.is_empty()) {
        let bytes = bytemuck::cast_slice::<T, u8>(part);
        let first = first * size_of::<T>();
        stream.memcpy_htod(bytes, &mut buffer.slice_mut(first..first + bytes.len()))?;
    }
    // The parts must be copied before they go out of scope, and the new slice has no events that
    // would make other streams wait.
    stream.synchronize()?;
    // SAFETY:
    // - address: an allocation of this stream, given up by `leak`; the new slice frees it;
    // - length: the bytes of `len` elements;
    // - alignment: allocations are aligned to 256 bytes;
    // - contents: any bytes are valid elements.
    Ok(unsafe { stream.upgrade_device_ptr(buffer.leak(), len) })
}

fn download<T: AnyElement>(
    backend: &CudaBackend,
    buffer: &CudaSlice<T>,
    range: Range<usize>,
) -> Result<Vec<T>, DriverError> {
    let stream = backend.stream();
    let mut data = vec![T::from_bits(0); range.len()];
    // SAFETY:
    // - contents: bytes may have any value.
    if let Some(bytes) = unsafe { buffer.transmute::<u8>(buffer.num_bytes()) }.filter(|_| !range.is_empty()) {
        let part = bytes.slice(range.start * size_of::<T>()..range.end * size_of::<T>());
        stream.memcpy_dtoh(&part, bytemuck::cast_slice_mut::<T, u8>(&mut data))?;
    }
    stream.synchronize()?;
    Ok(data)
}
