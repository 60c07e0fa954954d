//! What the suite needs from a backend beyond [`NormBackend`]: a way to move test data, and the backend's claims.

use std::ops::Range;

use super::Arithmetic;
use crate::{Element, Error, NormBackend};

/// A backend under test. Implement it in a few lines, then call the `conformance!` macro (named tests) or
/// [`run`](super::run) (a whole profile with a report).
pub trait Harness {
    /// The backend.
    type Backend: NormBackend;
    /// A tensor the harness owns: `Vec<T>`, `CudaSlice<T>`, a `wgpu::Buffer`.
    type Buffer<T: Element>;

    /// The backend under test.
    fn backend(&self) -> &Self::Backend;

    /// What the backend claims about its arithmetic. Read once, before the first case.
    fn arithmetic(&self) -> Arithmetic;

    /// What the device is, in words, for the report: name, driver, instruction set, threads.
    fn device(&self) -> String;

    /// Row lengths at which the backend's plan changes. The suite tests each with its two neighbours.
    fn cols_breakpoints(&self) -> Vec<usize>;

    /// Row counts at which the backend's plan changes. The suite tests each with its two neighbours.
    fn rows_breakpoints(&self) -> Vec<usize>;

    /// A buffer with these elements.
    ///
    /// # Errors
    /// If the device has no room or fails.
    fn upload<T: Element>(&self, data: &[T]) -> Result<Self::Buffer<T>, Error>;

    /// The elements of a buffer, after all enqueued work is done.
    ///
    /// # Errors
    /// If the device fails.
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, Error>;

    /// A read-only view of a range of elements.
    fn view<'a, T: Element>(
        &self,
        buffer: &'a Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::In<'a, T>;

    /// A written view of a range of elements.
    fn view_mut<'a, T: Element>(
        &self,
        buffer: &'a mut Self::Buffer<T>,
        range: Range<usize>,
    ) -> <Self::Backend as NormBackend>::Out<'a, T>;
}
