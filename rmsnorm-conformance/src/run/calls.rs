//! Builds a case's calls from its inputs, makes them, and checks everything that needs no
//! reference: the answer, the memory around the tensors, and independence from the old content of
//! outputs.

use rmsnorm_spec::quant::{QuantSpec, ScaleKind};
use rmsnorm_spec::reference::{self, ForwardInputs, round_to};
use rmsnorm_spec::{
    self as spec, DType, DTypes, Direction, Error, GradReduction, GradStore, Problem, Storage, Tensor, TensorShape,
};

use crate::Arithmetic;
use crate::case::data::{self, Inputs, pick_rows};
use crate::case::kind::Calls;
use crate::case::{Case, Kind, presence};
use crate::finding::{Check, Finding, Status};
use crate::run::device::Device;
use crate::run::memory::{Access, Bits, Call, Fill, Guarded, Outputs, Placement, Poison, poison_difference};

/// The backend and its declared arithmetic, read once.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub device: &'a dyn Device,
    pub arithmetic: &'a Arithmetic,
}

/// The tensors that a forward pass saves for the backward pass, dense.
#[derive(Clone)]
pub(crate) struct Saved {
    /// (rows, cols); the tensor that was normalized
    pub x: Vec<f64>,
    /// (rows); zeros for RMS norm
    /// Zeros for RMS norm. (rows)
    pub mean: Vec<f64>,
    /// (rows)
    pub rstd: Vec<f64>,
}

/// A case with its data, from which its calls are made.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub case: Case,
    pub inputs: Inputs,
    /// The saved tensors of a single backward call; other kinds compute them.
    saved: Option<Saved>,
}

impl Scenario {
    /// The data of a case.
    pub fn new(case: &Case) -> Self {
        let inputs = data::inputs(case);
        let saved = (!case.kind.has_forward()).then(|| reference_saved(case, &inputs));
        Scenario { case: *case, inputs, saved }
    }

    /// The same scenario with only `rows`, in this order.
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        let cols = self.case.cols;
        Scenario {
            case: Case { rows: rows.len(), ..self.case },
            inputs: self.inputs.with_rows(rows, &self.case),
            saved: self.saved.as_ref().map(|saved| Saved {
                x: pick_rows(&saved.x, rows, cols),
                mean: pick_rows(&saved.mean, rows, 1),
                rstd: pick_rows(&saved.rstd, rows, 1),
            }),
        }
    }

    /// Makes the calls once, and checks their answers and their memory.
    pub fn run(&self, context: Context<'_>, poison: Poison) -> Result<Outputs, Status> {
        let (case, inputs) = (&self.case, &self.inputs);
        if let Some(saved) = &self.saved {
            let stored = context.backward(case, inputs, saved, None, poison)?;
            if case.kind.calls != Calls::Sums {
                return Ok(stored);
            }
            let added = context.backward(case, inputs, saved, Some(&stored), poison)?;
            return Ok(stored.followed_by(added));
        }
        let forward = context.forward(case, inputs, poison)?;
        if !case.kind.has_backward() {
            return Ok(forward);
        }
        if case.kind.is_after() {
            return self.run_norms_back(context, forward, poison);
        }
        let backward = context.backward(case, inputs, &self.saved_by(&forward), None, poison)?;
        Ok(forward.followed_by(backward))
    }

    /// The backward calls after a forward call that adds the residual after the norm: first of the
    /// next norm (if any), then of the norm that was added.
    fn run_norms_back(&self, context: Context<'_>, forward: Outputs, poison: Poison) -> Result<Outputs, Status> {
        let make = |step: &BackwardStep| context.backward(&step.case, &step.inputs, &step.saved, None, poison);
        let (mut stored, mut dy) = (forward, self.inputs.dy.clone());
        if let Some(last) = self.back_from_y(&stored) {
            let gradients = make(&last)?;
            dy = gradients.get(Tensor::Dx).map(Bits::values).unwrap_or_default();
            stored = stored.followed_by(gradients);
        }
        let others = make(&self.back_from_sum(&stored, &dy))?;
        Ok(stored.followed_by(others))
    }

    /// The backward call of the next norm, which normalized the stored sum. `None` if there is no
    /// next norm.
    pub fn back_from_y(&self, forward: &Outputs) -> Option<BackwardStep> {
        let Scenario { case, inputs, .. } = self;
        let values = |name| forward.get(name).map(Bits::values);
        let saved = Saved {
            x: values(Tensor::ResidualOut)?,
            mean: values(Tensor::NextMean).unwrap_or_else(|| vec![0.0; case.rows]),
            rstd: values(Tensor::NextRstd)?,
        };
        let case = Case { kind: Kind::BACKWARD, ..*case };
        let inputs = Inputs { weight: inputs.next_weight.clone(), ..inputs.clone() };
        Some(BackwardStep { case, inputs, saved })
    }

    /// The backward call of the norm that was added, with `dy`, the gradient of the sum. Its x has
    /// the activations' dtype.
    pub fn back_from_sum(&self, forward: &Outputs, dy: &[f64]) -> BackwardStep {
        let Scenario { case, inputs, .. } = self;
        let saved = Saved {
            x: inputs.x.clone(),
            mean: forward.get(Tensor::Mean).map(Bits::values).unwrap_or_else(|| vec![0.0; case.rows]),
            rstd: forward.get(Tensor::Rstd).map(Bits::values).unwrap_or_default(),
        };
        let present = case.present.without(Tensor::DresidualOut).without(Tensor::Dresidual);
        let dtypes = DTypes { residual: case.dtypes.activation, ..case.dtypes };
        let inputs = Inputs { dy: dy.to_vec(), dresidual_out: None, ..inputs.clone() };
        BackwardStep { case: Case { present, dtypes, ..*case }, inputs, saved }
    }

    /// Makes the calls from both poisons, and returns the outputs of the first run if the second
    /// run stored the same. The second run repeats all calls of the case, so its backward pass uses
    /// its own forward pass.
    pub fn run_from_both_poisons(&self, context: Context<'_>) -> Result<Outputs, Status> {
        let (nan, huge) = (self.run(context, Poison::Nan)?, self.run(context, Poison::Huge)?);
        match poison_difference(&nan, &huge, |name| may_vary(&self.case, name)) {
            Some(finding) => Err(Status::Fail(finding)),
            None => Ok(nan),
        }
    }

    /// The inputs of the backward pass, if the forward pass stored `stored`.
    pub fn saved_by(&self, stored: &Outputs) -> Saved {
        let values = |name| stored.get(name).map(Bits::values);
        self.saved.clone().unwrap_or_else(|| Saved {
            x: values(Tensor::ResidualOut).unwrap_or_else(|| self.inputs.x.clone()),
            mean: values(Tensor::Mean).unwrap_or_else(|| vec![0.0; self.case.rows]),
            rstd: values(Tensor::Rstd).unwrap_or_default(),
        })
    }
}

