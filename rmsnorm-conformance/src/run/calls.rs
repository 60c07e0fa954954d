//! Builds a case's calls from its inputs, makes them, and checks everything that needs no
//! reference: the answer, the memory around the tensors, and independence from the old content of
//! outputs.

use std::ops::Range;

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{
    self as spec, DTypes, Direction, Error, GradReduction, GradStore, Problem, Role, Tensor, TensorShape,
};

use crate::Arithmetic;
use crate::case::data::{self, Inputs};
use crate::case::kind::Calls;
use crate::case::{Case, Kind, presence};
use crate::finding::{Check, Finding, Status};
use crate::run::device::Device;
use crate::run::harness::Answer;
use crate::run::memory::{Access, Call, Fill, Guarded, Outputs, Placement, Poison, poison_difference};

/// The backend and its declared arithmetic, read once.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub device: &'a dyn Device,
    pub arithmetic: &'a Arithmetic,
}

/// A case with its data, from which its calls are made.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub case: Case,
    pub inputs: Inputs,
}

/// A call of a scenario, with its inputs and its outputs.
pub(crate) struct Step {
    pub case: Case,
    pub direction: Direction,
    pub inputs: Inputs,
    pub outputs: Outputs,
}

impl Scenario {
    /// The data of a case.
    pub fn new(case: &Case) -> Self {
        Scenario::of(case, data::inputs(case))
    }

    /// A case with this data.
    pub fn of(case: &Case, inputs: Inputs) -> Self {
        // Other kinds compute the statistics that backward needs.
        let inputs = if case.kind.has_forward() { inputs } else { inputs.with_statistics(case) };
        Scenario { case: *case, inputs }
    }

    /// The same scenario with only `rows`, in this order.
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        let inputs = self.inputs.with_rows(rows, &self.case);
        Scenario { case: Case { rows: rows.len(), ..self.case }, inputs }
    }

    /// The same scenario with only `groups` of columns.
    pub fn with_groups(&self, groups: &Range<usize>) -> Self {
        let Scenario { case, inputs } = self;
        let share = Case { groups: groups.len(), cols: groups.len() * case.width(), ..*case };
        Scenario { case: share, inputs: inputs.with_groups(groups, case) }
    }

    /// Makes the calls once, and checks their answers and their memory.
    pub async fn steps(&self, context: Context<'_>, poison: Poison) -> Result<Vec<Step>, Status> {
        let Scenario { case, inputs } = self;
        let first = context.call(case, case.kind.direction, inputs.clone(), poison).await?;
        let of_first = |tensor| first.outputs.values(tensor);
        let backward = async |case: &Case, inputs| context.call(case, Direction::Backward, inputs, poison).await;
        let later = match case.kind.calls {
            Calls::One | Calls::InPlace => Vec::new(),
            Calls::Sums => {
                let held = |inputs: Inputs, tensor| inputs.with(tensor, of_first(tensor));
                vec![backward(case, held(held(inputs.clone(), Tensor::Dweight), Tensor::Dbias)).await?]
            }
            Calls::EndToEnd if case.kind.is_after() => {
                let saved = self.saved(&first.outputs, Tensor::ResidualOut, [Tensor::NextMean, Tensor::NextRstd]);
                let present = case.present.set(Tensor::Weight, case.present.has(Tensor::NextWeight));
                let next = Case { kind: Kind::BACKWARD, present, ..*case };
                let saved = saved.with(Tensor::Weight, inputs.get(Tensor::NextWeight).map(<[f64]>::to_vec));
                let last = match case.present.has(Tensor::NextRstd) {
                    true => Some(backward(&next, saved).await?),
                    false => None,
                };
                // x of the norm that was added has the activations' dtype; no gradient is added.
                let present = case.present.without(Tensor::DresidualOut).without(Tensor::Dresidual);
                let dtypes = DTypes { residual: case.dtypes.activation, ..case.dtypes };
                let saved = self.saved(&first.outputs, Tensor::X, [Tensor::Mean, Tensor::Rstd]);
                let saved = match &last {
                    Some(last) => saved.with(Tensor::Dy, last.outputs.values(Tensor::Dx)),
                    None => saved,
                };
                let case = Case { present, dtypes, ..*case };
                let first = backward(&case, saved.with(Tensor::DresidualOut, None)).await?;
                last.into_iter().chain([first]).collect()
            }
            Calls::EndToEnd => {
                let saved = self.saved(&first.outputs, Tensor::ResidualOut, [Tensor::Mean, Tensor::Rstd]);
                vec![backward(case, saved).await?]
            }
        };
        Ok(std::iter::once(first).chain(later).collect())
    }

    /// The inputs of a norm's backward call, if forward stored `stored`: the tensor `x` that was
    /// normalized, and the statistics.
    fn saved(&self, stored: &Outputs, x: Tensor, [mean, rstd]: [Tensor; 2]) -> Inputs {
        let x = stored.values(x).unwrap_or_else(|| self.inputs.of(Tensor::X).to_vec());
        let mean = stored.values(mean).unwrap_or_else(|| vec![0.0; self.case.rows * self.case.groups]);
        let inputs = self.inputs.clone().with(Tensor::X, Some(x)).with(Tensor::Mean, Some(mean));
        inputs.with(Tensor::Rstd, stored.values(rstd))
    }

    /// The outputs of all calls, one after the other.
    pub async fn run(&self, context: Context<'_>, poison: Poison) -> Result<Outputs, Status> {
        Ok(outputs(&self.steps(context, poison).await?))
    }

    /// Makes the calls from both poisons, and returns the calls of the first run if the second run
    /// stored the same. The second run repeats all calls of the case, so its backward pass uses its
    /// own forward pass.
    pub async fn steps_from_both_poisons(&self, context: Context<'_>) -> Result<Vec<Step>, Status> {
        let (nan, huge) = (self.steps(context, Poison::Nan).await?, self.run(context, Poison::Huge).await?);
        match poison_difference(&outputs(&nan), &huge, |name| may_vary(&self.case, name)) {
            Some(finding) => Err(Status::Fail(finding)),
            None => Ok(nan),
        }
    }
}

