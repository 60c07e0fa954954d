//! [`Memory`]: what a caller needs who composes several calls.

use std::ops::Range;

use crate::{Error, NormBackend, Stored};

/// A backend whose views can be divided, and that gives memory for what lies between two calls.
///
/// Nothing here validates: a range is within what it is of, as the caller has checked, and a backend panics where it is not, as a slice
/// does.
pub trait Memory: NormBackend {
    /// Memory of the backend's, which it frees when this is dropped and no call uses it any more.
    type Buffer<T: Stored>;

    /// Room for so many elements, of any values.
    ///
    /// # Errors
    /// `Device` if there is none.
    fn buffer<T: Stored>(&self, len: usize) -> Result<Self::Buffer<T>, Error>;

    /// Elements of a buffer, to be read.
    fn buffer_in<T: Stored>(buffer: &Self::Buffer<T>, range: Range<usize>) -> Self::In<'_, T>;

    /// Elements of a buffer, to be written.
    fn buffer_out<T: Stored>(buffer: &mut Self::Buffer<T>, range: Range<usize>) -> Self::Out<'_, T>;

    /// Elements of a view that is read.
    fn part_in<'a, T: Stored>(view: &'a Self::In<'_, T>, range: Range<usize>) -> Self::In<'a, T>;

    /// Elements of a view that is written.
    fn part_out<'a, T: Stored>(view: &'a mut Self::Out<'_, T>, range: Range<usize>) -> Self::Out<'a, T>;

    /// A view that is written, to be read before or after.
    fn read_out<'a, T: Stored>(view: &'a Self::Out<'_, T>) -> Self::In<'a, T>;

    /// Copies all elements, of which both have as many.
    ///
    /// # Errors
    /// `Device` if the device fails.
    fn copy<T: Stored>(&self, from: Self::In<'_, T>, to: Self::Out<'_, T>) -> Result<(), Error>;
}

/// A backend whose views are slices of host memory.
pub trait HostMemory: Memory {
    /// The elements.
    fn slice<'a, T: Stored>(view: &'a Self::In<'_, T>) -> &'a [T];

    /// The elements, to be written.
    fn slice_mut<'a, T: Stored>(view: &'a mut Self::Out<'_, T>) -> &'a mut [T];
}
