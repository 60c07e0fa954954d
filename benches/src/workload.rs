//! The tensors of one shape and dtype, in several sets, and the timed calls on them.

use std::time::Instant;

use rmsnorm_core::conformance::testing::Bits;
use rmsnorm_core::quant::{CodeType, ScaleKind, ScaleType};
use rmsnorm_core::{
    AnyBackward, AnyCall, AnyForward, AnyOut, AnyQuantizedForward, Checked, DType, DTypes, Error, Norm, NormBackend,
    NormSpec, Problem, ResidualPlacement, Scales, Source, Storage, Tensor, TensorSet,
};

use crate::buffer::Buffer;
use crate::pattern::Pattern;
use crate::{Form, Measurable, Op, Operation, Quant, Shape};

const EPS: f32 = 1e-6;

/// The numbers of the input tensors in the [`Pattern`].
pub(crate) mod tensors {
    pub(crate) const X: usize = 1;
    /// The residual of forward; dy of backward.
    pub(crate) const SECOND: usize = 2;
    pub(crate) const GATE: usize = 7;
    pub(crate) const WEIGHT: usize = 3;
    pub(crate) const BIAS: usize = 4;
    pub(crate) const NEXT_WEIGHT: usize = 5;
    pub(crate) const NEXT_BIAS: usize = 6;
}

/// A tensor in the workload's dtype, and for casts in f32: by [`Workload::slots`]. The second is
/// empty for matrices if no operation is a cast.
pub(crate) type Both<D> = [Buffer<D>; 2];

/// One set: the matrices of all operations.
pub(crate) struct Set<D: Measurable> {
    /// x of forward; x of backward.
    pub(crate) x: Both<D>,
    /// The residual of forward; dy of backward.
    pub(crate) second: Both<D>,
    /// y of forward; dx of backward.
    pub(crate) out: Both<D>,
    /// The sum of forward; dgate of backward.
    pub(crate) residual_out: Buffer<D>,
    /// Empty if no operation has a gate.
    pub(crate) gate: Buffer<D>,
    /// Empty if no operation writes codes.
    pub(crate) codes: Buffer<D>,
    /// Transposed or columnwise codes. Empty if no operation writes these.
    pub(crate) codes_t: Buffer<D>,
}

/// The given scale. It maps the largest results, about 6, to the largest E4M3 code, 448.
pub(crate) const GIVEN_SCALE: f32 = 6.0 / 448.0;

/// The sets of matrices, which are visited in turn, and their common vectors.
pub struct Workload<'d, D: Measurable> {
    pub(crate) device: &'d D,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// By [`slots`](Self::slots).
    pub(crate) patterns: [Pattern; 2],
    pub(crate) sets: Vec<Set<D>>,
    pub(crate) lens: Lens,
    is_cold: bool,
    weight: Both<D>,
    bias: Both<D>,
    next_weight: Buffer<D>,
    next_bias: Buffer<D>,
    pub(crate) next_mean: Buffer<D>,
    pub(crate) next_rstd: Buffer<D>,
    pub(crate) mean: Buffer<D>,
    pub(crate) rstd: Buffer<D>,
    pub(crate) dweight: Both<D>,
    pub(crate) dbias: Both<D>,
    workspace: Buffer<D>,
    scale: Buffer<D>,
    /// The scales, by [`ScaleType`].
    pub(crate) scales: [Buffer<D>; 2],
    /// The scales of the columnwise copy, by [`ScaleType`].
    pub(crate) scales_along: [Buffer<D>; 2],
    pub(crate) amax: Buffer<D>,
}

