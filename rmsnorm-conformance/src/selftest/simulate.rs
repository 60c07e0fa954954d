//! A host backend in plain f32 loops, one row at a time, with at most one planted bug.
//!
//! Without a bug it is a correct kernel as a GPU would compute it: strided accumulators and a tree along a row, blocks
//! of rows for the weight gradients. With one it is what the self-test must reject. It is no backend for users:
//! nothing here is fast, and every hook of a bug stands at the place where a real kernel would have it.
//!
//! `call` holds what all rows of a call share, `matrix` reads and writes rows, `forward`, `after` and `backward` hold the
//! formulas, `gradients` the sums over rows.

mod after;
mod backward;
mod call;
mod forward;
mod gradients;
mod matrix;
mod parts;
mod quantized;
mod scales;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rmsnorm_spec::quant::CodeType;
use rmsnorm_spec::{
    AnyCall, Backward, Checked, Element, Error, F8E4M3, F8E5M2, Forward, NormBackend, Problem, ResidualPlacement, Span,
    Stored, with_types,
};

use self::backward::{BackwardInputs, BackwardKernel};
use self::call::Call;
use self::forward::{ForwardKernel, SavedStatistics};
use self::gradients::{Gradients, rows_per_block, workspace_len};
use self::matrix::{Input, Matrix};
use self::parts::SumOfParts;
use crate::selftest::planted::Bug;
use crate::{Arithmetic, Harness};

/// A correct kernel simulated on the host, or one with a planted bug.
///
/// It implements [`NormBackend`] on slices and is its own [`Harness`]. It supports every combination of dtypes,
/// strides, optional tensors and cast orders, and sums weight gradients the same way for every
/// [`GradReduction`](rmsnorm_spec::GradReduction).
#[derive(Debug)]
pub struct SimulatedBackend {
    /// What is wrong with it; `None` for the correct kernel.
    pub bug: Option<Bug>,
    /// A sum over a row runs in this many strided accumulators, which a tree then adds. The claims of
    /// [`Arithmetic::IEEE`] hold from 32 on.
    pub lanes: usize,
    /// Weight gradients are summed serially within blocks of this many rows, or of `ceil(sqrt(rows))` where that is
    /// more, then serially over the blocks.
    pub block_rows: usize,
    /// Calls so far: [`Bug::Nondeterministic`] depends on it.
    calls: AtomicUsize,
}

impl SimulatedBackend {
    /// The kernel with this bug, or the correct one, with 32 lanes and blocks of 64 rows.
    pub const fn new(bug: Option<Bug>) -> Self {
        SimulatedBackend { bug, lanes: 32, block_rows: 64, calls: AtomicUsize::new(0) }
    }

