//! Calls of every kind without a device, for tests of plans and texts.

pub mod plans;

use rmsnorm_spec::quant::{CodeType, QuantSource, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding};
use rmsnorm_spec::{
    Activation, CastOrder, DType, DTypes, Direction, Gate, GradReduction, GradStore, Norm, Piece, Problem,
    ResidualPlacement, Slot, Tensor, TensorSet,
};

/// bf16 throughout.
pub const BF16: DTypes = DTypes::uniform(DType::Bf16);
/// f32 throughout.
pub const F32: DTypes = DTypes::uniform(DType::F32);
/// bf16 with an f32 residual stream.
pub const BF16_STREAM_F32: DTypes = BF16.widened(false, true);

/// Only the statistics.
pub const NONE: TensorSet = TensorSet::of(&[Tensor::Rstd]);
/// A weight.
pub const WEIGHT: TensorSet = NONE.with(Tensor::Weight);
/// A weight and a bias.
pub const WEIGHT_BIAS: TensorSet = WEIGHT.with(Tensor::Bias);
/// A weight, a residual and `residual_out`.
pub const WEIGHT_RESIDUAL: TensorSet = WEIGHT.with(Tensor::Residual).with(Tensor::ResidualOut);
/// The same, with `y` and the parameters of the next norm.
pub const NORM_OF_SUM: TensorSet = WEIGHT_RESIDUAL.with(Tensor::Y).with(Tensor::NextWeight).with(Tensor::NextBias);
/// A weight and its gradient.
pub const DWEIGHT: TensorSet = WEIGHT.with(Tensor::Dweight);
/// A weight, its gradient and the gradient of a bias.
pub const DWEIGHT_DBIAS: TensorSet = DWEIGHT.with(Tensor::Dbias);

/// A call without its size.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Forward or backward.
    pub direction: Direction,
    /// The norm; layer norm has a mean.
    pub norm: Norm,
    /// Dtypes of activations, weight and residual stream.
    pub dtypes: DTypes,
    /// Optional tensors, in addition to those that every call has.
    pub tensors: TensorSet,
    /// How gradients are summed.
    pub grad_reduction: GradReduction,
    /// Placement of forward's residual. With `After` there is a `y` only if `tensors` has it.
    pub residual_placement: ResidualPlacement,
    /// Number of matrices that `x` is the sum of.
    pub parts: usize,
    /// The gate, if there is one; then `tensors` has it too.
    pub gate: Option<Gate>,
}

impl Call {
    /// A call that sums its gradients, if any, with partial rows.
    pub const fn new(direction: Direction, norm: Norm, dtypes: DTypes, tensors: TensorSet) -> Self {
        let (grad_reduction, residual_placement) = (GradReduction::Partials, ResidualPlacement::Before);
        Call { direction, norm, dtypes, tensors, grad_reduction, residual_placement, parts: 1, gate: None }
    }

    /// With the residual added after the norm.
    pub const fn residual_after(self) -> Self {
        Call { residual_placement: ResidualPlacement::After, ..self }
    }

    /// The same call with `x` as the sum of `parts` matrices.
    pub const fn of_parts(self, parts: usize) -> Self {
        Call { parts, ..self }
    }

    /// The same call with a gate, and in backward its gradient.
    pub const fn gated(self, slot: Slot) -> Self {
        let is_backward = matches!(self.direction, Direction::Backward);
        let tensors = self.tensors.with(Tensor::Gate).set(Tensor::Dgate, is_backward);
        Call { tensors, gate: Some(Gate { activation: Activation::Silu, slot }), ..self }
    }

    /// The call with a size.
    pub fn problem(self, rows: usize, cols: usize) -> Problem {
        let Call { direction, norm, dtypes, tensors, grad_reduction, residual_placement, parts, gate } = self;
        let tensors = tensors.set(Tensor::Mean, norm == Norm::Layer);
        let problem = match direction {
            // Quantized calls are drawn, with their specs.
            Direction::Forward | Direction::QuantizedForward => {
                Problem::forward(norm, rows, cols, dtypes.activation, tensors)
            }
            Direction::Backward => Problem::backward(norm, rows, cols, dtypes.activation, tensors),
        };
        let problem = Problem { dtypes, grad_reduction, residual_placement, parts, gate, ..problem };
        match residual_placement {
            ResidualPlacement::Before => problem,
            ResidualPlacement::After => {
                Problem { tensors: problem.tensors.set(Tensor::Y, tensors.has(Tensor::Y)), ..problem }
            }
        }
    }

    /// Number of gradients summed over rows.
    pub const fn gradients(&self) -> usize {
        self.tensors.sums_over_rows()
    }
}

