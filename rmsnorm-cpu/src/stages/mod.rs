//! The arithmetic, one file per stage. Stages are generic over [`crate::lanes::Simd`]; `kernel`
//! compiles them once per instruction set.

pub(crate) mod backward;
pub(crate) mod columns;
pub(crate) mod columnwise;
pub(crate) mod copy;
pub(crate) mod forward;
mod matrix;
pub(crate) mod quantized_forward;
pub(crate) mod reduce_partials;
pub(crate) mod transposed;

pub(crate) use matrix::{Matrix, MatrixMut, RowStarts};

use crate::lanes::Simd;

/// The work of a stage, or one thread's part of it.
pub(crate) trait Stage {
    /// Does all the work.
    fn run<S: Simd>(&mut self);
}

impl<W: Stage> Stage for &mut W {
    #[inline(always)]
    fn run<S: Simd>(&mut self) {
        (**self).run::<S>();
    }
}
