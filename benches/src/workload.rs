//! The tensors of one shape and dtype, in several sets, and the calls that are timed on them.

use std::time::Instant;

use rmsnorm_core::quant::{ScaleKind, ScaleType};
use rmsnorm_core::{
    Backward, DType, Element, Error, F8E4M3, Forward, Norm, NormBackend, NormSpec, Problem, QuantizedForward,
    ResidualPlacement, Rows, Tensor, TensorSet,
};

use crate::pattern::Pattern;
use crate::{Measurable, Op, Operation, Quant, Shape};

const EPS: f32 = 1e-6;

/// The numbers of the input tensors in the [`Pattern`].
pub(crate) mod tensors {
    pub(crate) const X: usize = 1;
    /// The residual of forward; dy of backward.
    pub(crate) const SECOND: usize = 2;
    pub(crate) const WEIGHT: usize = 3;
    pub(crate) const BIAS: usize = 4;
    pub(crate) const NEXT_WEIGHT: usize = 5;
    pub(crate) const NEXT_BIAS: usize = 6;
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
    /// Empty where no operation writes codes.
    pub(crate) codes: D::Buffer<F8E4M3>,
    /// Transposed, or along columns. Empty where no operation writes such.
    pub(crate) codes_t: D::Buffer<F8E4M3>,
}

/// The scale that is given: the largest results, of normal values times weights, become the largest codes.
pub(crate) const GIVEN_SCALE: f32 = 6.0 / 448.0;

/// Sets that are visited in turn, and the vectors they share.
pub struct Workload<'d, D: Measurable, T: Element> {
    pub(crate) device: &'d D,
    pub(crate) shape: Shape,
    pub(crate) pattern: Pattern<T>,
    pub(crate) sets: Vec<Set<D, T>>,
    is_cold: bool,
    weight: D::Buffer<T>,
    bias: D::Buffer<T>,
    next_weight: D::Buffer<T>,
    next_bias: D::Buffer<T>,
    pub(crate) next_mean: D::Buffer<f32>,
    pub(crate) next_rstd: D::Buffer<f32>,
    pub(crate) mean: D::Buffer<f32>,
    pub(crate) rstd: D::Buffer<f32>,
    pub(crate) dweight: D::Buffer<T>,
    pub(crate) dbias: D::Buffer<T>,
    workspace: D::Buffer<f32>,
    workspace_len: usize,
    scale: D::Buffer<f32>,
    pub(crate) scales: D::Buffer<f32>,
    pub(crate) scale_bytes: D::Buffer<u8>,
    pub(crate) scales_along: D::Buffer<f32>,
    pub(crate) scale_bytes_along: D::Buffer<u8>,
    pub(crate) amax: D::Buffer<f32>,
    /// Codes of a set, and those that are transposed.
    pub(crate) codes_lens: (usize, usize),
    /// Scales as f32, and as bytes.
    pub(crate) scales_lens: (usize, usize),
    /// The same of those along columns.
    pub(crate) along_lens: (usize, usize),
}

