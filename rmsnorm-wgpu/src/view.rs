//! [`WgpuSlice`]: elements of a buffer.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;
use std::ops::Range;

use rmsnorm_spec::{AnyElement, Span};
use wgpu::Buffer;

/// Elements of a [`wgpu::Buffer`]: a byte offset and a number of elements.
///
/// Two 16-bit elements share a 32-bit word, the first in the low half. Inputs and outputs have the
/// same type: wgpu's buffers are handles and cannot be borrowed mutably. The call determines the
/// tensors that it writes, and the encoder keeps commands in order. A view may lie anywhere; the
/// call checks its position.
///
/// # Example
/// ```
/// # fn views(buffer: &wgpu::Buffer) {
/// use rmsnorm_wgpu::{WgpuSlice, spec::bf16};
/// let (rows, cols) = (8, 1024);
/// let x = WgpuSlice::<bf16>::new(buffer, 0, rows * cols);
/// let last_row = x.slice((rows - 1) * cols..rows * cols);
/// assert_eq!((last_row.offset(), last_row.len()), (14336, 1024));
/// # }
/// ```
#[derive(Debug)]
pub struct WgpuSlice<'a, T> {
    buffer: &'a Buffer,
    offset: u64,
    len: usize,
    element: PhantomData<T>,
}

// Derived impls would require the same traits of `T`.
impl<T> Clone for WgpuSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for WgpuSlice<'_, T> {}

impl<'a, T: AnyElement> WgpuSlice<'a, T> {
    /// `len` elements, starting at byte `offset`.
    pub const fn new(buffer: &'a Buffer, offset: u64, len: usize) -> Self {
        WgpuSlice { buffer, offset, len, element: PhantomData }
    }

    /// All whole elements of the buffer.
    pub fn whole(buffer: &'a Buffer) -> Self {
        WgpuSlice::bytes(buffer, 0, buffer.size())
    }

    /// The elements of a range of this view. The range may end beyond the view; the call checks
    /// that it lies within the buffer. A range that ends before its start is empty.
    pub fn slice(self, range: Range<usize>) -> Self {
        let start = (range.start as u64).saturating_mul(size_of::<T>() as u64);
        WgpuSlice::new(self.buffer, self.offset.saturating_add(start), range.end.saturating_sub(range.start))
    }

    /// The buffer.
    pub const fn buffer(&self) -> &'a Buffer {
        self.buffer
    }

    /// Byte offset of the first element in the buffer.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of elements.
    #[expect(clippy::len_without_is_empty, reason = "as rare a question here as for a tensor's shape")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Identifies buffers by wgpu's id, which only a hasher can read. A collision has probability
    /// 2^-64 and can only cause a call to be refused for an overlap.
    pub(crate) fn span(&self) -> Span {
        let mut hasher = DefaultHasher::new();
        self.buffer.hash(&mut hasher);
        Span { allocation: hasher.finish(), start: self.offset, len: self.len }
    }

    fn bytes(buffer: &'a Buffer, offset: u64, bytes: u64) -> Self {
        let len = usize::try_from(bytes / size_of::<T>() as u64).unwrap_or(usize::MAX);
        WgpuSlice::new(buffer, offset, len)
    }
}

impl<'a, T: AnyElement> From<&'a Buffer> for WgpuSlice<'a, T> {
    fn from(buffer: &'a Buffer) -> Self {
        WgpuSlice::whole(buffer)
    }
}

impl<'a, T: AnyElement> From<wgpu::BufferSlice<'a>> for WgpuSlice<'a, T> {
    fn from(slice: wgpu::BufferSlice<'a>) -> Self {
        WgpuSlice::bytes(slice.buffer(), slice.offset(), slice.size())
    }
}