/// The outputs of several calls, one after the other.
pub(crate) fn outputs(steps: &[Step]) -> Outputs {
    Outputs { tensors: steps.iter().flat_map(|step| step.outputs.tensors.iter().cloned()).collect() }
}

/// The call of a case in a direction, in the form of its kind. It adds its gradient sums to those
/// in `inputs`, if there are any.
pub(crate) fn call(
    case: &Case,
    direction: Direction,
    inputs: &Inputs,
    workspace_elements: impl Fn(&Problem) -> usize,
    poison: Poison,
) -> Call {
    let problem = problem(case, direction, inputs);
    let is_sum = problem.grad_store != GradStore::Rounded;
    let kind = match direction {
        Direction::Backward if is_sum => Kind { calls: Calls::Sums, ..case.kind.backward() },
        Direction::Backward => case.kind.backward(),
        Direction::Forward | Direction::QuantizedForward => case.kind.first(),
    };
    let parts = if kind.has_parts() { case.parts } else { 1 };
    // Inputs that are overwritten, each with the output that it then holds.
    let (over_x, over_residual) = (kind.overwrites_x(), kind.calls == Calls::InPlace);
    let replaced = [(Tensor::X, Tensor::Y, over_x), (Tensor::Residual, Tensor::ResidualOut, over_residual)];
    let is_replaced = |tensor| replaced.iter().any(|&(input, _, is_over)| is_over && input == tensor);
    let is_held = |tensor| replaced.iter().any(|&(_, output, is_over)| is_over && output == tensor);
    // The residual alone is normalized, and backward calls it x.
    let is_cast_forward = case.casts && direction == Direction::Forward;
    let guarded = |tensor: Tensor| {
        let values = inputs.get(if is_cast_forward && tensor == Tensor::Residual { Tensor::X } else { tensor });
        let is_workspace = tensor.shape() == TensorShape::Workspace;
        let access = match tensor.access(direction)? {
            spec::Access::Read if is_replaced(tensor) => Access::Overwrite,
            spec::Access::Read => Access::Read,
            spec::Access::Write if is_workspace => Access::Scratch,
            spec::Access::Write if values.is_some() => Access::Overwrite,
            spec::Access::Write => Access::Write,
        };
        let workspace = if is_workspace { workspace_elements(&problem) } else { 0 };
        let shape = shape(case, tensor, if tensor == Tensor::X { parts } else { 1 }, workspace);
        let fill = values.map_or(Fill::Poison(poison), Fill::Values);
        let tensor = (tensor, problem.storage(tensor)?, access);
        Some(Guarded::new(tensor, shape, place(case, tensor.0), &fill, case.seed))
    };
    let mut tensors: Vec<Tensor> = problem.tensors.iter().filter(|tensor| !is_held(*tensor)).collect();
    // The order of outputs is part of a case's digest.
    let moved = [(Tensor::ResidualOut, 2 * Tensor::Y as usize - 1), (Tensor::Dresidual, 2 * Tensor::Dx as usize + 1)];
    tensors.sort_by_key(|tensor| {
        let to = moved.into_iter().find(|(moved, _)| moved == tensor).map(|(_, to)| to);
        to.unwrap_or(2 * *tensor as usize)
    });
    Call { kind, quant: case.quant, parts, tensors: tensors.into_iter().filter_map(guarded).collect() }
}