impl<'d, D: Measurable> Workload<'d, D> {
    /// The tensors of this shape and dtype for these operations, in [`Measurable::sets`] sets.
    ///
    /// # Errors
    /// If the device has no room for them.
    pub fn new(device: &'d D, shape: Shape, dtype: DType, operations: &[Operation]) -> Result<Self, Error> {
        let (sets, len) = (device.sets(shape.bytes(dtype)), shape.elements());
        let (lens, patterns) = (Lens::new(device, shape, dtype, operations), [dtype, DType::F32].map(Pattern::new));
        let vector = |tensor| Buffer::upload(device, &patterns[0].tensor(tensor, shape.cols));
        let vectors = |tensor| {
            let [first, second] = &patterns;
            let vector = |of: &Pattern| Buffer::upload(device, &of.tensor(tensor, shape.cols));
            Ok::<_, Error>([vector(first)?, vector(second)?])
        };
        let matrices =
            |slot: usize, tensor, len, count| Buffer::repeat(device, &patterns[slot].period(tensor, len), len, count);
        // The initial values of outputs do not matter, so they are made together with x.
        let (mut x, second) =
            (matrices(0, tensors::X, len, 3 * sets.count)?, matrices(0, tensors::SECOND, len, sets.count)?);
        let (out, residual_out) = (x.split_off(2 * sets.count), x.split_off(sets.count));
        let gate = matrices(0, tensors::GATE, lens.gate, sets.count)?;
        let mut f32_x = matrices(1, tensors::X, lens.of_f32, 2 * sets.count)?;
        let (f32_out, f32_second) =
            (f32_x.split_off(sets.count), matrices(1, tensors::SECOND, lens.of_f32, sets.count)?);
        let both = |of: Vec<_>, of_f32: Vec<_>| of.into_iter().zip(of_f32).map(|(of, of_f32)| [of, of_f32]);
        let inputs = both(x, f32_x).zip(both(second, f32_second)).zip(gate);
        let set = |(((x, second), gate), (out, residual_out))| {
            let [codes, codes_t] = unset_codes(device, &lens)?;
            Ok(Set { x, second, out, residual_out, gate, codes, codes_t })
        };
        // NaN, not zeros: a kernel that adds to the workspace must clear it first.
        let unset = |len| Buffer::nan(device, DType::F32, len);
        Ok(Workload {
            device,
            shape,
            dtype,
            sets: inputs.zip(both(out, f32_out).zip(residual_out)).map(set).collect::<Result<_, Error>>()?,
            is_cold: sets.is_cold,
            weight: vectors(tensors::WEIGHT)?,
            bias: vectors(tensors::BIAS)?,
            next_weight: vector(tensors::NEXT_WEIGHT)?,
            next_bias: vector(tensors::NEXT_BIAS)?,
            next_mean: unset(shape.rows)?,
            next_rstd: unset(shape.rows)?,
            mean: unset(lens.statistics)?,
            rstd: unset(lens.statistics)?,
            dweight: vectors(tensors::WEIGHT)?,
            dbias: vectors(tensors::WEIGHT)?,
            workspace: unset(lens.workspace)?,
            scale: Buffer::upload(device, &Bits::of(&[GIVEN_SCALE]))?,
            scales: unset_scales(device, lens.scales)?,
            scales_along: unset_scales(device, lens.scales_along)?,
            amax: unset(1)?,
            lens,
            patterns,
        })
    }

    /// Grows the workspace to `len` elements, for a backend with other plans.
    pub(crate) fn reserve_workspace(&mut self, len: usize) -> Result<(), Error> {
        if len > self.lens.workspace {
            self.workspace = Buffer::nan(self.device, DType::F32, len)?;
            self.lens.workspace = len;
        }
        Ok(())
    }

    /// The number of sets.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// Whether the tensors of all sets together exceed the caches.
    pub fn is_cold(&self) -> bool {
        self.is_cold
    }

    /// The slots of [x, y, weight] in a call of this form; dx is where x is, and dy where y is.
    pub(crate) fn slots(&self, form: Form) -> [usize; 3] {
        let DTypes { activation, weight, residual } = form.dtypes(self.dtype);
        [residual, activation, weight].map(|dtype| usize::from(dtype != self.dtype))
    }

    /// Enqueues one call, on set `set` modulo the number of sets.
    ///
    /// # Errors
    /// The backend's.
    pub fn call(&mut self, operation: Operation, set: usize) -> Result<(), Error> {
        self.call_on(self.device, operation, set)
    }

