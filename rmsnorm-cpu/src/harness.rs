//! The conformance suite's access to this backend.

use std::ops::Range;

use rmsnorm_spec::conformance::{Arithmetic, Harness};
use rmsnorm_spec::{Element, Error};

use crate::{CpuBackend, plan};

impl Harness for CpuBackend {
    type Backend = CpuBackend;
    type Buffer<T: Element> = Vec<T>;

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
        format!("{} {}, {} threads", std::env::consts::ARCH, self.isa(), self.threads())
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        plan::COLS_BREAKPOINTS.to_vec()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        plan::ROWS_BREAKPOINTS.to_vec()
    }

    fn upload<T: Element>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        Ok(data.to_vec())
    }

    fn download<T: Element>(&self, buffer: &Vec<T>) -> Result<Vec<T>, Error> {
        Ok(buffer.clone())
    }

    fn view<'a, T: Element>(&self, buffer: &'a Vec<T>, range: Range<usize>) -> &'a [T] {
        &buffer[range]
    }

    fn view_mut<'a, T: Element>(&self, buffer: &'a mut Vec<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer[range]
    }
}
