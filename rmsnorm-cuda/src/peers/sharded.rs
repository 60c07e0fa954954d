//! The calls of a [`PeerGroup`].

use rmsnorm_dist::{GroupCall, ShardedNorm, check_reduced};
use rmsnorm_spec::{Error, NormSpec, Problem};

use super::group::PeerGroup;
use super::{columns, reduced, rows};
use crate::backend::CudaBackend;

impl PeerGroup {
    /// Compiles and loads the kernels of calls like this problem with any number of rows, on tensors
    /// whose addresses and strides, in bytes, are multiples of `alignment`, like
    /// [`CudaBackend::prepare_aligned`].
    ///
    /// # Errors
    /// `Unsupported` if such a call is; `Device` if a kernel cannot be compiled or loaded.
    pub fn prepare(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        reduced::prepare(self, problem, alignment)
    }

    /// [`prepare`](Self::prepare) for calls with the residual divided by rows; `problem` has all
    /// rows.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_rows(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        rows::prepare(self, problem, alignment)
    }

    /// [`prepare`](Self::prepare) for calls on column-divided rows; `problem` has this rank's
    /// columns, as from [`Problem::forward`] or [`Problem::backward`].
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_columns(&self, problem: &Problem, alignment: usize) -> Result<(), Error> {
        columns::prepare(self, problem, alignment)
    }
}

impl ShardedNorm for PeerGroup {
    type Backend = CudaBackend;

    fn rank(&self) -> usize {
        self.place().0
    }

    fn ranks(&self) -> usize {
        self.place().1
    }

    fn launch(&self, spec: &NormSpec, call: GroupCall<'_, '_, CudaBackend>) -> Result<(), Error> {
        match call {
            GroupCall::Reduced(args) => reduced::forward(self, check_reduced(spec, args)?),
            GroupCall::ReducedRows(y_rows, args) => rows::forward(self, spec, y_rows, args),
            GroupCall::ForwardColumns(columns, args) => columns::forward(self, spec, columns, args),
            GroupCall::BackwardColumns(columns, args) => columns::backward(self, spec, columns, args),
        }
    }
}