/// The problem of a case's call, with nothing overwritten.
fn problem(case: &Case, direction: Direction, inputs: &Inputs) -> Problem {
    let present = case.present.intersection(presence::of_call(direction, case.kind.pieces));
    let present = present.set(Tensor::Gate, case.kind.gate().is_some());
    let (norm, rows, cols, dtype) = (case.norm, case.rows, case.cols, case.dtypes.activation);
    let problem = match (direction, case.quant) {
        (Direction::QuantizedForward, Some(quant)) => {
            let present = present.set(Tensor::ScalesColumnwise, present.has(Tensor::CodesColumnwise));
            Problem::quantized_forward(norm, rows, cols, dtype, quant, present)
        }
        (Direction::Backward, _) => {
            let problem = Problem::backward(norm, rows, cols, dtype, present);
            Problem { tensors: problem.tensors.set(Tensor::Dx, !case.casts), ..problem }
        }
        (Direction::Forward, _) if case.casts => {
            let problem = Problem::forward(norm, rows, cols, dtype, present.with(Tensor::Residual));
            Problem { tensors: problem.tensors.without(Tensor::X), ..problem }
        }
        (Direction::Forward | Direction::QuantizedForward, _) => {
            let problem = Problem::forward(norm, rows, cols, dtype, present);
            let has_y = present.has(Tensor::Y) || !case.kind.is_after();
            Problem { tensors: problem.tensors.set(Tensor::Y, has_y), ..problem }
        }
    };
    let is_held = inputs.get(Tensor::Dweight).or(inputs.get(Tensor::Dbias)).is_some();
    Problem {
        dtypes: case.dtypes,
        has_weight_offset: case.weight_offset != 0.0,
        cast_order: case.cast_order,
        gate: case.spec().gate,
        groups: case.groups,
        grad_reduction: case.grad_reduction,
        grad_store: match (case.kind.calls, is_held) {
            (Calls::Sums, true) => GradStore::Accumulated,
            (Calls::Sums, false) => GradStore::Sum,
            (Calls::One | Calls::InPlace | Calls::EndToEnd, _) => GradStore::Rounded,
        },
        ..problem
    }
}

/// Rows and columns. The parts of x are further rows of one matrix.
fn shape(case: &Case, tensor: Tensor, parts: usize, workspace: usize) -> (usize, usize) {
    let Case { rows, cols, quant, .. } = *case;
    // In the lists of cases, the number of scales is always known.
    let scales = |quant: Option<QuantSpec>, rows, cols| quant.and_then(|quant| quant.scales_len(rows, cols));
    match tensor.shape() {
        TensorShape::Matrix => (parts * rows, cols),
        TensorShape::Transposed => (cols, rows),
        TensorShape::Cols => (1, cols),
        TensorShape::Rows => (1, rows * case.groups),
        TensorShape::One => (1, 1),
        TensorShape::Workspace => (1, workspace),
        TensorShape::Scales => (1, scales(quant, rows, cols).unwrap_or(0)),
        TensorShape::ScalesColumnwise => (1, scales(quant.map(|q| q.columnwise()), cols, rows).unwrap_or(0)),
    }
}

/// The placement of a tensor. A transposed tensor is never grouped.
fn place(case: &Case, tensor: Tensor) -> Placement {
    if tensor.shape() == TensorShape::Transposed {
        return Placement { groups: None, ..case.layout.placement(tensor, case.rows) };
    }
    let place = case.layout.placement(tensor, case.cols);
    if tensor.is_matrix() { place } else { Placement { offset: place.offset, ..Placement::DENSE } }
}

impl Context<'_> {
    /// Makes a call and checks its memory.
    pub async fn call(
        &self,
        case: &Case,
        direction: Direction,
        inputs: Inputs,
        poison: Poison,
    ) -> Result<Step, Status> {
        let workspace_elements = |problem: &_| self.device.workspace_elements(problem);
        let mut call = call(case, direction, &inputs, workspace_elements, poison);
        let reduction = match direction {
            Direction::Backward => case.grad_reduction,
            Direction::Forward | Direction::QuantizedForward => GradReduction::Partials,
        };
        let answer = self.device.make(&case.spec(), case.dtypes, reduction, &mut call).await;
        let outputs = checked(&call, answer, "")?;
        Ok(Step { case: *case, direction, inputs, outputs })
    }
}

/// The outputs of a call, if it succeeded and changed nothing else. Findings start with `of`.
pub(crate) fn checked(call: &Call, answer: Answer, of: &str) -> Result<Outputs, Status> {
    let fail = |check, output, detail| Err(Status::Fail(Finding { check, output, detail: format!("{of}{detail}") }));
    match answer {
        Err(error) => Err(error.status(call.kind.name())),
        Ok(Err(Error::Unsupported { rule })) => Err(Status::Unsupported(rule)),
        Ok(Err(error)) => fail(Check::Error, call.kind.name(), format!("the call was refused: {error}")),
        Ok(Ok(())) => match call.breach() {
            Some(Finding { check, output, detail }) => fail(check, output, detail),
            None => Ok(call.outputs()),
        },
    }
}

/// Whether the bits of an output may differ between two equal calls.
pub(crate) fn may_vary(case: &Case, name: Tensor) -> bool {
    case.grad_reduction != GradReduction::Partials && name.role(Direction::Backward) == Role::Gradient
}
