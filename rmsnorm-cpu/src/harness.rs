//! The conformance suite's access to this backend.

use std::ops::Range;

use rmsnorm_conformance::{Arithmetic, Harness};
use rmsnorm_spec::{AnyElement, DType, Direction, Error, Problem};

use crate::lanes::ALIGNMENT;
use crate::memory::no_room;
use crate::{CpuBackend, memory, plan};

/// Elements that begin on a cache line, so that the offset of a test case is the alignment that the
/// kernels see.
pub struct AlignedBuffer<T> {
    storage: Vec<T>,
    first: usize,
}

impl<T: AnyElement> AlignedBuffer<T> {
    /// `len` zeros. Pages that are never written take no memory.
    fn zeros(len: usize) -> Result<Self, Error> {
        let storage: Vec<T> = memory::zeros("tensor", len.saturating_add(ALIGNMENT / size_of::<T>()))?;
        let first = storage.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / size_of::<T>());
        Ok(AlignedBuffer { storage, first })
    }

    fn elements(&self, range: Range<usize>) -> &[T] {
        &self.storage[self.first..][range]
    }

    fn elements_mut(&mut self, range: Range<usize>) -> &mut [T] {
        &mut self.storage[self.first..][range]
    }

    fn len(&self) -> usize {
        self.storage.len() - ALIGNMENT / size_of::<T>()
    }
}

impl Harness for CpuBackend {
    type Backend = CpuBackend;
    type Buffer<T: AnyElement> = AlignedBuffer<T>;

    fn backend(&self) -> &CpuBackend {
        self
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic {
            mean_roundings: 1.0,
            // A correctly rounded division.
            quotient_error: 1.0 / f64::from(1u32 << 24),
            // math.md, section 11.1.
            exp_error: |_| 1.7 / f64::from(1u32 << 24),
            depth_cols: plan::depth_cols,
            depth_rows: plan::depth_rows,
            ..Arithmetic::IEEE
        }
    }

    fn device(&self) -> String {
        self.to_string()
    }

    fn tuning(&self) -> String {
        CpuBackend::tuning(self)
    }

    fn plan(&self, problem: &Problem) -> String {
        let plan = plan::plan(problem, self.caps());
        let plan::Plan { tasks, reduce_tasks, block_rows, blocks, streaming } = plan;
        let way = if streaming { "past the cache" } else { "through the cache" };
        let described = format!("{}, tasks {tasks}, {way}", self.isa().name());
        match problem.direction {
            Direction::Forward | Direction::QuantizedForward => described,
            Direction::Backward => {
                format!("{described}; blocks {blocks} of {block_rows} rows, added in tasks {reduce_tasks}")
            }
        }
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        plan::COLS_BREAKPOINTS.to_vec()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn shape_breakpoints(&self, dtype: DType) -> Vec<(usize, usize)> {
        plan::shape_breakpoints(dtype, self.caps())
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<AlignedBuffer<T>, Error> {
        self.upload_parts(data.len(), &[(0, data)])
    }

    fn upload_parts<T: AnyElement>(&self, len: usize, parts: &[(usize, &[T])]) -> Result<AlignedBuffer<T>, Error> {
        let mut buffer = AlignedBuffer::zeros(len)?;
        for (first, part) in parts {
            buffer.elements_mut(*first..first + part.len()).copy_from_slice(part);
        }
        Ok(buffer)
    }

    fn download<T: AnyElement>(&self, buffer: &AlignedBuffer<T>) -> Result<Vec<T>, Error> {
        self.download_part(buffer, 0..buffer.len())
    }

    fn download_part<T: AnyElement>(&self, buffer: &AlignedBuffer<T>, range: Range<usize>) -> Result<Vec<T>, Error> {
        let (elements, mut copy) = (buffer.elements(range), Vec::new());
        let room = copy.try_reserve_exact(elements.len());
        room.map_err(|error| no_room::<T>("copy of a tensor", elements.len(), &error))?;
        copy.extend_from_slice(elements);
        Ok(copy)
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a AlignedBuffer<T>, range: Range<usize>) -> &'a [T] {
        buffer.elements(range)
    }

    fn view_mut<'a, T: AnyElement>(&self, buffer: &'a mut AlignedBuffer<T>, range: Range<usize>) -> &'a mut [T] {
        buffer.elements_mut(range)
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

    #[test]
    fn parts_of_a_buffer_are_where_they_were_put() {
        let backend = CpuBackend::new();
        let buffer = backend.upload_parts(1000, &[(0, &[1.0f32, 2.0]), (997, &[3.0, 4.0, 5.0])]).unwrap();
        assert_eq!(backend.download_part(&buffer, 996..1000).unwrap(), [0.0, 3.0, 4.0, 5.0]);
        assert_eq!(backend.download_part(&buffer, 0..3).unwrap(), [1.0, 2.0, 0.0]);
        assert_eq!(backend.download(&buffer).unwrap().len(), 1000);
    }

    /// More than any address space gives an error, not an abort.
    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        for len in [1 << 60, 1 << 62, usize::MAX] {
            let error = CpuBackend::new().upload_parts::<f32>(len, &[]).map(|_| ()).unwrap_err();
            assert!(error.to_string().starts_with("cpu device error: cannot allocate "), "{error}");
        }
    }
}
