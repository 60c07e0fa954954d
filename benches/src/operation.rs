//! The measured operations and the bytes that they move.

use rmsnorm_core::{DType, DTypes, GradReduction, Norm, NormSpec};

use crate::form::Form;
use crate::quant::Quant;
use crate::shapes::Shape;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// y from x and weight (and bias, for layer norm), with rstd (and mean).
    Forward,
    /// `Forward` of x + residual, with the sum stored.
    AddForward,
    /// residual_out = residual + the norm of x, from x, weight (and bias), with rstd (and mean).
    ForwardAdd,
    /// `ForwardAdd`, and y = the next norm of residual_out, with separate parameters and
    /// statistics.
    ForwardAddForward,
    /// dx and dweight (and dbias, for layer norm), including the sum of partial sums.
    Backward,
    /// `Forward` to FP8 codes.
    QuantizedForward(Quant),
    /// `AddForward` to FP8 codes.
    AddQuantizedForward(Quant),
}

impl Op {
    /// The operations that are measured by default.
    pub const USUAL: [Op; 3] = [Op::Forward, Op::AddForward, Op::Backward];

    /// All operations, in the order of reports.
    pub fn all() -> Vec<Op> {
        let codes = [Op::QuantizedForward, Op::AddQuantizedForward].into_iter().flat_map(|op| Quant::ALL.map(op));
        Op::USUAL.into_iter().chain([Op::ForwardAdd, Op::ForwardAddForward]).chain(codes).collect()
    }

    /// The name on the command line, without the quantization: `forward`, `add_forward`,
    /// `backward`, `forward_add`, `forward_add_forward`, `quantized_forward` or
    /// `add_quantized_forward`.
    pub const fn kind(self) -> &'static str {
        match self {
            Op::Forward => "forward",
            Op::AddForward => "add_forward",
            Op::ForwardAdd => "forward_add",
            Op::ForwardAddForward => "forward_add_forward",
            Op::Backward => "backward",
            Op::QuantizedForward(_) => "quantized_forward",
            Op::AddQuantizedForward(_) => "add_quantized_forward",
        }
    }

    /// The name in bench ids and reports: the kind, followed by a dot and the quantization's name
    /// if it has one.
    pub fn name(self) -> String {
        match self.quant() {
            Some(quant) => format!("{}.{}", self.kind(), quant.name()),
            None => self.kind().to_owned(),
        }
    }

    /// Whether a residual is added, and the sum stored.
    pub const fn has_residual(self) -> bool {
        match self {
            Op::AddForward | Op::ForwardAdd | Op::ForwardAddForward | Op::AddQuantizedForward(_) => true,
            Op::Forward | Op::Backward | Op::QuantizedForward(_) => false,
        }
    }

    /// The quantization; `None` if the operation has none.
    pub const fn quant(self) -> Option<Quant> {
        match self {
            Op::Forward | Op::AddForward | Op::ForwardAdd | Op::ForwardAddForward | Op::Backward => None,
            Op::QuantizedForward(quant) | Op::AddQuantizedForward(quant) => Some(quant),
        }
    }
}

/// A measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The kind of norm.
    pub norm: Norm,
    /// The kind of operation.
    pub op: Op,
    /// The form of the norm.
    pub form: Form,
    /// The reduction of dweight and dbias in backward. Forward ignores it.
    pub reduction: GradReduction,
}

impl Operation {
    /// A plain operation with the default reduction.
    pub fn new(norm: Norm, op: Op) -> Self {
        Operation { norm, op, form: Form::Plain, reduction: GradReduction::default() }
    }

    /// Every norm with every op in every form, and backward with every reduction.
    pub fn product(norms: &[Norm], ops: &[Op], forms: &[Form], reductions: &[GradReduction]) -> Vec<Operation> {
        let mut operations = Vec::new();
        for &norm in norms {
            for &op in ops {
                for &form in forms {
                    let reductions = if op == Op::Backward { reductions } else { &[GradReduction::Partials] };
                    operations.extend(reductions.iter().map(|&reduction| Operation { norm, op, form, reduction }));
                }
            }
        }
        operations
    }

    /// The name in bench ids and reports: the op's, followed by a dot and the form's name if it is
    /// not plain.
    pub fn name(self) -> String {
        if self.form == Form::Plain { self.op.name() } else { format!("{}.{}", self.op.name(), self.form.name()) }
    }

    /// The id in benchmarks and reports, without the backend's name:
    /// `forward/rms_norm/bf16/4096x1024`.
    pub fn id(self, dtype: DType, shape: Shape) -> String {
        format!("{}/{}/{dtype}/{shape}", self.name(), self.norm.name())
    }