    /// [`call`](Self::call) on another device, such as a recorder that submits the call later.
    ///
    /// # Errors
    /// The backend's.
    pub fn call_on(&mut self, device: &D, operation: Operation, set: usize) -> Result<(), Error> {
        if operation.form.is_cast() && !matches!(operation.op, Op::Forward | Op::Backward) {
            let rule = format!("{} is a form of forward and backward", operation.form.name());
            return Err(Error::Unsupported { rule });
        }
        match operation.op {
            Op::Forward | Op::AddForward | Op::ForwardAdd | Op::ForwardAddForward => {
                self.forward(device, operation, set)
            }
            Op::Backward => self.backward(device, operation, set),
            Op::QuantizedForward(quant) | Op::AddQuantizedForward(quant) => {
                self.quantized_forward(device, operation, quant, set)
            }
        }
    }

    /// Makes one call. Returns its host time in seconds if it compiled kernels or read them from
    /// disk.
    ///
    /// # Errors
    /// The backend's.
    pub fn first_call(&mut self, operation: Operation) -> Result<Option<f64>, Error> {
        let (kernels, start) = (self.device.kernels(), Instant::now());
        self.call(operation, 0)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((self.device.kernels() > kernels).then_some(seconds))
    }

    /// Copies x to `out` in set `set` modulo the number of sets, for comparison with a call. `way`:
    /// a number below [`Measurable::COPIES`].
    ///
    /// # Errors
    /// The device's.
    pub fn copy(&mut self, set: usize, way: usize) -> Result<(), Error> {
        self.copy_on(self.device, set, way)
    }

    /// [`copy`](Self::copy) on another device, such as a recorder that submits the copy later.
    ///
    /// # Errors
    /// The device's.
    pub fn copy_on(&mut self, device: &D, set: usize, way: usize) -> Result<(), Error> {
        let (matrix, count) = (0..self.shape.elements(), self.sets.len());
        let set = &mut self.sets[set % count];
        Buffer::copy(device, (&set.x[0], matrix.clone()), (&mut set.out[0], matrix), way)
    }

    /// The plan of the operation, as the backend describes it.
    pub fn plan(&self, operation: Operation) -> String {
        self.device.plan(&problem(operation, self.dtype, self.shape))
    }