/// The same call in place. It overwrites `x`, or with the residual added after the norm, the
/// residual.
pub fn in_place(problem: &Problem) -> Problem {
    let tensors = problem.tensors.without(Tensor::Residual);
    let tensors = match problem.residual_placement {
        ResidualPlacement::Before => tensors.without(Tensor::X),
        ResidualPlacement::After => tensors,
    };
    Problem { tensors, ..*problem }
}

/// Forward and backward calls of both norms in each of `mixes`, with every set of optional tensors
/// that changes a plan.
pub fn calls(mixes: &[DTypes]) -> Vec<Call> {
    let bias = NONE.with(Tensor::Bias);
    let forward = [NONE, bias, WEIGHT_BIAS, WEIGHT_RESIDUAL].map(|tensors| (Direction::Forward, tensors));
    let backward = [
        NONE,
        DWEIGHT,
        DWEIGHT_DBIAS,
        NONE.with(Tensor::Dbias),
        WEIGHT.with(Tensor::DresidualOut),
        DWEIGHT_DBIAS.with(Tensor::DresidualOut),
        DWEIGHT_DBIAS.with(Tensor::DresidualOut).with(Tensor::Dresidual),
    ];
    let backward = backward.map(|tensors| (Direction::Backward, tensors));
    let mut calls = Vec::new();
    for (direction, tensors) in forward.into_iter().chain(backward) {
        for norm in Norm::USUAL {
            calls.extend(mixes.iter().map(|&dtypes| Call::new(direction, norm, dtypes, tensors)));
        }
    }
    for tensors in [WEIGHT_RESIDUAL, NORM_OF_SUM] {
        let of = |norm, dtypes| Call::new(Direction::Forward, norm, dtypes, tensors).residual_after();
        calls.extend(Norm::USUAL.into_iter().flat_map(|norm| mixes.iter().map(move |&dtypes| of(norm, dtypes))));
    }
    calls
}

/// Calls of both norms with `x` in parts, in each of `mixes`, with every set of optional tensors
/// that changes a plan. [`calls`] leaves them out because not every backend plans them.
pub fn calls_of_parts(mixes: &[DTypes]) -> Vec<Call> {
    let tensors = [NONE, WEIGHT_BIAS, WEIGHT_RESIDUAL];
    let norms = tensors.into_iter().flat_map(|tensors| Norm::USUAL.map(|norm| (norm, tensors)));
    let of = |norm, tensors, dtypes| Call::new(Direction::Forward, norm, dtypes, tensors).of_parts(4);
    norms.flat_map(|(norm, tensors)| mixes.iter().map(move |&dtypes| of(norm, tensors, dtypes))).collect()
}

/// Calls of both norms with a gate in each slot, in each of `mixes`, with every set of optional
/// tensors that changes a plan. [`calls`] leaves them out because not every backend plans them.
pub fn calls_with_gates(mixes: &[DTypes]) -> Vec<Call> {
    let bias = DWEIGHT_DBIAS.with(Tensor::Bias);
    let sets = [
        (Direction::Forward, Slot::Before, WEIGHT_BIAS),
        (Direction::Forward, Slot::After, NONE),
        (Direction::Forward, Slot::After, WEIGHT_BIAS),
        (Direction::Forward, Slot::After, WEIGHT_RESIDUAL),
        (Direction::Backward, Slot::Before, NONE),
        (Direction::Backward, Slot::Before, DWEIGHT_DBIAS),
        (Direction::Backward, Slot::After, DWEIGHT),
        (Direction::Backward, Slot::After, bias),
        (Direction::Backward, Slot::After, bias.with(Tensor::DresidualOut).with(Tensor::Dresidual)),
    ];
    let mut calls = Vec::new();
    for (direction, slot, tensors) in sets {
        for norm in Norm::USUAL {
            let of = |&dtypes: &DTypes| {
                let is_before = slot == Slot::Before;
                // A gated x is no sum of a residual stream.
                let residual = if is_before { dtypes.activation } else { dtypes.residual };
                Call::new(direction, norm, DTypes { residual, ..dtypes }, tensors).gated(slot)
            };
            calls.extend(mixes.iter().map(of));
        }
    }
    calls
}

/// The call, of any direction, with the weight before the norm, which leaves no room for a
/// residual. It has one part of x, no gate before the norm and no residual after it.
pub fn weight_first(problem: &Problem) -> Problem {
    let of_residual = Piece::Residual.tensors(problem.direction);
    let tensors = problem.tensors.difference(of_residual).with(Tensor::Weight);
    let dtypes = DTypes { residual: problem.dtypes.activation, ..problem.dtypes };
    Problem { tensors, dtypes, cast_order: CastOrder::WeightFirst, ..*problem }
}

