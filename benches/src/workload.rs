//! The tensors of one shape and dtype, in several sets, and the calls that are timed on them.

use rmsnorm_core::{
    Backward, DType, Element, Error, Forward, GradReduction, Norm, NormBackend, NormSpec, Problem, Tensor, TensorSet,
};

use crate::pattern::Pattern;
use crate::{Measurable, Op, Operation, Shape};

const EPS: f32 = 1e-6;

/// The numbers of the input tensors in the [`Pattern`].
pub(crate) mod tensors {
    pub(crate) const X: usize = 1;
    /// The residual of forward; dy of backward.
    pub(crate) const SECOND: usize = 2;
    pub(crate) const WEIGHT: usize = 3;
    pub(crate) const BIAS: usize = 4;
}

/// One set: inputs and outputs of every operation.
pub(crate) struct Set<D: Measurable, T: Element> {
    /// x of forward; x of backward.
    pub(crate) x: D::Buffer<T>,
    /// The residual of forward; dy of backward.
    pub(crate) second: D::Buffer<T>,
    /// y of forward; dx of backward.
    pub(crate) out: D::Buffer<T>,
    pub(crate) residual_out: D::Buffer<T>,
}

/// Sets that are visited in turn, and the vectors they share.
pub struct Workload<'d, D: Measurable, T: Element> {
    pub(crate) device: &'d D,
    pub(crate) shape: Shape,
    pub(crate) pattern: Pattern<T>,
    pub(crate) sets: Vec<Set<D, T>>,
    is_cold: bool,
    weight: D::Buffer<T>,
    bias: D::Buffer<T>,
    pub(crate) mean: D::Buffer<f32>,
    pub(crate) rstd: D::Buffer<f32>,
    pub(crate) dweight: D::Buffer<T>,
    pub(crate) dbias: D::Buffer<T>,
    workspace: D::Buffer<f32>,
    workspace_len: usize,
}

impl<'d, D: Measurable, T: Element> Workload<'d, D, T> {
    /// Tensors of that shape for any operation with one of these reductions, as many sets as the device asks for.
    ///
    /// # Errors
    /// If the device has no room for them.
    pub fn new(device: &'d D, shape: Shape, reductions: &[GradReduction]) -> Result<Self, Error> {
        let (sets, pattern, len) = (device.sets(shape.bytes(T::DTYPE)), Pattern::new(), shape.elements());
        let upload = |tensor, len| device.upload(&pattern.tensor(tensor, len));
        let matrices = |tensor, count| device.repeat(&pattern.period(tensor, len), len, count);
        // What outputs hold does not matter: they are made with x.
        let mut x = matrices(tensors::X, 3 * sets.count)?;
        let (out, residual_out) = (x.split_off(2 * sets.count), x.split_off(sets.count));
        let second = matrices(tensors::SECOND, sets.count)?;
        let pairs = x.into_iter().zip(second).zip(out.into_iter().zip(residual_out));
        let set = |((x, second), (out, residual_out))| Set { x, second, out, residual_out };
        // Not zeros: who adds to the workspace must clear it first.
        let unset = |len| device.upload(&vec![f32::NAN; len]);
        let workspace_len = workspace_len(device, shape, T::DTYPE, reductions);
        Ok(Workload {
            device,
            shape,
            sets: pairs.map(set).collect(),
            is_cold: sets.is_cold,
            weight: upload(tensors::WEIGHT, shape.cols)?,
            bias: upload(tensors::BIAS, shape.cols)?,
            mean: unset(shape.rows)?,
            rstd: unset(shape.rows)?,
            dweight: upload(tensors::WEIGHT, shape.cols)?,
            dbias: upload(tensors::WEIGHT, shape.cols)?,
            workspace: unset(workspace_len)?,
            workspace_len,
            pattern,
        })
    }

    /// How many sets there are.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// Whether the tensors of all sets together exceed the caches.
    pub fn is_cold(&self) -> bool {
        self.is_cold
    }

    /// One call, on the set of that number modulo their count. Enqueues, like the backend's own calls.
    ///
    /// # Errors
    /// What the backend says.
    pub fn call(&mut self, operation: Operation, set: usize) -> Result<(), Error> {
        self.call_on(self.device, operation, set)
    }

    /// [`call`](Self::call) on that device, which keeps it to submit it later.
    ///
    /// # Errors
    /// What the backend says.
    pub fn call_on(&mut self, device: &D, operation: Operation, set: usize) -> Result<(), Error> {
        match operation.op {
            Op::Forward => self.forward(device, operation.norm, set, false),
            Op::AddForward => self.forward(device, operation.norm, set, true),
            Op::Backward => self.backward(device, operation, set),
        }
    }

    /// Copies one matrix of the set of that number modulo their count to another, in one of the device's ways: what a
    /// call is compared with.
    ///
    /// # Errors
    /// What the device says.
    pub fn copy(&mut self, set: usize, way: usize) -> Result<(), Error> {
        self.copy_on(self.device, set, way)
    }