/// One of several backward calls of a case, with its data.
pub(crate) struct BackwardStep {
    pub case: Case,
    pub inputs: Inputs,
    pub saved: Saved,
}

/// The statistics of the f64 reference, rounded to f32 as a forward pass stores them.
pub(crate) fn reference_saved(case: &Case, inputs: &Inputs) -> Saved {
    let forward =
        reference::forward(&case.spec(), &ForwardInputs { x: &inputs.x, residual: None, weight: None, bias: None });
    let stored = |values: &[f64]| values.iter().map(|&value| round_to(value, DType::F32)).collect();
    Saved { x: inputs.x.clone(), mean: stored(&forward.mean), rstd: stored(&forward.rstd) }
}

/// Builds the tensors of a call.
struct Builder<'a> {
    case: &'a Case,
    poison: Poison,
    /// Length of the workspace in elements.
    workspace: usize,
    call: Call,
}

impl<'a> Builder<'a> {
    fn new(case: &'a Case, kind: Kind, poison: Poison) -> Self {
        let call =
            Call { kind, quant: case.quant, parts: if kind.has_parts() { case.parts } else { 1 }, tensors: Vec::new() };
        Builder { case, poison, workspace: 0, call }
    }

    fn push(&mut self, tensor: Tensor, access: Access, fill: &Fill<'_>) {
        let is_sum = self.call.kind.calls == Calls::Sums && matches!(tensor, Tensor::Dweight | Tensor::Dbias);
        let storage = match is_sum {
            true => Some(Storage::Float(DType::F32)),
            false => tensor.storage(self.call.kind.direction, self.case.dtypes, self.call.quant.as_ref()),
        };
        // Without quantization a call has no such tensor, so any storage will do.
        let storage = storage.unwrap_or(Storage::E8m0);
        let (shape, place) = (self.shape(tensor), self.place(tensor));
        self.call.tensors.push(Guarded::new((tensor, storage, access), shape, place, fill, self.case.seed));
    }