impl<'d, D: Measurable, T: Element> Workload<'d, D, T> {
    /// Tensors of that shape for these operations, as many sets as the device asks for.
    ///
    /// # Errors
    /// If the device has no room for them.
    pub fn new(device: &'d D, shape: Shape, operations: &[Operation]) -> Result<Self, Error> {
        let (sets, pattern, len) = (device.sets(shape.bytes(T::DTYPE)), Pattern::new(), shape.elements());
        let upload = |tensor, len| device.upload(&pattern.tensor(tensor, len));
        let matrices = |tensor, count| device.repeat(&pattern.period(tensor, len), len, count);
        // What outputs hold does not matter: they are made with x.
        let mut x = matrices(tensors::X, 3 * sets.count)?;
        let (out, residual_out) = (x.split_off(2 * sets.count), x.split_off(sets.count));
        let second = matrices(tensors::SECOND, sets.count)?;
        let pairs = x.into_iter().zip(second).zip(out.into_iter().zip(residual_out));
        let (codes_len, codes_t_len) = codes_lens(shape, operations);
        let set = |((x, second), (out, residual_out))| {
            let (codes, codes_t) = (unset_codes(device, codes_len)?, unset_codes(device, codes_t_len)?);
            Ok(Set { x, second, out, residual_out, codes, codes_t })
        };
        // Not zeros: who adds to the workspace must clear it first.
        let unset = |len| device.upload(&vec![f32::NAN; len]);
        let workspace_len = workspace_len(device, shape, T::DTYPE, operations);
        let scales_len = |scale_type| scales_len(shape, operations, scale_type);
        let along_len = |scale_type| along_len(shape, operations, scale_type);
        Ok(Workload {
            device,
            shape,
            sets: pairs.map(set).collect::<Result<_, Error>>()?,
            is_cold: sets.is_cold,
            weight: upload(tensors::WEIGHT, shape.cols)?,
            bias: upload(tensors::BIAS, shape.cols)?,
            next_weight: upload(tensors::NEXT_WEIGHT, shape.cols)?,
            next_bias: upload(tensors::NEXT_BIAS, shape.cols)?,
            next_mean: unset(shape.rows)?,
            next_rstd: unset(shape.rows)?,
            mean: unset(shape.rows)?,
            rstd: unset(shape.rows)?,
            dweight: upload(tensors::WEIGHT, shape.cols)?,
            dbias: upload(tensors::WEIGHT, shape.cols)?,
            workspace: unset(workspace_len)?,
            workspace_len,
            scale: device.upload(&[GIVEN_SCALE])?,
            scales: unset(scales_len(ScaleType::F32))?,
            scale_bytes: device.upload(&vec![u8::MAX; scales_len(ScaleType::E8m0)])?,
            scales_along: unset(along_len(ScaleType::F32))?,
            scale_bytes_along: device.upload(&vec![u8::MAX; along_len(ScaleType::E8m0)])?,
            amax: unset(1)?,
            codes_lens: (codes_len, codes_t_len),
            scales_lens: (scales_len(ScaleType::F32), scales_len(ScaleType::E8m0)),
            along_lens: (along_len(ScaleType::F32), along_len(ScaleType::E8m0)),
            pattern,
        })
    }

