//! What the suite needs from a backend beyond [`NormBackend`]: a way to move test data, and the backend's claims.

use std::ops::Range;

use rmsnorm_spec::{DType, Error, NormBackend, Problem, Stored};

use crate::Arithmetic;

/// A backend under test. Implement it in a few lines, then call the `conformance!` macro (named tests) or
/// [`run`](crate::run) (a whole profile with a report). Several threads use it at once.
pub trait Harness: Sync {
    /// The backend.
    type Backend: NormBackend;
    /// A tensor the harness owns: `Vec<T>`, `CudaSlice<T>`, a `wgpu::Buffer`.
    type Buffer<T: Stored>;

    /// The backend under test.
    fn backend(&self) -> &Self::Backend;

    /// What the backend claims about its arithmetic. Read once, before the first case.
    fn arithmetic(&self) -> Arithmetic;

    /// What the device is, in words, for the report: name, driver, instruction set, threads.
    fn device(&self) -> String;

    /// Whether the device takes minutes for what others do in seconds: its named tests then go through one in sixteen of their cases
    /// ([`swept`](crate::testing::swept)).
    fn is_slow(&self) -> bool {
        false
    }

    /// Which table of tiles plans are made by, in words, for the report. Empty where there is none.
    fn tuning(&self) -> String {
        String::new()
    }

    /// What a call runs, in a line, where its tensors are dense and aligned: what a reader of a report wants to know. Empty where there is nothing to say.
    fn plan(&self, _problem: &Problem) -> String {
        String::new()
    }

    /// Row lengths at which the backend's plan changes. The suite tests each with its two neighbours.
    fn cols_breakpoints(&self) -> Vec<usize>;

    /// Row counts at which the backend's plan changes. The suite tests each with its two neighbours.
    fn rows_breakpoints(&self) -> Vec<usize>;

    /// Shapes, as (rows, cols), at which the backend's plan changes in neither direction alone: where a matrix outgrows a
    /// cache, or a sum over rows is split. The suite tests each, and one row less.
    fn shape_breakpoints(&self, _dtype: DType) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// A buffer with these elements.
    ///
    /// # Errors
    /// If the device has no room or fails.
    fn upload<T: Stored>(&self, data: &[T]) -> Result<Self::Buffer<T>, Error>;

    /// The elements of a buffer, after all enqueued work is done.
    ///
    /// # Errors
    /// If the device fails.
    fn download<T: Stored>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, Error>;

    /// A buffer of `len` elements of which these parts are set, each from its first element on; the rest may hold
    /// anything. Parts are in ascending order and at least 4 bytes apart. For rows billions of elements apart: a backend
    /// that can leave the rest unset saves its memory for it.
    ///
    /// # Errors
    /// If the host or the device has no room.
    fn upload_parts<T: Stored>(&self, len: usize, parts: &[(usize, &[T])]) -> Result<Self::Buffer<T>, Error> {
        let mut all: Vec<T> = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| no_room::<T>(len))?;
        for (first, part) in parts {
            all[*first..first + part.len()].copy_from_slice(part);
        }
        self.upload(&all)
    }

    /// Some elements of a buffer, after all enqueued work is done.
    ///
    /// # Errors
    /// If the device fails.
    fn download_part<T: Stored>(&self, buffer: &Self::Buffer<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        Ok(self.download(buffer)?[range].to_vec())
    }

    /// A read-only view of a range of elements.
    fn view<'a, T: Stored>(
        &self,
        buffer: &'a Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::In<'a, T>;

    /// A written view of a range of elements.
    fn view_mut<'a, T: Stored>(
        &self,
        buffer: &'a mut Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::Out<'a, T>;
}

/// The error of a host that cannot give memory for so many elements.
fn no_room<T>(len: usize) -> Error {
    let source = format!("{} bytes of memory cannot be had", len.saturating_mul(size_of::<T>())).into();
    Error::Device { backend: "host", source }
}
