//! The conformance suite's access to this backend.

use std::ops::Range;

use rmsnorm_spec::conformance::{Arithmetic, Harness};
use rmsnorm_spec::{Element, Error};

use crate::lanes::ALIGNMENT;
use crate::{CpuBackend, plan};

/// Elements on a cache line of their own: the offset that a case asks for is then the alignment that the kernels see,
/// wherever the allocator has put the rest.
pub struct AlignedBuffer<T> {
    storage: Vec<T>,
    first: usize,
}

impl<T: Element> AlignedBuffer<T> {
    fn new(data: &[T]) -> Self {
        let slack = ALIGNMENT / size_of::<T>();
        let mut storage: Vec<T> = Vec::with_capacity(slack + data.len());
        let first = storage.as_ptr().align_offset(ALIGNMENT).min(slack);
        storage.resize(first, T::default());
        // Within the capacity, so that nothing moves.
        storage.extend_from_slice(data);
        AlignedBuffer { storage, first }
    }
}

impl Harness for CpuBackend {
    type Backend = CpuBackend;
    type Buffer<T: Element> = AlignedBuffer<T>;

    fn backend(&self) -> &CpuBackend {
        self
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic {
            mean_roundings: 1.0,
            depth_cols: plan::depth_cols,
            depth_rows: plan::depth_rows,
            ..Arithmetic::IEEE
        }
    }

    fn device(&self) -> String {
        self.to_string()
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        plan::COLS_BREAKPOINTS.to_vec()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn upload<T: Element>(&self, data: &[T]) -> Result<AlignedBuffer<T>, Error> {
        Ok(AlignedBuffer::new(data))
    }

    fn download<T: Element>(&self, buffer: &AlignedBuffer<T>) -> Result<Vec<T>, Error> {
        Ok(buffer.storage[buffer.first..].to_vec())
    }

    fn view<'a, T: Element>(&self, buffer: &'a AlignedBuffer<T>, range: Range<usize>) -> &'a [T] {
        &buffer.storage[buffer.first..][range]
    }

    fn view_mut<'a, T: Element>(&self, buffer: &'a mut AlignedBuffer<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer.storage[buffer.first..][range]
    }
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::bf16;

    use super::*;

    #[test]
    fn buffers_are_aligned_and_hold_what_was_uploaded() {
        let backend = CpuBackend::new();
        for len in [0, 1, 1000] {
            let data: Vec<bf16> = (0..len).map(|i| bf16::from_f32(i as f32)).collect();
            let buffer = backend.upload(&data).unwrap();
            assert_eq!(backend.download(&buffer).unwrap(), data);
            assert!(backend.view(&buffer, 0..len).as_ptr().addr().is_multiple_of(ALIGNMENT));
        }
    }
}
