//! [`Memory`]: buffers and slices of views, for callers that combine several calls.

use std::ops::Range;

use crate::{AnyElement, Error, NormBackend};

/// A backend whose views can be divided, and that allocates memory for intermediate results.
///
/// These methods do not validate: the caller keeps each range within its view, and a backend panics
/// otherwise, as a slice does.
pub trait Memory: NormBackend {
    /// Memory of the backend. It is freed when the buffer is dropped and no call uses it any more.
    type Buffer<T: AnyElement>;

    /// A buffer of `len` elements with unspecified values.
    ///
    /// # Errors
    /// `Device` if the memory is exhausted.
    fn buffer<T: AnyElement>(&self, len: usize) -> Result<Self::Buffer<T>, Error>;

    /// Elements of a buffer, for reading.
    fn buffer_in<T: AnyElement>(buffer: &Self::Buffer<T>, range: Range<usize>) -> Self::In<'_, T>;

    /// Elements of a buffer, for writing.
    fn buffer_out<T: AnyElement>(buffer: &mut Self::Buffer<T>, range: Range<usize>) -> Self::Out<'_, T>;

    /// Elements of a read-only view.
    fn part_in<'a, T: AnyElement>(view: &'a Self::In<'_, T>, range: Range<usize>) -> Self::In<'a, T>;

    /// Elements of a writable view.
    fn part_out<'a, T: AnyElement>(view: &'a mut Self::Out<'_, T>, range: Range<usize>) -> Self::Out<'a, T>;

    /// A writable view, for reading before or after it is written.
    fn read_out<'a, T: AnyElement>(view: &'a Self::Out<'_, T>) -> Self::In<'a, T>;

    /// Copies all elements; both views have the same length.
    ///
    /// # Errors
    /// `Device` if the device fails.
    fn copy<T: AnyElement>(&self, from: Self::In<'_, T>, to: Self::Out<'_, T>) -> Result<(), Error>;
}

/// A backend whose views are slices of host memory.
pub trait HostMemory: Memory {
    /// The elements.
    fn slice<'a, T: AnyElement>(view: &'a Self::In<'_, T>) -> &'a [T];

    /// The elements, for writing.
    fn slice_mut<'a, T: AnyElement>(view: &'a mut Self::Out<'_, T>) -> &'a mut [T];
}
