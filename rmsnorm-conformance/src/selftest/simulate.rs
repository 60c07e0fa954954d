//! A host backend in plain f32 loops, one row at a time, with at most one planted bug.
//!
//! Without a bug it is a correct kernel that computes as a GPU would: strided accumulators and a
//! tree along a row, blocks of rows for the weight gradients. With a bug, the self-test must reject
//! it. It is not a backend for users: it is slow, and every bug is inserted where a real kernel
//! would have it.
//!
//! `call` holds the data that all rows of a call share. `tensors` reads and writes rows. `norm` and
//! `backward` hold the formulas, `pieces` those of the pieces, `gradients` the sums
//! over rows. The dtypes of a call are values, so all of this is compiled once.

mod backward;
pub(crate) mod call;
mod forward;
mod gradients;
pub(crate) mod norm;
pub(crate) mod rows;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rmsnorm_spec::{AnyCall, AnyElement, Direction, Error, NormBackend, Problem, Rows, Span, Tensor, Visitor};

use self::call::{Call, rows_per_block};
use self::gradients::workspace_len;
use self::tensors::Tensors;
use crate::selftest::planted::Bug;
use crate::{Arithmetic, Harness};

/// A correct kernel simulated on the host, or one with a planted bug.
///
/// It implements [`NormBackend`] on slices, and [`Harness`]. It supports every combination of
/// dtypes, strides, optional tensors and cast orders, and sums weight gradients the same way for
/// every [`GradReduction`](rmsnorm_spec::GradReduction).
#[derive(Debug)]
pub struct SimulatedBackend {
    /// The planted bug; `None` for the correct kernel.
    pub bug: Option<Bug>,
    /// Number of calls so far, for a bug that depends on it.
    calls: AtomicUsize,
}

/// Number of strided accumulators of a sum over a row, which a tree then adds: the fewest for which
/// [`Arithmetic::IEEE`] holds.
const LANES: usize = 32;

/// Rows per block. Weight gradients are summed serially within a block, then serially over the
/// blocks. If `ceil(sqrt(rows))` is larger, it is used instead.
const BLOCK_ROWS: usize = 64;

impl SimulatedBackend {
    /// The kernel with this bug, or the correct one.
    pub const fn new(bug: Option<Bug>) -> Self {
        SimulatedBackend { bug, calls: AtomicUsize::new(0) }
    }
}

impl Default for SimulatedBackend {
    /// The correct kernel.
    fn default() -> Self {
        SimulatedBackend::new(None)
    }
}

impl NormBackend for SimulatedBackend {
    type In<'a, T: AnyElement> = &'a [T];
    type Out<'a, T: AnyElement> = &'a mut [T];

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn in_span<T: AnyElement>(view: &&[T]) -> Span {
        Span::of(view)
    }

    fn out_span<T: AnyElement>(view: &&mut [T]) -> Span {
        Span::of(view)
    }

    fn workspace_len(&self, problem: &Problem) -> usize {
        workspace_len(problem, rows_per_block(BLOCK_ROWS, problem.rows))
    }

    fn has_gradient_sums(&self) -> bool {
        true
    }

    fn launch(&self, checked: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        match &checked {
            AnyCall::Forward(_) | AnyCall::Backward(_) | AnyCall::QuantizedForward(_) => {}
            AnyCall::PartialStatistics(_)
            | AnyCall::ForwardWithStatistics(_)
            | AnyCall::PartialBackwardStatistics(_)
            | AnyCall::BackwardWithStatistics(_) => return Err(checked.unsupported(self.name())),
        }
        let of_call = (checked.spec(), checked.problem(), checked.part_stride());
        let calls_before = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = Call::new(self.bug, (LANES, BLOCK_ROWS), of_call, calls_before);
        let mut tensors = Tensors::new(&call);
        checked.visit(&mut tensors)?;
        match call.problem.direction {
            Direction::Backward => backward::run(&call, &mut tensors, self.workspace_len(&call.problem)),
            Direction::Forward | Direction::QuantizedForward => forward::run(&call, &mut tensors),
        }
        Ok(())
    }
}

impl<'a> Visitor<'a, SimulatedBackend> for Tensors<'_, 'a> {
    fn read<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<&'a [E]>) -> Result<(), Error> {
        self.put::<E>(tensor, rows.with(Box::new(rows.view.to_vec())));
        Ok(())
    }

    fn write<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<&'a mut [E]>) -> Result<(), Error> {
        let distances = rows.with(());
        self.put::<E>(tensor, distances.with(Box::new(rows.view)));
        Ok(())
    }
}

impl Harness for SimulatedBackend {
    type Backend = Self;
    type Buffer<T: AnyElement> = Vec<T>;

    fn backend(&self) -> &Self {
        self
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::IEEE
    }

    fn device(&self) -> String {
        let bug = self.bug.map_or("no bug", |bug| bug.name);
        format!("host loops, {LANES} lanes, blocks of {BLOCK_ROWS} rows, {bug}")
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        vec![LANES]
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        vec![BLOCK_ROWS]
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        Ok(data.to_vec())
    }

    fn download<T: AnyElement>(&self, buffer: &Vec<T>) -> Result<Vec<T>, Error> {
        Ok(buffer.clone())
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a Vec<T>, range: Range<usize>) -> &'a [T] {
        &buffer[range]
    }

    fn view_mut<'a, T: AnyElement>(&self, buffer: &'a mut Vec<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer[range]
    }
}