    /// Makes room for a workspace of that many elements, which a device asks for whose plans are others than this one's.
    pub(crate) fn reserve_workspace(&mut self, len: usize) -> Result<(), Error> {
        if len > self.workspace_len {
            self.workspace = self.device.upload(&vec![f32::NAN; len])?;
            self.workspace_len = len;
        }
        Ok(())
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
            Op::ForwardAdd => self.forward_add(device, operation.norm, set, false),
            Op::ForwardAddForward => self.forward_add(device, operation.norm, set, true),
            Op::Backward => self.backward(device, operation, set),
            Op::QuantizedForward(quant) => self.quantized_forward(device, operation.norm, quant, set, false),
            Op::AddQuantizedForward(quant) => self.quantized_forward(device, operation.norm, quant, set, true),
        }
    }

    /// One call, and the seconds that the host was in it if it was the first of its kernels: it compiled them, or read them from disk.
    ///
    /// # Errors
    /// What the backend says.
    pub fn first_call(&mut self, operation: Operation) -> Result<Option<f64>, Error> {
        let (kernels, start) = (self.device.kernels(), Instant::now());
        self.call(operation, 0)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((self.device.kernels() > kernels).then_some(seconds))
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

    fn forward_add(&mut self, device: &D, norm: Norm, set: usize, has_next: bool) -> Result<(), Error> {
        let (spec, count) = (spec(norm, self.shape).residual_after(), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..self.shape.rows);
        let x = device.view(&set.x, matrix.clone());
        let mut args = match has_next {
            false => Forward::<D::Backend, T>::onto_residual(x),
            true => Forward::<D::Backend, T>::new(x, device.view_mut(&mut set.out, matrix.clone()))
                .next_weight(device.view(&self.next_weight, row.clone()))
                .next_rstd(device.view_mut(&mut self.next_rstd, stat.clone())),
        };
        args = args
            .residual(device.view(&set.second, matrix.clone()))
            .residual_out(device.view_mut(&mut set.residual_out, matrix))
            .weight(device.view(&self.weight, row.clone()))
            .rstd(device.view_mut(&mut self.rstd, stat.clone()));
        if norm == Norm::Layer {
            args = args.bias(device.view(&self.bias, row.clone())).mean(device.view_mut(&mut self.mean, stat.clone()));
            if has_next {
                args = args
                    .next_bias(device.view(&self.next_bias, row))
                    .next_mean(device.view_mut(&mut self.next_mean, stat));
            }
        }
        device.backend().forward(&spec, args)
    }

    fn quantized_forward(&mut self, device: &D, norm: Norm, quant: Quant, set: usize, add: bool) -> Result<(), Error> {
        let Shape { rows, cols } = self.shape;
        let (spec, quant_spec, count) = (spec(norm, self.shape), quant.spec(self.shape), self.sets.len());
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..cols, 0..rows);
        let x = device.view(&set.x, matrix.clone());
        let codes = device.view_mut(&mut set.codes, matrix.clone());
        let mut args = QuantizedForward::<D::Backend, T, F8E4M3>::new(quant_spec, x, codes)
            .weight(device.view(&self.weight, row.clone()))
            .rstd(device.view_mut(&mut self.rstd, stat.clone()));
        if norm == Norm::Layer {
            args = args.bias(device.view(&self.bias, row)).mean(device.view_mut(&mut self.mean, stat));
        }
        if add {
            args = args
                .residual(device.view(&set.second, matrix.clone()))
                .residual_out(device.view_mut(&mut set.residual_out, matrix.clone()));
        }
        let scales = 0..quant_spec.scales_len(rows, cols).unwrap_or(0);
        args = match (quant_spec.scale, quant_spec.scale_type()) {
            (ScaleKind::Given, _) => args.scale(device.view(&self.scale, 0..1)),
            (_, ScaleType::F32) => args.scales(device.view_mut(&mut self.scales, scales)),
            (_, ScaleType::E8m0) => args.scales_e8m0(device.view_mut(&mut self.scale_bytes, scales)),
        };
        let tensors = quant.tensors();
        if tensors.has(Tensor::Amax) {
            args = args.amax(device.view_mut(&mut self.amax, 0..1));
        }
        if tensors.has(Tensor::CodesT) {
            args = args.codes_t(Rows::dense(device.view_mut(&mut set.codes_t, matrix)));
        } else if tensors.has(Tensor::CodesColumnwise) {
            let along = quant_spec.columnwise();
            let scales = 0..along.scales_len(cols, rows).unwrap_or(0);
            args = args.codes_columnwise(Rows::dense(device.view_mut(&mut set.codes_t, matrix)));
            args = match along.scale_type() {
                ScaleType::F32 => args.scales_columnwise(device.view_mut(&mut self.scales_along, scales)),
                ScaleType::E8m0 => args.scales_columnwise_e8m0(device.view_mut(&mut self.scale_bytes_along, scales)),
            };
        }
        device.backend().quantized_forward(&spec, args)
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
pub fn workload_bytes<D: Measurable>(device: &D, shape: Shape, dtype: DType, operations: &[Operation]) -> usize {
    let matrix = shape.elements().saturating_mul(dtype.size());
    let (codes, codes_t) = codes_lens(shape, operations);
    let set = matrix.saturating_mul(4).saturating_add(codes).saturating_add(codes_t);
    let matrices = set.saturating_mul(device.sets(matrix).count);
    let vectors = shape.cols.saturating_mul(6 * dtype.size());
    let statistics = shape.rows.saturating_mul(4 * DType::F32.size());
    let workspace = workspace_len(device, shape, dtype, operations).saturating_mul(DType::F32.size());
    let scales = [(ScaleType::F32, 4), (ScaleType::E8m0, 1)];
    let scales = scales.map(|(scale_type, size)| {
        let len = scales_len(shape, operations, scale_type).saturating_add(along_len(shape, operations, scale_type));
        len.saturating_mul(size)
    });
    [vectors, statistics, workspace, scales[0], scales[1]].into_iter().fold(matrices, usize::saturating_add)
}

pub(crate) fn spec(norm: Norm, shape: Shape) -> NormSpec {
    match norm {
        Norm::Rms => NormSpec::rms(shape.rows, shape.cols, EPS),
        Norm::Layer => NormSpec::layer(shape.rows, shape.cols, EPS),
    }
}

/// What the backward calls of these need, for either norm.
fn workspace_len<D: Measurable>(device: &D, shape: Shape, dtype: DType, operations: &[Operation]) -> usize {
    let calls = operations.iter().flat_map(|operation| Norm::ALL.map(|norm| (norm, operation.reduction)));
    let lens = calls.map(|(norm, reduction)| {
        let backward = problem(Operation { norm, op: Op::Backward, reduction }, dtype, shape);
        device.backend().workspace_len(&backward)
    });
    lens.max().unwrap_or(0)
}

/// Codes, and codes transposed or along columns, that some of these write.
fn codes_lens(shape: Shape, operations: &[Operation]) -> (usize, usize) {
    let quants = || operations.iter().filter_map(|operation| operation.op.quant());
    let len = |is_written: bool| if is_written { shape.elements() } else { 0 };
    let has_second = |quant: Quant| quant.tensors().has(Tensor::CodesT) || quant.tensors().has(Tensor::CodesColumnwise);
    (len(quants().count() > 0), len(quants().any(has_second)))
}

/// Scales of that type that these write at the most.
fn scales_len(shape: Shape, operations: &[Operation], scale_type: ScaleType) -> usize {
    let specs = operations.iter().filter_map(|operation| operation.op.quant()).map(|quant| quant.spec(shape));
    let lens = specs.filter(|spec| spec.scale_type() == scale_type).map(|spec| spec.scales_len(shape.rows, shape.cols));
    lens.flatten().max().unwrap_or(0)
}

/// The same of scales along columns.
fn along_len(shape: Shape, operations: &[Operation], scale_type: ScaleType) -> usize {
    let quants = operations.iter().filter_map(|operation| operation.op.quant());
    let quants = quants.filter(|quant| quant.tensors().has(Tensor::CodesColumnwise));
    let specs = quants.map(|quant| quant.spec(shape).columnwise()).filter(|spec| spec.scale_type() == scale_type);
    specs.filter_map(|spec| spec.scales_len(shape.cols, shape.rows)).max().unwrap_or(0)
}

/// Codes of NaN, which a call must overwrite.
pub(crate) fn unset_codes<D: Measurable>(device: &D, len: usize) -> Result<D::Buffer<F8E4M3>, Error> {
    device.upload(&vec![F8E4M3::from_bits(0x7f); len])
}

/// The problem that a workload's call is: forward with rstd and a weight, layer norm with mean and bias, too, and the same of a next
/// norm; backward with the gradients of all that it has.
pub fn problem(operation: Operation, dtype: DType, shape: Shape) -> Problem {
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
        Op::ForwardAdd | Op::ForwardAddForward => {
            let has_next = op == Op::ForwardAddForward;
            let next = TensorSet::of(&[Tensor::NextWeight, Tensor::NextRstd]);
            let next = next.set(Tensor::NextBias, is_layer).set(Tensor::NextMean, is_layer);
            let tensors = forward.with(Tensor::Residual).with(Tensor::ResidualOut);
            let tensors = if has_next { tensors.union(next) } else { tensors };
            let problem = Problem::forward(norm, rows, cols, dtype, tensors);
            let tensors = problem.tensors.set(Tensor::Y, has_next);
            Problem { tensors, residual_placement: ResidualPlacement::After, ..problem }
        }
        Op::QuantizedForward(quant) => {
            Problem::quantized_forward(norm, rows, cols, dtype, quant.spec(shape), forward.union(quant.tensors()))
        }
        Op::AddQuantizedForward(quant) => {
            let tensors = forward.union(quant.tensors()).with(Tensor::Residual).with(Tensor::ResidualOut);
            Problem::quantized_forward(norm, rows, cols, dtype, quant.spec(shape), tensors)
        }
        Op::Backward => {
            let tensors = weight.with(Tensor::Dweight).with(Tensor::Workspace).set(Tensor::Dbias, is_layer);
            Problem { grad_reduction: reduction, ..Problem::backward(norm, rows, cols, dtype, tensors) }
        }
    }
}
