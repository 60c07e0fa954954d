//! The interface to a backend under test, in addition to [`NormBackend`]: it copies test data and
//! states the backend's arithmetic.

use std::ops::Range;

use rmsnorm_spec::{AnyElement, DType, Error, NormBackend, Problem};

use crate::Arithmetic;
use crate::finding::{Check, Finding, Status};

/// The error of a failed copy of test data.
#[derive(Debug)]
pub enum TransferError {
    /// The copy to the device failed. The call was not made, and the case says nothing about the
    /// backend.
    Upload(Error),
    /// The copy from the device failed, so the call broke something: a GPU reports an invalid write
    /// this way.
    Download(Error),
}

impl TransferError {
    /// The status of a case in which this error happened to the call `call`.
    pub(crate) fn status(self, call: &'static str) -> Status {
        match self {
            TransferError::Upload(error) => Status::Skipped(error.to_string()),
            TransferError::Download(error) => {
                let detail = format!("the tensors cannot be read back after the call: {error}");
                Status::Fail(Finding { check: Check::Error, output: call, detail })
            }
        }
    }
}

/// The answer of a call; the outer error is a failed copy of test data.
pub type Answer = Result<Result<(), Error>, TransferError>;

/// A backend under test. Implement it, then call the `conformance!` macro (named tests) or
/// [`run`](crate::run) (a whole profile with a report). Several threads use it at once.
pub trait Harness: Sync {
    /// The backend.
    type Backend: NormBackend;
    /// A tensor that the harness owns: `Vec<T>`, `CudaSlice<T>`, a `wgpu::Buffer`.
    type Buffer<T: AnyElement>;

    /// The backend under test.
    fn backend(&self) -> &Self::Backend;

    /// The properties of the backend's arithmetic. Read once, before the first case.
    fn arithmetic(&self) -> Arithmetic;

    /// A description of the device for the report: name, driver, instruction set, threads.
    fn device(&self) -> String;

    /// Whether the device is so slow (minutes instead of seconds) that its named tests run only one
    /// in sixteen of their cases ([`swept`](crate::testing::swept)).
    fn is_slow(&self) -> bool {
        false
    }

    /// The tuning table of the backend's plans, for the report. Empty without a table.
    fn tuning(&self) -> String {
        String::new()
    }

    /// One line about the kernels that a call runs with dense and aligned tensors, for the report.
    /// Empty if there is nothing to say.
    fn plan(&self, _problem: &Problem) -> String {
        String::new()
    }

    /// Row lengths (columns) at which the backend's plan changes. Beyond smoke, the suite tests each with
    /// its two neighbours.
    fn cols_breakpoints(&self) -> Vec<usize>;

    /// Row counts at which the backend's plan changes, tested likewise.
    fn rows_breakpoints(&self) -> Vec<usize>;

    /// Shapes (rows, cols) at which the backend's plan changes because of rows and columns
    /// together: where a matrix outgrows a cache, or a sum over rows is split. The suite tests each
    /// shape, and the shape with one row less.
    fn shape_breakpoints(&self, _dtype: DType) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Copies `data` to a new buffer on the device.
    ///
    /// # Errors
    /// If the device has too little memory or fails.
    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<Self::Buffer<T>, Error>;

    /// Copies a buffer to the host, after all enqueued work is done.
    ///
    /// # Errors
    /// If the device fails.
    fn download<T: AnyElement>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, Error>;

    /// A buffer of `len` elements in which only `parts` are set; the rest may hold anything. A part
    /// is the index of its first element, and its elements. Parts are in ascending order and at
    /// least 4 bytes apart. The suite calls this for rows that lie billions of elements apart; a
    /// backend that can leave the rest uninitialized saves host memory.
    ///
    /// # Errors
    /// If the host or the device has too little memory.
    fn upload_parts<T: AnyElement>(&self, len: usize, parts: &[(usize, &[T])]) -> Result<Self::Buffer<T>, Error> {
        let mut all: Vec<T> = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| no_room::<T>(len))?;
        for (first, part) in parts {
            all[*first..first + part.len()].copy_from_slice(part);
        }
        self.upload(&all)
    }

    /// Copies a range of a buffer's elements to the host, after all enqueued work is done.
    ///
    /// # Errors
    /// If the device fails.
    fn download_part<T: AnyElement>(&self, buffer: &Self::Buffer<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        Ok(self.download(buffer)?[range].to_vec())
    }

    /// As [`download_part`](Self::download_part), for the runner, which awaits it. A program in a
    /// browser cannot wait, so a backend for browsers overrides this method.
    ///
    /// # Errors
    /// As [`download_part`](Self::download_part).
    fn fetch_part<T: AnyElement>(
        &self,
        buffer: &Self::Buffer<T>,
        range: Range<usize>,
    ) -> impl Future<Output = Result<Vec<T>, Error>> {
        std::future::ready(self.download_part(buffer, range))
    }

    /// Does `work` with the device, and awaits the device's errors. For a device that reports them
    /// after the call that caused them, as browsers do; others report errors in `work`.
    ///
    /// # Errors
    /// Errors of `work`, and of the device.
    fn caught<O>(&self, work: impl FnOnce() -> Result<O, Error>) -> impl Future<Output = Result<O, Error>> {
        std::future::ready(work())
    }

    /// A read-only view of a range of elements.
    fn view<'a, T: AnyElement>(
        &self,
        buffer: &'a Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::In<'a, T>;

    /// A writable view of a range of elements.
    fn view_mut<'a, T: AnyElement>(
        &self,
        buffer: &'a mut Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::Out<'a, T>;
}

/// The error if the host cannot allocate `len` elements.
fn no_room<T>(len: usize) -> Error {
    let source = format!("cannot allocate {} bytes of host memory", len.saturating_mul(size_of::<T>())).into();
    Error::Device { backend: "host", source }
}
