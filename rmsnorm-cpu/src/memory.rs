//! Parts of slices, and buffers that live between two calls.

use std::ops::Range;

use rmsnorm_spec::{AnyElement, Error, HostMemory, Memory};

use crate::CpuBackend;

/// `len` zeros; `what` names them in errors. Pages that are never written take no memory.
pub(crate) fn zeros<T: AnyElement>(what: &str, len: usize) -> Result<Vec<T>, Error> {
    let bytes = len.saturating_mul(size_of::<T>());
    // More than an allocation may have: the allocator would be passed the wrapped product.
    let zeros = if bytes > isize::MAX as usize { Err(()) } else { bytemuck::allocation::try_zeroed_vec(len) };
    zeros.map_err(|()| no_room::<T>(what, len, &"the allocator refused"))
}

/// The error for a failed allocation of `len` elements of type `E`. A long-running caller can
/// recover from it.
pub(crate) fn no_room<E>(what: &str, len: usize, error: &impl std::fmt::Display) -> Error {
    let bytes = len.saturating_mul(size_of::<E>());
    Error::Device { backend: "cpu", source: format!("cannot allocate {bytes} bytes for the {what}: {error}").into() }
}

impl Memory for CpuBackend {
    type Buffer<T: AnyElement> = Vec<T>;

    /// Zeros, which the system supplies without cost for large buffers.
    fn buffer<T: AnyElement>(&self, len: usize) -> Result<Vec<T>, Error> {
        zeros("buffer", len)
    }

    fn buffer_in<T: AnyElement>(buffer: &Vec<T>, range: Range<usize>) -> &[T] {
        &buffer[range]
    }

    fn buffer_out<T: AnyElement>(buffer: &mut Vec<T>, range: Range<usize>) -> &mut [T] {
        &mut buffer[range]
    }

    fn part_in<'a, T: AnyElement>(view: &'a &[T], range: Range<usize>) -> &'a [T] {
        &view[range]
    }

    fn part_out<'a, T: AnyElement>(view: &'a mut &mut [T], range: Range<usize>) -> &'a mut [T] {
        &mut view[range]
    }

    fn read_out<'a, T: AnyElement>(view: &'a &mut [T]) -> &'a [T] {
        view
    }

    fn copy<T: AnyElement>(&self, from: &[T], to: &mut [T]) -> Result<(), Error> {
        to.copy_from_slice(from);
        Ok(())
    }
}

impl HostMemory for CpuBackend {
    fn slice<'a, T: AnyElement>(view: &'a &[T]) -> &'a [T] {
        view
    }

    fn slice_mut<'a, T: AnyElement>(view: &'a mut &mut [T]) -> &'a mut [T] {
        view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_where_their_range_says() {
        let mut buffer = CpuBackend::new().buffer::<f32>(5).unwrap();
        CpuBackend::buffer_out(&mut buffer, 1..4).copy_from_slice(&[1.0, 2.0, 3.0]);
        assert_eq!(CpuBackend::buffer_in(&buffer, 0..5), [0.0, 1.0, 2.0, 3.0, 0.0]);
        assert_eq!(CpuBackend::part_in(&CpuBackend::buffer_in(&buffer, 1..5), 1..3), [2.0, 3.0]);
        assert_eq!(CpuBackend::read_out(&CpuBackend::buffer_out(&mut buffer, 3..5)), [3.0, 0.0]);
    }

    /// More than any address space gives an error, not an abort.
    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        for len in [1 << 60, usize::MAX] {
            let error = CpuBackend::new().buffer::<f32>(len).unwrap_err();
            assert!(error.to_string().starts_with("cpu device error: cannot allocate "), "{error}");
        }
    }
}