    /// The fewest bytes that must move: every matrix once, every vector once.
    pub fn bytes(self, dtype: DType, shape: Shape) -> usize {
        // Quantized operations write codes in place of y; these are counted below.
        let matrices = match self.op {
            Op::QuantizedForward(_) => 1,
            Op::Forward => 2,
            Op::ForwardAdd | Op::Backward | Op::AddQuantizedForward(_) => 3,
            Op::AddForward | Op::ForwardAddForward => 4,
        };
        // The gate, and in backward its gradient.
        let of_gate = if self.form.has_gate() { 1 + usize::from(self.op == Op::Backward) } else { 0 };
        let norms = if self.op == Op::ForwardAddForward { 2 } else { 1 };
        // Weight and rstd; for layer norm also bias and mean.
        let of_each = match self.norm {
            Norm::Rms | Norm::L2 | Norm::L2Clamped => norms,
            Norm::Layer => 2 * norms,
        };
        // Backward reads no bias, and writes a gradient for each parameter: one vector more than
        // forward. With a gate after the norm it reads the bias.
        let is_backward = usize::from(self.op == Op::Backward);
        let bias = is_backward * usize::from(self.norm == Norm::Layer && self.form == Form::GateAfter);
        let parameters = if self.form.has_weight() { of_each + is_backward + bias } else { 0 };
        let statistics = shape.rows * self.form.of(NormSpec::new(self.norm, shape.rows, shape.cols, 0.0)).groups;
        let codes = self.op.quant().map_or(0, |quant| quant.bytes(shape));
        let DTypes { activation: y, weight, residual: x } = self.form.dtypes(dtype);
        // One matrix goes with y: y itself, or dy.
        let of_matrices = (matrices - 1 + of_gate) * x.size() + y.size();
        let of_vectors = parameters * shape.cols * weight.size() + of_each * statistics * DType::F32.size();
        of_matrices * shape.elements() + of_vectors + codes
    }
}

/// The measured reductions of weight gradients.
pub const REDUCTIONS: [GradReduction; 3] =
    [GradReduction::Partials, GradReduction::Locks { groups: 64 }, GradReduction::Atomics];