    fn forward(&mut self, device: &D, operation: Operation, set: usize) -> Result<(), Error> {
        let Operation { norm, op, form, .. } = operation;
        let (is_layer, has_next) = (norm == Norm::Layer, op == Op::ForwardAddForward);
        let (spec, count) = (spec(operation, self.shape), self.sets.len());
        let [of_x, of_y, of_weight] = self.slots(form);
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..spec.rows * spec.groups);
        let (x, y) = (set.x[of_x].view(device, matrix.clone()), set.out[of_y].view_mut(device, matrix.clone()));
        let mut args = match op == Op::ForwardAdd {
            true => AnyForward::<D::Backend>::added_to_residual(x),
            false => AnyForward::<D::Backend>::new(x, y),
        };
        if form.is_cast() {
            args.residual = args.x.take();
        }
        args.dtypes = form.dtypes(self.dtype);
        args.weight = form.has_weight().then(|| self.weight[of_weight].view(device, row.clone()));
        args.rstd = Some(self.rstd.view_mut(device, stat.clone()));
        if is_layer {
            args.bias = form.has_weight().then(|| self.bias[of_weight].view(device, row.clone()));
            args.mean = Some(self.mean.view_mut(device, stat.clone()));
        }
        args.gate = spec.gate.map(|_| set.gate.view(device, matrix.clone()).into());
        if operation.op.has_residual() {
            args.residual = Some(Source::Read(set.second[0].view(device, matrix.clone()).into()));
            args.residual_out = Some(set.residual_out.view_mut(device, matrix).into());
        }
        if has_next {
            args.next_weight = Some(self.next_weight.view(device, row.clone()));
            args.next_rstd = Some(self.next_rstd.view_mut(device, stat.clone()));
        }
        if has_next && is_layer {
            args.next_bias = Some(self.next_bias.view(device, row));
            args.next_mean = Some(self.next_mean.view_mut(device, stat));
        }
        device.backend().launch(AnyCall::Forward(Checked::forward(spec, args)?))
    }

    fn quantized_forward(&mut self, device: &D, operation: Operation, quant: Quant, set: usize) -> Result<(), Error> {
        let (Shape { rows, cols }, form) = (self.shape, operation.form);
        let (spec, quant_spec, tensors) = (spec(operation, self.shape), quant.spec(self.shape), quant.tensors());
        let count = self.sets.len();
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..cols, 0..rows * spec.groups);
        let (x, codes) = (set.x[0].view(device, matrix.clone()), set.codes.view_mut(device, matrix.clone()));
        let mut args = AnyQuantizedForward::<D::Backend>::new(quant_spec, x, codes);
        args.dtypes = DTypes::uniform(self.dtype);
        args.weight = form.has_weight().then(|| self.weight[0].view(device, row.clone()));
        args.rstd = Some(self.rstd.view_mut(device, stat.clone()));
        if operation.norm == Norm::Layer {
            args.bias = form.has_weight().then(|| self.bias[0].view(device, row));
            args.mean = Some(self.mean.view_mut(device, stat));
        }
        args.gate = spec.gate.map(|_| set.gate.view(device, matrix.clone()).into());
        if operation.op.has_residual() {
            args.residual = Some(set.second[0].view(device, matrix.clone()).into());
            args.residual_out = Some(set.residual_out.view_mut(device, matrix.clone()).into());
        }
        if quant_spec.scale == ScaleKind::Given {
            args.scale = Some(self.scale.view(device, 0..1));
        } else {
            let len = quant_spec.scales_len(rows, cols).unwrap_or(0);
            args.scales = Some(scales_of(device, &mut self.scales, quant_spec.scale_type(), len));
        }
        if tensors.has(Tensor::Amax) {
            args.amax = Some(self.amax.view_mut(device, 0..1));
        }
        if tensors.has(Tensor::CodesT) {
            args.codes_t = Some(set.codes_t.view_mut(device, matrix).into());
        } else if tensors.has(Tensor::CodesColumnwise) {
            let along = quant_spec.columnwise();
            let len = along.scales_len(cols, rows).unwrap_or(0);
            args.codes_columnwise = Some(set.codes_t.view_mut(device, matrix).into());
            args.scales_columnwise = Some(scales_of(device, &mut self.scales_along, along.scale_type(), len));
        }
        device.backend().launch(AnyCall::QuantizedForward(Checked::quantized_forward(spec, args)?))
    }

    fn backward(&mut self, device: &D, operation: Operation, set: usize) -> Result<(), Error> {
        let Operation { norm, form, reduction, .. } = operation;
        let (spec, count, is_layer) = (spec(operation, self.shape), self.sets.len(), norm == Norm::Layer);
        let [of_x, of_y, of_weight] = self.slots(form);
        let set = &mut self.sets[set % count];
        let (matrix, row, stat) = (0..self.shape.elements(), 0..self.shape.cols, 0..spec.rows * spec.groups);
        let (dy, x) = (set.second[of_y].view(device, matrix.clone()), set.x[of_x].view(device, matrix.clone()));
        let (rstd, dx) = (self.rstd.view(device, stat.clone()), set.out[of_x].view_mut(device, matrix.clone()));
        let mut args = AnyBackward::<D::Backend>::new(dy, x, rstd, dx);
        if form.is_cast() {
            args.dresidual = args.dx.take();
        }
        args.grad_reduction = reduction;
        args.dtypes = form.dtypes(self.dtype);
        if form.has_weight() {
            args.weight = Some(self.weight[of_weight].view(device, row.clone()));
            args.dweight = Some(self.dweight[of_weight].view_mut(device, row.clone()));
        }
        args.workspace = Some(self.workspace.view_mut(device, 0..self.lens.workspace));
        args.mean = is_layer.then(|| self.mean.view(device, stat));
        args.gate = spec.gate.map(|_| set.gate.view(device, matrix.clone()).into());
        args.dgate = spec.gate.map(|_| set.residual_out.view_mut(device, matrix).into());
        let has_bias = is_layer && form == Form::GateAfter;
        args.bias = has_bias.then(|| self.bias[of_weight].view(device, row.clone()));
        args.dbias = (is_layer && form.has_weight()).then(|| self.dbias[of_weight].view_mut(device, row));
        device.backend().launch(AnyCall::Backward(Checked::backward(device.backend(), spec, args)?))
    }
}