    /// Rows and columns. The parts of x are further rows of one matrix.
    fn shape(&self, tensor: Tensor) -> (usize, usize) {
        let Case { rows, cols, quant, .. } = *self.case;
        // In the lists of cases, the number of scales is always known.
        let scales = |quant: Option<QuantSpec>, rows, cols| quant.and_then(|quant| quant.scales_len(rows, cols));
        match tensor.shape() {
            TensorShape::Matrix if tensor == Tensor::X => (self.call.parts * rows, cols),
            TensorShape::Matrix => (rows, cols),
            TensorShape::Transposed => (cols, rows),
            TensorShape::Cols => (1, cols),
            TensorShape::Rows => (1, rows),
            TensorShape::One => (1, 1),
            TensorShape::Workspace => (1, self.workspace),
            TensorShape::Scales => (1, scales(quant, rows, cols).unwrap_or(0)),
            TensorShape::ScalesColumnwise => (1, scales(quant.map(|q| q.columnwise()), cols, rows).unwrap_or(0)),
        }
    }

    /// The placement of a tensor. A transposed tensor is never grouped.
    fn place(&self, tensor: Tensor) -> Placement {
        let Case { rows, cols, layout, .. } = *self.case;
        if tensor.shape() == TensorShape::Transposed {
            return Placement { groups: None, ..layout.placement(tensor, rows) };
        }
        let place = layout.placement(tensor, cols);
        if tensor.is_matrix() { place } else { Placement { offset: place.offset, ..Placement::DENSE } }
    }

    /// Adds a tensor with these values, if there are any.
    fn given(&mut self, tensor: Tensor, access: Access, values: Option<&[f64]>) {
        if let Some(values) = values {
            self.push(tensor, access, &Fill::Values(values));
        }
    }

    fn read(&mut self, tensor: Tensor, values: Option<&[f64]>) {
        self.given(tensor, Access::Read, values);
    }

    fn write(&mut self, tensor: Tensor, is_wanted: bool) {
        if is_wanted {
            self.push(tensor, Access::Write, &Fill::Poison(self.poison));
        }
    }
}

/// The forward call of a case, in the form of its kind.
pub(crate) fn forward_call(case: &Case, inputs: &Inputs, poison: Poison) -> Call {
    let kind = case.kind.first();
    let mut builder = Builder::new(case, kind, poison);
    let (overwrites_x, overwrites_residual) = (kind.overwrites_x(), kind.calls == Calls::InPlace);
    let always_has_y = !kind.is_after() && !kind.is_quantized();
    let access = |is_overwritten| if is_overwritten { Access::Overwrite } else { Access::Read };
    let present = case.present;
    builder.given(Tensor::X, access(overwrites_x), Some(&inputs.x));
    builder.given(Tensor::Residual, access(overwrites_residual), inputs.residual.as_deref());
    builder.write(Tensor::ResidualOut, !overwrites_residual && present.has(Tensor::ResidualOut));
    builder.write(Tensor::Y, !overwrites_x && (always_has_y || present.has(Tensor::Y)));
    builder.read(Tensor::Weight, inputs.weight.as_deref());
    builder.read(Tensor::Bias, inputs.bias.as_deref());
    builder.write(Tensor::Mean, present.has(Tensor::Mean));
    builder.write(Tensor::Rstd, present.has(Tensor::Rstd));
    builder.read(Tensor::NextWeight, inputs.next_weight.as_deref());
    builder.read(Tensor::NextBias, inputs.next_bias.as_deref());
    builder.write(Tensor::NextMean, present.has(Tensor::NextMean));
    builder.write(Tensor::NextRstd, present.has(Tensor::NextRstd));
    if let Some((quant, given)) = case.quant.zip(inputs.given) {
        let (scale, amax, is_given) = ([given.scale], [given.amax], quant.scale == ScaleKind::Given);
        builder.write(Tensor::Codes, true);
        builder.write(Tensor::CodesT, present.has(Tensor::CodesT));
        builder.read(Tensor::Scale, is_given.then_some(&scale[..]));
        builder.write(Tensor::Scales, !is_given);
        builder.given(Tensor::Amax, Access::Write, quant.folds_amax.then_some(&amax[..]));
        builder.write(Tensor::Amax, !quant.folds_amax && present.has(Tensor::Amax));
        builder.write(Tensor::CodesColumnwise, present.has(Tensor::CodesColumnwise));
        builder.write(Tensor::ScalesColumnwise, present.has(Tensor::CodesColumnwise));
    }
    builder.call
}