/// The name on the command line and in reports: `partials`, `locks` or `atomics`.
pub const fn reduction_name(reduction: GradReduction) -> &'static str {
    match reduction {
        GradReduction::Partials => "partials",
        GradReduction::Locks { .. } => "locks",
        GradReduction::Atomics => "atomics",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(norm: Norm, op: Op, dtype: DType) -> usize {
        Operation::new(norm, op).bytes(dtype, Shape { rows: 10, cols: 3 })
    }

    #[test]
    fn bytes_of_a_gate_are_a_matrix_forward_and_two_backward() {
        let bytes = |norm, op, form| {
            Operation { form, ..Operation::new(norm, op) }.bytes(DType::Bf16, Shape { rows: 10, cols: 16 })
        };
        for (op, matrices) in [(Op::Forward, 1), (Op::AddForward, 1), (Op::Backward, 2)] {
            let more = |norm, form| bytes(norm, op, form) - bytes(norm, op, Form::Plain);
            assert_eq!(more(Norm::Rms, Form::GateAfter), 2 * 160 * matrices);
            assert_eq!(more(Norm::Layer, Form::GateBefore), 2 * 160 * matrices);
            // Backward reads the bias.
            let bias = if op == Op::Backward { 2 * 16 } else { 0 };
            assert_eq!(more(Norm::Layer, Form::GateAfter), 2 * 160 * matrices + bias);
            // Eight times the statistics.
            assert_eq!(more(Norm::Rms, Form::Groups), 7 * 4 * 10);
            assert_eq!(more(Norm::Layer, Form::GateBeforeGroups), 2 * 160 * matrices + 2 * 7 * 4 * 10);
        }
    }

    #[test]
    fn bytes_of_casts_and_of_no_weight_are_those_of_their_tensors() {
        let bytes = |norm, op, form| {
            Operation { form, ..Operation::new(norm, op) }.bytes(DType::Bf16, Shape { rows: 10, cols: 3 })
        };
        // x in bf16, y in f32; weight; rstd. dy in f32, x and dx in bf16; weight, dweight; rstd.
        assert_eq!(bytes(Norm::Rms, Op::Forward, Form::ToF32), 2 * 30 + 4 * 30 + 4 * 3 + 4 * 10);
        assert_eq!(bytes(Norm::Rms, Op::Backward, Form::ToF32), 4 * 30 + 2 * 60 + 4 * 6 + 4 * 10);
        // The same with bf16 and f32 exchanged; the parameters stay in f32.
        assert_eq!(bytes(Norm::Rms, Op::Forward, Form::FromF32), 4 * 30 + 2 * 30 + 4 * 3 + 4 * 10);
        assert_eq!(bytes(Norm::Layer, Op::Backward, Form::FromF32), 2 * 30 + 4 * 60 + 4 * 9 + 4 * 20);
        assert_eq!(bytes(Norm::Layer, Op::Forward, Form::NoWeight), 2 * 60 + 4 * 20);
        assert_eq!(bytes(Norm::Layer, Op::Backward, Form::NoWeight), 2 * 90 + 4 * 20);
    }

    #[test]
    fn bytes_count_every_tensor_once() {
        // x, y; weight; rstd.
        assert_eq!(bytes(Norm::Rms, Op::Forward, DType::Bf16), 2 * (30 + 30 + 3) + 4 * 10);
        // x, y; weight, bias; mean, rstd.
        assert_eq!(bytes(Norm::Layer, Op::Forward, DType::Bf16), 2 * (30 + 30 + 2 * 3) + 4 * 20);
        // x, residual, residual_out, y; weight; rstd.
        assert_eq!(bytes(Norm::Rms, Op::AddForward, DType::F32), 4 * (4 * 30 + 3) + 4 * 10);
        // The same and bias; mean.
        assert_eq!(bytes(Norm::Layer, Op::AddForward, DType::F32), 4 * (4 * 30 + 2 * 3) + 4 * 20);
        // x, residual, residual_out; weight; rstd.
        assert_eq!(bytes(Norm::Rms, Op::ForwardAdd, DType::Bf16), 2 * (3 * 30 + 3) + 4 * 10);
        // x, residual, residual_out, y; weight and bias twice; mean and rstd twice.
        assert_eq!(bytes(Norm::Layer, Op::ForwardAddForward, DType::Bf16), 2 * (4 * 30 + 4 * 3) + 4 * 40);
        // dy, x, dx; weight, dweight; rstd.
        assert_eq!(bytes(Norm::Rms, Op::Backward, DType::F16), 2 * (3 * 30 + 2 * 3) + 4 * 10);
        // The same and dbias; mean.
        assert_eq!(bytes(Norm::Layer, Op::Backward, DType::F16), 2 * (3 * 30 + 3 * 3) + 4 * 20);
        // x; weight; rstd; codes, a scale.
        assert_eq!(bytes(Norm::Rms, Op::QuantizedForward(Quant::Tensor), DType::Bf16), 2 * (30 + 3) + 4 * 10 + 30 + 4);
        // x, residual, residual_out; weight, bias; mean, rstd; codes twice, a scale.
        assert_eq!(
            bytes(Norm::Layer, Op::AddQuantizedForward(Quant::Transposed), DType::F32),
            4 * (90 + 6) + 4 * 20 + 60 + 4
        );
        // x once, though two kernels read it; a scale for each row; a byte for each row's block.
        assert_eq!(
            [Quant::Current, Quant::Row, Quant::Mx, Quant::Block128].map(|quant| bytes(
                Norm::Rms,
                Op::QuantizedForward(quant),
                DType::Bf16
            )),
            [4, 40, 10, 40].map(|scales| 2 * (30 + 3) + 4 * 10 + 30 + scales)
        );
        // And a scale for each column's block.
        assert_eq!(
            [Quant::MxColumnwise, Quant::Block128Columnwise].map(|quant| bytes(
                Norm::Rms,
                Op::QuantizedForward(quant),
                DType::Bf16
            )),
            [10 + 3, 40 + 12].map(|scales| 2 * (30 + 3) + 4 * 10 + 60 + scales)
        );
    }

    #[test]
    fn only_backward_is_multiplied_by_the_reductions() {
        let operations = Operation::product(&Norm::USUAL, &Op::USUAL, &[Form::Plain], &REDUCTIONS);
        assert_eq!(operations.len(), 2 * (1 + 1 + 3));
        let forward = operations.iter().filter(|operation| operation.op != Op::Backward);
        assert!(forward.clone().all(|operation| operation.reduction == GradReduction::Partials));
        let names: Vec<_> = operations[2..5].iter().map(|operation| reduction_name(operation.reduction)).collect();
        assert_eq!(names, ["partials", "locks", "atomics"]);
    }

    #[test]
    fn names_say_how_results_are_quantized() {
        for op in Op::all() {
            let of_quant = |quant: Quant| op.name().ends_with(&format!("_forward.{}", quant.name()));
            assert!(op.quant().is_none_or(of_quant), "{op:?}");
            assert_eq!(op.name().starts_with("add_"), matches!(op, Op::AddForward | Op::AddQuantizedForward(_)));
        }
    }

    #[test]
    fn ids_are_those_of_criterion() {
        let default = Operation::new(Norm::Rms, Op::Backward);
        assert_eq!(default.id(DType::Bf16, Shape { rows: 8, cols: 4 }), "backward/rms_norm/bf16/8x4");
        let gated = Operation { form: Form::GateAfter, ..default };
        assert_eq!(gated.id(DType::Bf16, Shape { rows: 8, cols: 4 }), "backward.gate_after/rms_norm/bf16/8x4");
    }
}