/// A view of the first `len` scales of a type.
fn scales_of<'a, D: Measurable>(
    device: &D,
    scales: &'a mut [Buffer<D>; 2],
    scale_type: ScaleType,
    len: usize,
) -> Scales<AnyOut<'a, D::Backend>, AnyOut<'a, D::Backend>> {
    let view = scales[scale_type as usize].view_mut(device, 0..len);
    match scale_type {
        ScaleType::F32 => Scales::F32(view),
        ScaleType::E8m0 => Scales::E8m0(view),
    }
}

/// The lengths of optional tensors, in elements: the largest that any operation needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lens {
    workspace: usize,
    pub(crate) statistics: usize,
    gate: usize,
    /// The matrices in f32 of casts.
    pub(crate) of_f32: usize,
    codes: usize,
    /// Transposed or columnwise codes.
    codes_t: usize,
    /// The scales, by [`ScaleType`].
    pub(crate) scales: [usize; 2],
    /// The scales of the columnwise copy, by [`ScaleType`].
    pub(crate) scales_along: [usize; 2],
}

impl Lens {
    fn new<D: Measurable>(device: &D, shape: Shape, dtype: DType, operations: &[Operation]) -> Self {
        let Shape { rows, cols } = shape;
        let mut lens = Lens::default();
        let grow = |len: &mut usize, to: Option<usize>| *len = (*len).max(to.unwrap_or(0));
        for operation in operations {
            // The workspace serves both norms.
            for norm in Norm::USUAL {
                let backward = problem(Operation { norm, op: Op::Backward, ..*operation }, dtype, shape);
                grow(&mut lens.workspace, Some(device.backend().workspace_len(&backward)));
            }
            grow(&mut lens.statistics, rows.checked_mul(spec(*operation, shape).groups));
            let of_f32 = operation.form.is_cast() && dtype != DType::F32;
            grow(&mut lens.of_f32, of_f32.then_some(shape.elements()));
            grow(&mut lens.gate, operation.form.has_gate().then_some(shape.elements()));
            let Some(quant) = operation.op.quant() else { continue };
            let (spec, tensors) = (quant.spec(shape), quant.tensors());
            lens.codes = shape.elements();
            grow(&mut lens.scales[spec.scale_type() as usize], spec.scales_len(rows, cols));
            if tensors.has(Tensor::CodesT) || tensors.has(Tensor::CodesColumnwise) {
                lens.codes_t = shape.elements();
            }
            if tensors.has(Tensor::CodesColumnwise) {
                let along = spec.columnwise();
                grow(&mut lens.scales_along[along.scale_type() as usize], along.scales_len(cols, rows));
            }
        }
        lens
    }
}

/// The device memory of a [`Workload`] in bytes; saturates at `usize::MAX`.
pub fn workload_bytes<D: Measurable>(device: &D, shape: Shape, dtype: DType, operations: &[Operation]) -> usize {
    let lens = Lens::new(device, shape, dtype, operations);
    let matrix = shape.elements().saturating_mul(dtype.size());
    let gate = if lens.gate == 0 { 0 } else { matrix };
    let of_f32 = lens.of_f32.saturating_mul(3 * DType::F32.size());
    let set =
        [gate, of_f32, lens.codes, lens.codes_t].into_iter().fold(matrix.saturating_mul(4), usize::saturating_add);
    let statistics = shape.rows.saturating_add(lens.statistics).saturating_mul(2);
    let floats = [lens.workspace, statistics, lens.scales[0], lens.scales_along[0]];
    let bytes = [
        set.saturating_mul(device.sets(matrix).count),
        shape.cols.saturating_mul(6 * dtype.size() + 4 * DType::F32.size()),
        floats.into_iter().fold(0, usize::saturating_add).saturating_mul(DType::F32.size()),
        lens.scales[1].saturating_add(lens.scales_along[1]),
    ];
    bytes.into_iter().fold(0, usize::saturating_add)
}