    /// [`copy`](Self::copy) on that device, which keeps it to submit it later.
    ///
    /// # Errors
    /// What the device says.
    pub fn copy_on(&mut self, device: &D, set: usize, way: usize) -> Result<(), Error> {
        let (matrix, count) = (0..self.shape.elements(), self.sets.len());
        let set = &mut self.sets[set % count];
        let from = device.view(&set.x, matrix.clone());
        device.copy(from, device.view_mut(&mut set.out, matrix), way)
    }

    /// What a call of the operation runs, in the backend's words.
    pub fn plan(&self, operation: Operation) -> String {
        self.device.plan(&problem(operation, T::DTYPE, self.shape))
    }

    fn forward(&mut self, device: &D, norm: Norm, set: usize, add: bool) -> Result<(), Error> {
        let (spec, count) = (spec(norm, self.shape), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..self.shape.rows);
        let x = device.view(&set.x, matrix.clone());
        let mut args = Forward::<D::Backend, T>::new(x, device.view_mut(&mut set.out, matrix.clone()))
            .weight(device.view(&self.weight, row.clone()))
            .rstd(device.view_mut(&mut self.rstd, stat.clone()));
        if norm == Norm::Layer {
            args = args.bias(device.view(&self.bias, row)).mean(device.view_mut(&mut self.mean, stat));
        }
        if add {
            args = args
                .residual(device.view(&set.second, matrix.clone()))
                .residual_out(device.view_mut(&mut set.residual_out, matrix));
        }
        device.backend().forward(&spec, args)
    }

    fn backward(&mut self, device: &D, operation: Operation, set: usize) -> Result<(), Error> {
        let (spec, count) = (spec(operation.norm, self.shape), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..self.shape.rows);
        let (dy, x) = (device.view(&set.second, matrix.clone()), device.view(&set.x, matrix.clone()));
        let mut args = Backward::<D::Backend, T>::new(
            dy,
            x,
            device.view(&self.rstd, stat.clone()),
            device.view_mut(&mut set.out, matrix),
        )
        .weight(device.view(&self.weight, row.clone()))
        .dweight(device.view_mut(&mut self.dweight, row.clone()))
        .workspace(device.view_mut(&mut self.workspace, 0..self.workspace_len))
        .grad_reduction(operation.reduction);
        if operation.norm == Norm::Layer {
            args = args.mean(device.view(&self.mean, stat)).dbias(device.view_mut(&mut self.dbias, row));
        }
        device.backend().backward(&spec, args)
    }
}

/// Bytes that the tensors of a [`Workload`] take on the device, at most `usize::MAX`.
pub fn workload_bytes<D: Measurable>(device: &D, shape: Shape, dtype: DType, reductions: &[GradReduction]) -> usize {
    let matrix = shape.elements().saturating_mul(dtype.size());
    let matrices = matrix.saturating_mul(4).saturating_mul(device.sets(matrix).count);
    let vectors = shape.cols.saturating_mul(4 * dtype.size());
    let statistics = shape.rows.saturating_mul(2 * DType::F32.size());
    let workspace = workspace_len(device, shape, dtype, reductions).saturating_mul(DType::F32.size());
    [vectors, statistics, workspace].into_iter().fold(matrices, usize::saturating_add)
}

pub(crate) fn spec(norm: Norm, shape: Shape) -> NormSpec {
    match norm {
        Norm::Rms => NormSpec::rms(shape.rows, shape.cols, EPS),
        Norm::Layer => NormSpec::layer(shape.rows, shape.cols, EPS),
    }
}

/// What the backward calls of a workload need, for either norm and any of these reductions.
fn workspace_len<D: Measurable>(device: &D, shape: Shape, dtype: DType, reductions: &[GradReduction]) -> usize {
    let calls = reductions.iter().flat_map(|&reduction| Norm::ALL.map(|norm| (norm, reduction)));
    let lens = calls.map(|(norm, reduction)| {
        let backward = problem(Operation { norm, op: Op::Backward, reduction }, dtype, shape);
        device.backend().workspace_len(&backward)
    });
    lens.max().unwrap_or(0)
}

/// The problem that a workload's call is.
pub(crate) fn problem(operation: Operation, dtype: DType, shape: Shape) -> Problem {
    let Operation { norm, op, reduction } = operation;
    let is_layer = norm == Norm::Layer;
    let weight = TensorSet::of(&[Tensor::Weight]);
    let forward = weight.with(Tensor::Rstd).set(Tensor::Bias, is_layer).set(Tensor::Mean, is_layer);
    let Shape { rows, cols } = shape;
    match op {
        Op::Forward => Problem::forward(norm, rows, cols, dtype, forward),
        Op::AddForward => {
            let tensors = forward.with(Tensor::Residual).with(Tensor::ResidualOut);
            Problem::forward(norm, rows, cols, dtype, tensors)
        }
        Op::Backward => {
            let tensors = weight.with(Tensor::Dweight).with(Tensor::Workspace).set(Tensor::Dbias, is_layer);
            Problem { grad_reduction: reduction, ..Problem::backward(norm, rows, cols, dtype, tensors) }
        }
    }
}