/// The backward call of a case, for the tensors that its forward pass saved. With `held`, it adds
/// its gradient sums to these.
pub(crate) fn backward_call(
    workspace_elements: impl FnOnce(&Problem) -> usize,
    case: &Case,
    inputs: &Inputs,
    saved: &Saved,
    held: Option<&Outputs>,
    poison: Poison,
) -> Call {
    let present = case.present;
    let kind = if case.kind.calls == Calls::Sums { Kind::BACKWARD_SUMS } else { Kind::BACKWARD };
    let mut builder = Builder::new(case, kind, poison);
    builder.read(Tensor::Dy, Some(&inputs.dy));
    builder.read(Tensor::X, Some(&saved.x));
    builder.read(Tensor::Weight, inputs.weight.as_deref());
    builder.read(Tensor::Mean, present.has(Tensor::Mean).then_some(&saved.mean));
    builder.read(Tensor::Rstd, Some(&saved.rstd));
    builder.read(Tensor::DresidualOut, inputs.dresidual_out.as_deref());
    let is_written = |tensor: &Tensor| tensor.access(Direction::Backward) == Some(spec::Access::Write);
    let written = present.with(Tensor::Dx).without(Tensor::Workspace);
    // Matrices first: this order is part of a case's digest.
    let (matrices, vectors): (Vec<Tensor>, Vec<Tensor>) =
        written.iter().filter(is_written).partition(|tensor| tensor.is_matrix());
    for tensor in matrices.into_iter().chain(vectors) {
        match held.and_then(|held| held.get(tensor)).filter(|_| tensor.shape() == TensorShape::Cols) {
            Some(held) => builder.given(tensor, Access::Overwrite, Some(&held.values())),
            None => builder.write(tensor, true),
        }
    }
    if present.has(Tensor::Workspace) {
        let problem = backward_problem(case, held.is_some());
        // The second norm of a forward call has these without the case's naming them.
        let tensors = problem.tensors.set(Tensor::Weight, inputs.weight.is_some());
        let tensors = tensors.set(Tensor::DresidualOut, inputs.dresidual_out.is_some());
        builder.workspace = workspace_elements(&Problem { tensors, ..problem });
        builder.push(Tensor::Workspace, Access::Scratch, &Fill::Poison(poison));
    }
    builder.call
}

/// The problem of a case's backward call, which adds to existing sums if `accumulates`.
fn backward_problem(case: &Case, accumulates: bool) -> Problem {
    let given = case.present.intersection(presence::of_backward());
    Problem {
        dtypes: case.dtypes,
        has_weight_offset: case.weight_offset != 0.0,
        cast_order: case.cast_order,
        grad_reduction: case.grad_reduction,
        grad_store: match (case.kind.calls, accumulates) {
            (Calls::Sums, true) => GradStore::Accumulated,
            (Calls::Sums, false) => GradStore::Sum,
            (Calls::One | Calls::InPlace | Calls::EndToEnd, _) => GradStore::Rounded,
        },
        ..Problem::backward(case.norm, case.rows, case.cols, case.dtypes.activation, given)
    }
}

impl Context<'_> {
    /// Makes a forward call and checks its memory.
    pub fn forward(&self, case: &Case, inputs: &Inputs, poison: Poison) -> Result<Outputs, Status> {
        self.make(case, GradReduction::Partials, forward_call(case, inputs, poison))
    }

    /// Makes a backward call and checks its memory.
    pub fn backward(
        &self,
        case: &Case,
        inputs: &Inputs,
        saved: &Saved,
        held: Option<&Outputs>,
        poison: Poison,
    ) -> Result<Outputs, Status> {
        let workspace_elements = |problem: &_| self.device.workspace_elements(problem);
        self.make(case, case.grad_reduction, backward_call(workspace_elements, case, inputs, saved, held, poison))
    }

    fn make(&self, case: &Case, reduction: GradReduction, mut call: Call) -> Result<Outputs, Status> {
        let answer = self.device.make(&case.spec(), case.dtypes, reduction, &mut call);
        match answer {
            Err(error) => return Err(error.status(call.kind.name())),
            Ok(Err(Error::Unsupported { rule })) => return Err(Status::Unsupported(rule)),
            Ok(Err(error)) => {
                let detail = format!("the call was refused: {error}");
                return Err(Status::Fail(Finding { check: Check::Error, output: call.kind.name(), detail }));
            }
            Ok(Ok(())) => {}
        }
        match call.breach() {
            Some(finding) => Err(Status::Fail(finding)),
            None => Ok(call.outputs()),
        }
    }
}

/// Whether the bits of an output may differ between two equal calls.
pub(crate) fn may_vary(case: &Case, name: Tensor) -> bool {
    case.gradients_may_vary() && matches!(name, Tensor::Dweight | Tensor::Dbias)
}
