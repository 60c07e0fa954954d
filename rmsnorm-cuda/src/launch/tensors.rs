//! Converts views to addresses, and keeps cudarc's guards of the views.

use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice, SyncOnDrop, sys};
use rmsnorm_spec::{AnyElement, Error, Problem, RowLayout, Rows, Tensor, TensorShape, Visitor};

use crate::backend::{CudaBackend, place};
use crate::params::{Matrix, Params};

/// The addresses of a call's tensors. cudarc treats the tensors as in use until this is dropped,
/// after the last step was enqueued; later work on other streams then waits for the stream.
pub(crate) struct Tensors<'a> {
    stream: &'a CudaStream,
    problem: Problem,
    params: Params,
    /// Elements of the caller's workspace, if it passed one.
    workspace_len: Option<usize>,
    uses: [Option<SyncOnDrop<'a>>; Tensor::COUNT],
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(stream: &'a CudaStream, problem: Problem) -> Self {
        Tensors {
            stream,
            problem,
            params: Params::default(),
            workspace_len: None,
            uses: [const { None }; Tensor::COUNT],
        }
    }

    /// Sets the stride between the parts of `x`, in elements.
    pub(super) fn with_part_stride(mut self, part_stride: usize) -> Self {
        self.params.part_stride = part_stride as u64;
        self
    }

    /// The parameters with all addresses; every tensor must have been visited.
    pub(crate) fn params(&self) -> Params {
        let mut params = self.params;
        // Kernels read an element of a row before they write it. In place, both addresses are the
        // same.
        if self.problem.tensors.is_in_place() {
            params[Tensor::X] = params[Tensor::Y];
        }
        // Kernels know the residual that is normalized alone, and its gradient, as x and dx.
        if self.problem.tensors.is_cast() {
            params[Tensor::X] = if self.problem.has(Tensor::X) { params[Tensor::X] } else { params[Tensor::Residual] };
            params[Tensor::Dx] = params[Tensor::Dresidual];
        }
        if !self.problem.tensors.has(Tensor::Residual) {
            params[Tensor::Residual] = params[Tensor::ResidualOut];
        }
        params
    }

    /// Elements of the caller's workspace, if it passed one.
    pub(super) const fn workspace_len(&self) -> Option<usize> {
        self.workspace_len
    }

    fn hold(&mut self, tensor: Tensor, layout: &RowLayout, (data, in_use): (sys::CUdeviceptr, SyncOnDrop<'a>)) {
        // The rows of transposed codes are columns, which are not grouped.
        let groups = self.problem.rows_per_group.filter(|_| tensor.shape() == TensorShape::Matrix);
        let row_stride = if tensor.is_matrix() { layout.row_stride as u64 } else { 0 };
        self.params[tensor] = Matrix { data, row_stride, group_stride: layout.group_stride(groups) as u64 };
        self.uses[tensor as usize] = Some(in_use);
    }

    fn layout<V>(&self, tensor: Tensor, rows: &Rows<V>) -> RowLayout {
        let Problem { rows: count, cols, .. } = self.problem;
        if tensor.shape() == TensorShape::Transposed { rows.layout(cols, count) } else { rows.layout(count, cols) }
    }

    /// Checks that argument `arg`, a view that belongs to `stream`, is in the backend's context.
    pub(super) fn check_context(&self, arg: &'static str, stream: &CudaStream) -> Result<(), Error> {
        let (theirs, ours) = (stream.context(), self.stream.context());
        if theirs == ours {
            return Ok(());
        }
        let rule = format!(
            "tensors must be in the context of the backend's stream, {}, got one in {}",
            place(ours),
            place(theirs)
        );
        Err(Error::InvalidArgument { arg, rule })
    }
}

impl<'a, 'v: 'a> Visitor<'v, CudaBackend> for Tensors<'a> {
    fn read<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<CudaView<'v, E>>) -> Result<(), Error> {
        self.check_context(self.problem.arg(tensor), rows.view.stream())?;
        self.hold(tensor, &self.layout(tensor, &rows), rows.view.view_ptr(self.stream));
        Ok(())
    }

    fn write<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<CudaViewMut<'v, E>>) -> Result<(), Error> {
        self.check_context(self.problem.arg(tensor), rows.view.stream())?;
        if tensor == Tensor::Workspace {
            self.workspace_len = Some(rows.view.len());
        }
        self.hold(tensor, &self.layout(tensor, &rows), rows.view.view_ptr_mut(self.stream));
        Ok(())
    }
}