    fn call<A>(&self, checked: &Checked<A>) -> Call {
        Call::new(self, checked.spec(), checked.problem(), self.calls.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for SimulatedBackend {
    /// The correct kernel.
    fn default() -> Self {
        SimulatedBackend::new(None)
    }
}

impl NormBackend for SimulatedBackend {
    type In<'a, T: Stored> = &'a [T];
    type Out<'a, T: Stored> = &'a mut [T];

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn in_span<T: Stored>(view: &&[T]) -> Span {
        Span::of(view)
    }

    fn out_span<T: Stored>(view: &&mut [T]) -> Span {
        Span::of(view)
    }

    fn workspace_len(&self, problem: &Problem) -> usize {
        workspace_len(problem, rows_per_block(self.block_rows, problem.rows))
    }

    fn has_gradient_sums(&self) -> bool {
        true
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        let dtypes = call.problem().dtypes;
        match call {
            AnyCall::Forward(call) => {
                with_types!(dtypes; T, W, R => self.run_forward(call.restore::<T, W, R>()?))
            }
            AnyCall::Backward(call) => {
                with_types!(dtypes; T, W, R => self.run_backward(call.restore::<T, W, R>()?))
            }
            AnyCall::QuantizedForward(checked) => {
                let (call, args) = (self.call(&checked), checked.into_args());
                match args.quant.codes {
                    CodeType::E4m3 => {
                        with_types!(dtypes; T, W, R => quantized::run(&call, args.restore::<T, F8E4M3, W, R>()?))
                    }
                    CodeType::E5m2 => {
                        with_types!(dtypes; T, W, R => quantized::run(&call, args.restore::<T, F8E5M2, W, R>()?))
                    }
                    CodeType::Int8 => {
                        with_types!(dtypes; T, W, R => quantized::run(&call, args.restore::<T, i8, W, R>()?))
                    }
                }
                Ok(())
            }
            AnyCall::ColumnStatistics(_)
            | AnyCall::ForwardGiven(_)
            | AnyCall::BackwardStatistics(_)
            | AnyCall::BackwardGiven(_) => Err(call.unsupported(self.name())),
        }
    }
}

impl SimulatedBackend {
    fn run_forward<T: Element, W: Element, R: Element>(
        &self,
        checked: Checked<Forward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        let call = self.call(&checked);
        if call.problem.residual_placement == ResidualPlacement::After {
            after::run(&call, checked.into_args());
            return Ok(());
        }
        let args = checked.into_args();
        let mut saved = SavedStatistics { mean: args.mean, rstd: args.rstd };
        let mut kernel = ForwardKernel::new(&call, args.weight, args.bias);
        let mut y = args.y.map(|rows| Matrix::new(rows, &call, [Bug::YStrideIgnored, Bug::YGroupsIgnored]));
        let mut residual_out = args
            .residual_out
            .map(|rows| Matrix::new(rows, &call, [Bug::ResOutStrideIgnored, Bug::ResOutGroupsIgnored]));
        let parts = SumOfParts::of(&call, &args.x, args.parts);
        let mut x = Input::new(args.x, &call, [Bug::XStrideIgnored, Bug::XGroupsIgnored]);
        let mut residual =
            args.residual.map(|source| Input::new(source, &call, [Bug::ResStrideIgnored, Bug::ResGroupsIgnored]));
        for row in 0..call.spec.rows {
            let addend = residual.as_ref().map(|residual| residual.row(row));
            let result = match &parts {
                Some(parts) => kernel.row_of(row, parts.sum(&call, row, addend.as_deref())),
                None => kernel.row(row, &x.row(row), addend.as_deref()),
            };
            if let Some(out) = residual.as_mut().and_then(Input::overwritten).or(residual_out.as_mut()) {
                out.store_residual(&call, row, &result.residual_out);
            }
            if let Some(y) = x.overwritten().or(y.as_mut()) {
                y.store_result(&call, row, &result.y);
            }
            saved.store(row, &result);
        }
        Ok(())
    }

    fn run_backward<T: Element, W: Element, R: Element>(
        &self,
        checked: Checked<Backward<'_, Self, T, W, R>>,
    ) -> Result<(), Error> {
        let call = self.call(&checked);
        let len = self.workspace_len(checked.problem());
        let args = checked.into_args();
        let x = Matrix::new(args.x, &call, [Bug::XStrideIgnored, Bug::XGroupsIgnored]);
        let dy = Matrix::new(args.dy, &call, [Bug::DyStrideOfX, Bug::DyGroupsIgnored])
            .with_stride_of(&x, call.has(Bug::DyStrideOfX));
        let dresidual_out =
            args.dresidual_out.map(|rows| Matrix::new(rows, &call, [Bug::DresStrideIgnored, Bug::DresGroupsIgnored]));
        let mut dx = Matrix::new(args.dx, &call, [Bug::DxStrideIgnored, Bug::DxGroupsIgnored]);
        let mut dresidual = args
            .dresidual
            .map(|rows| Matrix::new(rows, &call, [Bug::DresidualStrideIgnored, Bug::DresidualGroupsIgnored]));

        let mut own_workspace = Vec::new();
        let workspace = args.workspace.unwrap_or_else(|| {
            own_workspace.resize(len, 0.0);
            &mut own_workspace
        });
        let mut gradients = Gradients::new(&call, workspace);
        let mut kernel = BackwardKernel::new(&call, args.weight);
        for row in 0..call.spec.rows {
            let dresidual_out = dresidual_out.as_ref().map(|dresidual_out| dresidual_out.row(row));
            let result = kernel.row(&BackwardInputs {
                row,
                dy: &dy.row(row),
                x: &x.row(row),
                mean: args.mean.map_or(0.0, |mean| mean[row]),
                rstd: args.rstd[call.row_of_rstd(row)],
                dresidual_out: dresidual_out.as_deref(),
            });
            dx.store_result(&call, row, &result.dx);
            if let Some(dresidual) = &mut dresidual {
                dresidual.store_result(&call, row, &result.dresidual(&call));
            }
            gradients.add(row, &result);
        }
        match args.dweight_sum.is_some() || args.dbias_sum.is_some() {
            true => gradients.store_sums::<W>(args.dweight_sum, args.dbias_sum, args.accumulate),
            false => gradients.store(args.dweight, args.dbias),
        }
        Ok(())
    }
}

impl Harness for SimulatedBackend {
    type Backend = Self;
    type Buffer<T: Stored> = Vec<T>;

    fn backend(&self) -> &Self {
        self
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::IEEE
    }

    fn device(&self) -> String {
        let bug = self.bug.map_or("no bug", Bug::name);
        format!("host loops, {} lanes, blocks of {} rows, {bug}", self.lanes, self.block_rows)
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        vec![self.lanes]
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        vec![self.block_rows]
    }

    fn upload<T: Stored>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        Ok(data.to_vec())
    }

    fn download<T: Stored>(&self, buffer: &Vec<T>) -> Result<Vec<T>, Error> {
        Ok(buffer.clone())
    }

    fn view<'a, T: Stored>(&self, buffer: &'a Vec<T>, range: Range<usize>) -> &'a [T] {
        &buffer[range]
    }

    fn view_mut<'a, T: Stored>(&self, buffer: &'a mut Vec<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer[range]
    }
}