pub(crate) fn spec(operation: Operation, shape: Shape) -> NormSpec {
    let spec = operation.form.of(NormSpec::new(operation.norm, shape.rows, shape.cols, EPS));
    match operation.op {
        Op::ForwardAdd | Op::ForwardAddForward => spec.residual_after(),
        Op::Forward | Op::AddForward | Op::Backward | Op::QuantizedForward(_) | Op::AddQuantizedForward(_) => spec,
    }
}

/// [codes, transposed codes], filled with NaN, which a call must overwrite.
pub(crate) fn unset_codes<D: Measurable>(device: &D, lens: &Lens) -> Result<[Buffer<D>; 2], Error> {
    let codes = Storage::Code(CodeType::E4m3);
    Ok([Buffer::nan(device, codes, lens.codes)?, Buffer::nan(device, codes, lens.codes_t)?])
}

/// `len` scales of each type, filled with NaN.
pub(crate) fn unset_scales<D: Measurable>(device: &D, lens: [usize; 2]) -> Result<[Buffer<D>; 2], Error> {
    Ok([Buffer::nan(device, DType::F32, lens[0])?, Buffer::nan(device, Storage::E8m0, lens[1])?])
}

/// The problem of a workload's call. Forward has rstd and, unless the form says otherwise, a weight;
/// layer norm also bias and mean; and a next norm the same tensors again. Backward has the gradients
/// of all parameters.
pub fn problem(operation: Operation, dtype: DType, shape: Shape) -> Problem {
    let Operation { norm, op, reduction, form } = operation;
    let (Shape { rows, cols }, is_layer) = (shape, norm == Norm::Layer);
    let NormSpec { gate, groups, cast_order, .. } = spec(operation, shape);
    let (has_weight, has_bias) = (form.has_weight(), form.has_weight() && is_layer);
    let weight = TensorSet::NONE.set(Tensor::Weight, has_weight);
    let forward = weight.with(Tensor::Rstd).set(Tensor::Bias, has_bias).set(Tensor::Mean, is_layer);
    let added = op.has_residual();
    let forward = forward.set(Tensor::Residual, added).set(Tensor::ResidualOut, added);
    let forward = forward.set(Tensor::Gate, gate.is_some());
    let problem = match op {
        Op::Forward | Op::AddForward => Problem::forward(norm, rows, cols, dtype, forward),
        Op::ForwardAdd | Op::ForwardAddForward => {
            let has_next = op == Op::ForwardAddForward;
            let next = TensorSet::of(&[Tensor::NextWeight, Tensor::NextRstd]);
            let next = next.set(Tensor::NextBias, is_layer).set(Tensor::NextMean, is_layer);
            let tensors = if has_next { forward.union(next) } else { forward };
            let problem = Problem::forward(norm, rows, cols, dtype, tensors);
            let tensors = problem.tensors.set(Tensor::Y, has_next);
            Problem { tensors, residual_placement: ResidualPlacement::After, ..problem }
        }
        Op::QuantizedForward(quant) | Op::AddQuantizedForward(quant) => {
            Problem::quantized_forward(norm, rows, cols, dtype, quant.spec(shape), forward.union(quant.tensors()))
        }
        Op::Backward => {
            let tensors = weight.with(Tensor::Workspace).set(Tensor::Dweight, has_weight).set(Tensor::Dbias, has_bias);
            let tensors = tensors.set(Tensor::Gate, gate.is_some()).set(Tensor::Dgate, gate.is_some());
            let tensors = tensors.set(Tensor::Bias, is_layer && form == Form::GateAfter);
            Problem { grad_reduction: reduction, ..Problem::backward(norm, rows, cols, dtype, tensors) }
        }
    };
    let tensors = if form.is_cast() { of_cast(problem.tensors) } else { problem.tensors };
    Problem { gate, groups, cast_order, tensors, dtypes: form.dtypes(dtype), ..problem }
}

/// A cast has the residual stream in place of x, and its gradient in place of dx.
fn of_cast(tensors: TensorSet) -> TensorSet {
    if tensors.has(Tensor::Dy) {
        return tensors.set(Tensor::Dx, false).with(Tensor::Dresidual);
    }
    tensors.set(Tensor::X, false).with(Tensor::Residual)
}