/// Pseudo-random draws from lists. Equal seeds give equal draws.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Draw(seed)
    }

    /// One element of `list`.
    pub fn of<T: Copy, const N: usize>(&mut self, list: [T; N]) -> T {
        // Knuth's MMIX constants. The upper bits are the random ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        list[(self.0 >> 33) as usize % N]
    }

    /// `true` in half of the draws.
    pub fn yes(&mut self) -> bool {
        self.of([false, true])
    }

    /// Each of `tensors` with probability 1/2.
    pub fn some(&mut self, tensors: &[Tensor]) -> TensorSet {
        tensors.iter().copied().filter(|_| self.yes()).collect()
    }

    /// Call `number` of a sample. Forward, in place and backward alternate, and every fourth call
    /// has rows in groups. Everything else is drawn. Half of the forward and in-place calls add the
    /// residual after the norm.
    pub fn problem(&mut self, number: usize, rows: usize, cols: usize) -> Problem {
        let rows_per_group = (number % 4 == 3 && rows > 3).then_some(3);
        let problem = match number % 3 {
            0 | 1 if self.yes() => {
                let after = self.residual_after(rows, cols);
                if number.is_multiple_of(3) { after } else { in_place(&after) }
            }
            0 => self.forward(rows, cols),
            1 => {
                let forward = self.forward(rows, cols);
                let tensors = forward.tensors.set(Tensor::ResidualOut, forward.has(Tensor::Residual));
                in_place(&Problem { tensors, ..forward })
            }
            _ => self.backward(rows, cols),
        };
        Problem { rows_per_group, ..problem }
    }

    fn forward(&mut self, rows: usize, cols: usize) -> Problem {
        use Tensor::{Bias, Mean, Residual, ResidualOut, Rstd, Weight};
        let (norm, dtypes) = (self.of(Norm::USUAL), self.of(DTypes::ALL));
        let drawn = self.some(&[Weight, Bias, Residual, ResidualOut, Rstd]);
        let drawn = drawn.set(ResidualOut, drawn.has(Residual) && drawn.has(ResidualOut));
        let tensors = drawn.set(Mean, norm == Norm::Layer);
        let problem = Problem::forward(norm, rows, cols, dtypes.activation, tensors);
        let cast_order = self.of([CastOrder::AtStore, CastOrder::BeforeWeight, CastOrder::RstdFirst]);
        Problem { dtypes, cast_order, has_weight_offset: self.yes(), ..problem }
    }

    /// A norm added to a residual, in half of the draws with the next norm of the sum.
    pub fn residual_after(&mut self, rows: usize, cols: usize) -> Problem {
        use Tensor::{NextBias, NextMean, NextRstd, NextWeight, Residual, ResidualOut, Y};
        let forward = self.forward(rows, cols);
        let next = self.some(&[NextWeight, NextBias, NextRstd]).set(NextMean, forward.norm == Norm::Layer).with(Y);
        let tensors = forward.tensors.with(Residual).with(ResidualOut).without(Y);
        let tensors = if self.yes() { tensors.union(next) } else { tensors };
        Problem { tensors, residual_placement: ResidualPlacement::After, ..forward }
    }

    /// A norm of the sum of several parts.
    pub fn parts(&mut self, rows: usize, cols: usize) -> Problem {
        Problem { parts: self.of([2, 3, 8]), ..self.forward(rows, cols) }
    }

    /// The call, of any direction, with a gate in any slot. A gate leaves no room for parts, for a
    /// residual after the norm, or, before the norm, for any residual.
    pub fn gated(&mut self, problem: &Problem) -> Problem {
        let gate = Gate { activation: self.of(Activation::ALL), slot: self.of([Slot::Before, Slot::After]) };
        let (is_before, is_backward) = (gate.slot == Slot::Before, problem.direction == Direction::Backward);
        let of_residual = Piece::Residual.tensors(problem.direction);
        let kept = if is_before { problem.tensors.difference(of_residual) } else { problem.tensors };
        let residual = if is_before { problem.dtypes.activation } else { problem.dtypes.residual };
        let drawn = if is_backward { self.some(&[Tensor::Dgate, Tensor::Bias]) } else { TensorSet::NONE };
        let drawn = if is_before { drawn.without(Tensor::Bias) } else { drawn };
        let dtypes = DTypes { residual, ..problem.dtypes };
        Problem { tensors: kept.union(drawn).with(Tensor::Gate), dtypes, gate: Some(gate), ..*problem }
    }

    /// A call without a residual, forward or backward, whose y has another dtype than its x.
    pub fn cast(&mut self, rows: usize, cols: usize) -> Problem {
        let of_residual = [Piece::Residual.tensors(Direction::Forward), Piece::Residual.tensors(Direction::Backward)];
        let problem = if self.yes() { self.forward(rows, cols) } else { self.backward(rows, cols) };
        let of_direction = of_residual[usize::from(problem.direction == Direction::Backward)];
        let added = problem.tensors.intersection(TensorSet::of(&[Tensor::DresidualOut]));
        let tensors = problem.tensors.difference(of_direction).union(added);
        let tensors = match problem.direction {
            Direction::Backward => tensors.without(Tensor::Dx).with(Tensor::Dresidual),
            Direction::Forward | Direction::QuantizedForward => tensors.without(Tensor::X).with(Tensor::Residual),
        };
        Problem { tensors, dtypes: self.of(DTypes::CASTS), ..problem }
    }

    /// A quantized call with any kind of scale and any of the matching tensors.
    pub fn quantized_forward(&mut self, rows: usize, cols: usize) -> Problem {
        let forward = self.forward(rows, cols);
        let block = |cols| ScaleKind::Block { cols, is_power_of_two: false };
        let power = |cols| ScaleKind::Block { cols, is_power_of_two: true };
        let mx = |rounding| ScaleKind::Mx { rounding };
        let scale = self.of([
            ScaleKind::Given,
            ScaleKind::Current,
            ScaleKind::Row,
            block(128),
            power(64),
            mx(ScaleRounding::Up),
            mx(ScaleRounding::Floor),
        ]);
        let layouts = [
            ScaleLayout::RowMajor,
            ScaleLayout::ColumnMajor { ld: rows },
            ScaleLayout::PackedUe8m0 { ld: rows },
            ScaleLayout::Swizzled128x4,
        ];
        let codes = self.of([CodeType::E4m3, CodeType::E5m2, CodeType::Int8]);
        let is_mx_of_integers = matches!(scale, ScaleKind::Mx { .. }) && codes == CodeType::Int8;
        let codes = if is_mx_of_integers { CodeType::E5m2 } else { codes };
        let quant = QuantSpec::new(codes, scale).source(self.of([QuantSource::F32, QuantSource::Rounded]));
        let laid_out = quant.layout(self.of(layouts));
        let quant = if laid_out.check().is_ok() { laid_out } else { quant };
        let drawn = self.some(&[Tensor::Y, Tensor::Amax, Tensor::CodesT]);
        let is_one = matches!(scale, ScaleKind::Given | ScaleKind::Current);
        let tensors = forward.tensors.without(Tensor::Y).union(drawn);
        let tensors = tensors.set(Tensor::CodesT, is_one && drawn.has(Tensor::CodesT));
        let tensors = tensors.set(Tensor::Amax, scale == ScaleKind::Given && drawn.has(Tensor::Amax));
        let has_columns = quant.has_columnwise() && self.yes();
        let tensors =
            if has_columns { tensors.with(Tensor::CodesColumnwise).with(Tensor::ScalesColumnwise) } else { tensors };
        let has_mean = tensors.has(Tensor::Mean) || has_columns && forward.norm == Norm::Layer;
        let tensors = tensors.set(Tensor::Rstd, has_columns || tensors.has(Tensor::Rstd)).set(Tensor::Mean, has_mean);
        let along = quant.columnwise_layout(self.of([
            ScaleLayout::RowMajor,
            ScaleLayout::ColumnMajor { ld: cols },
            ScaleLayout::PackedUe8m0 { ld: cols + 1 },
            ScaleLayout::Swizzled128x4,
        ]));
        let quant = if has_columns && along.check().is_ok() { along } else { quant };
        let problem = Problem::quantized_forward(forward.norm, rows, cols, forward.dtypes.activation, quant, tensors);
        let Problem { dtypes, cast_order, has_weight_offset, .. } = forward;
        Problem { dtypes, cast_order, has_weight_offset, ..problem }
    }

    fn backward(&mut self, rows: usize, cols: usize) -> Problem {
        use Tensor::{Dbias, Dresidual, DresidualOut, Dweight, Weight};
        let (norm, dtypes) = (self.of(Norm::USUAL), self.of(DTypes::ALL));
        let tensors = self.some(&[Weight, DresidualOut, Dweight, Dbias, Dresidual]);
        let problem = Problem::backward(norm, rows, cols, dtypes.activation, tensors);
        let reductions = [GradReduction::Partials, GradReduction::Atomics];
        let (grad_reduction, has_weight_offset) = (self.of(reductions), self.yes());
        let stores = [GradStore::Rounded, GradStore::Rounded, GradStore::Sum, GradStore::Accumulated];
        let grad_store = if tensors.sums_over_rows() > 0 { self.of(stores) } else { GradStore::Rounded };
        Problem { dtypes, grad_reduction, grad_store, has_weight_offset, ..problem }
    }
}
