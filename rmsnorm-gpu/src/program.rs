//! Descriptions of programs, independent of their language.

use rmsnorm_spec::quant::{QuantSource, QuantSpec, ScaleKind, ScaleLayout, ScaleRounding, ScaleType};
use rmsnorm_spec::{
    CastOrder, DType, DTypes, Direction, Gate, GradReduction, GradStore, Norm, Piece, PieceSet, Problem,
    ResidualPlacement, Slot, Storage, Tensor, TensorSet,
};

/// A program of a GPU: a text that is compiled for many keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name in messages and plans: the entry point in CUDA C++, the file in WGSL.
    pub stem: &'static str,
    /// The pass that it belongs to.
    pub direction: Direction,
    /// Whether it only adds partial sums of `dweight` and `dbias`, and reads no rows.
    pub is_reduction: bool,
    /// Whether it stores `dweight` and `dbias` themselves, not only partial sums of them.
    pub stores_gradients: bool,
    /// The optional tensors: its code omits those that a call does not have.
    pub optional: TensorSet,
}

/// Defines a backend's programs as an enum, from a table with one row per program: its stem,
/// direction and optional tensors, as in [`Program`].
#[macro_export]
macro_rules! programs {
    ($($(#[doc = $doc:literal])+ $(#[cfg($cfg:meta)])? $name:ident = ($stem:literal, $direction:ident, $optional:expr);)+) => {
        /// A program of a GPU: a text that is compiled for many keys.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub(crate) enum Program {
            $($(#[doc = $doc])+ $(#[cfg($cfg)])? $name,)+
        }

        impl Program {
            /// Every program.
            #[cfg(test)]
            pub(crate) const ALL: [Program; [$($(#[cfg($cfg)])? $stem),+].len()] =
                [$($(#[cfg($cfg)])? Program::$name),+];

            const fn row(self) -> (&'static str, Direction, TensorSet) {
                match self {
                    $($(#[cfg($cfg)])? Program::$name => ($stem, Direction::$direction, $optional),)+
                }
            }
        }
    };
}

/// The part of a kernel's key that follows from the call. A field that a program ignores has one
/// fixed value, so that equal code has equal keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    /// The norm. [`Norm::Rms`] for L2 norm, whose code is the same, and in the second stage of
    /// gradients, which reads no rows.
    pub norm: Norm,
    /// Dtypes of the tensors that the code uses. In the second stage of gradients, all are the
    /// dtype of `dweight` and `dbias`.
    pub dtypes: DTypes,
    /// Dtype of `dweight` and `dbias` if the program stores them; otherwise the dtype of the
    /// activations.
    pub gradient: DType,
    /// Whether the gradients are added to their previous values.
    pub adds_to_gradients: bool,
    /// When forward rounds to the activations' dtype. In backward, whether the weight comes before
    /// the norm.
    pub cast_order: CastOrder,
    /// How the program stores its sums over rows for the second stage.
    pub accumulate: Accumulate,
    /// The optional tensors that the code uses.
    pub tensors: TensorSet,
    /// Whether rows lie in groups. The number of rows in a group is a run-time value.
    pub has_row_groups: bool,
    /// Whether `x` is the sum of several parts. The number of parts is a run-time value.
    pub has_parts: bool,
    /// Whether code for `weight_offset` is compiled in. Always true for float outputs, where adding
    /// zero costs nothing.
    pub has_weight_offset: bool,
    /// How forward uses the residual.
    pub form: Form,
    /// The gate, if the code has one.
    pub gate: Option<Gate>,
    /// How the program quantizes, if it does. Run-time values are left out: the limits of `amax`
    /// and the `ld` of a layout.
    pub quant: Option<QuantSpec>,
}

impl CallKey {
    /// The pieces that the code of a program of that direction has.
    pub const fn pieces(&self, direction: Direction) -> PieceSet {
        // The residual of a cast is its x.
        let is_x = self.form.is_cast() && !matches!(direction, Direction::Backward);
        let has_residual = !is_x && !self.tensors.intersection(Piece::Residual.tensors(direction)).is_empty();
        PieceSet::NONE
            .set(Piece::Parts, self.has_parts)
            .set(Piece::GateBefore, matches!(self.gate, Some(Gate { slot: Slot::Before, .. })))
            .set(Piece::WeightFirst, self.cast_order.is_weight_first())
            .set(Piece::GateAfter, matches!(self.gate, Some(Gate { slot: Slot::After, .. })))
            .set(Piece::Residual, has_residual && !self.form.is_residual_after())
            .set(Piece::ResidualAfter, self.form.is_residual_after())
            .set(Piece::NextNorm, self.form.norms_twice())
            .set(Piece::Quantize, self.quant.is_some())
    }
}

/// The matrices besides `x` and `dy` that these pieces read in a slot: those that a thread has in
/// flight, or keeps until the statistics are known.
pub fn inputs(pieces: PieceSet, slot: Slot, direction: Direction) -> TensorSet {
    let of_slot = pieces.iter().filter(|piece| piece.slot() == slot).map(|piece| piece.tensors(direction));
    of_slot.fold(TensorSet::NONE, TensorSet::union).intersection(direction.reads()).intersection(TensorSet::MATRICES)
}

/// [`GradReduction`] without its number of groups, which is a run-time value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// One partial row per chunk of rows. Also the value of programs without sums over rows.
    Partials,
    /// Partial rows shared by several chunks, protected by locks.
    Locks,
    /// A few partial rows, updated with atomic additions.
    Atomics,
}

/// How a call uses the residual. Backward is [`Form::Norm`] or [`Form::Cast`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// `y` is the norm of `x`, or of `residual_out = x + residual`.
    Norm,
    /// `residual_out` is the residual plus the norm of `x`. There is no `y`.
    AddsToResidual,
    /// As `Sum`, and `y` is the next norm, applied to `residual_out`.
    AddsAndNorms,
    /// `x`, and in backward its gradient, has the dtype of the residual stream, and nothing is
    /// added to `x`: [`TensorSet::is_cast`].
    Cast,
}

impl Form {
    const fn of(problem: &Problem) -> Self {
        if problem.tensors.is_cast() {
            return Form::Cast;
        }
        match (problem.direction, problem.residual_placement) {
            (Direction::Forward, ResidualPlacement::After) if problem.tensors.has(Tensor::Y) => Form::AddsAndNorms,
            (Direction::Forward, ResidualPlacement::After) => Form::AddsToResidual,
            (Direction::Forward, ResidualPlacement::Before)
            | (Direction::Backward | Direction::QuantizedForward, _) => Form::Norm,
        }
    }

    /// Whether the residual is added after the norm.
    pub const fn is_residual_after(self) -> bool {
        match self {
            Form::Norm | Form::Cast => false,
            Form::AddsToResidual | Form::AddsAndNorms => true,
        }
    }

    /// Whether the sum is normalized too.
    pub const fn norms_twice(self) -> bool {
        match self {
            Form::Norm | Form::AddsToResidual | Form::Cast => false,
            Form::AddsAndNorms => true,
        }
    }

    /// Whether `x` has the dtype of the residual stream.
    pub const fn is_cast(self) -> bool {
        matches!(self, Form::Cast)
    }
}

impl Program {
    /// The key of this program for the call `problem`.
    pub const fn key(&self, problem: &Problem) -> CallKey {
        let tensors = self.tensors(problem);
        let is_forward = !matches!(self.direction, Direction::Backward);
        let sums_over_rows = !is_forward && !self.is_reduction && tensors.sums_over_rows() > 0;
        let accumulate = match problem.grad_reduction {
            GradReduction::Locks { .. } if sums_over_rows => Accumulate::Locks,
            GradReduction::Atomics if sums_over_rows => Accumulate::Atomics,
            GradReduction::Partials | GradReduction::Locks { .. } | GradReduction::Atomics => Accumulate::Partials,
        };
        let quant = match (self.direction, problem.quant) {
            (Direction::QuantizedForward, Some(quant)) => Some(quant_key(quant, problem.dtypes.activation)),
            (Direction::Forward | Direction::Backward, _) | (Direction::QuantizedForward, None) => None,
        };
        // Rounding twice to the same dtype changes nothing.
        let is_repeated = match quant {
            Some(quant) => matches!(quant.source, QuantSource::Rounded),
            None => true,
        };
        let form = Form::of(problem);
        let gate = if self.optional.has(Tensor::Gate) { problem.gate } else { None };
        let is_multiplied = has_parameters(tensors) || matches!(gate, Some(Gate { slot: Slot::After, .. }));
        let is_last = !is_multiplied && !form.is_residual_after();
        let rounds_rstd = problem.cast_order.rounds_rstd() && self.optional.has(Tensor::Weight);
        let is_repeated = is_last && is_repeated && !rounds_rstd;
        let is_cast = is_forward && !(matches!(problem.dtypes.activation, DType::F32) || is_repeated);
        let is_weight_first = problem.cast_order.is_weight_first();
        let cast_order = match is_weight_first {
            true if self.optional.has(Tensor::Weight) => CastOrder::WeightFirst,
            false if is_cast => problem.cast_order,
            true | false => CastOrder::AtStore,
        };
        let stores_gradients = self.stores_gradients && tensors.sums_over_rows() > 0;
        CallKey {
            norm: match problem.norm {
                // L2 norm differs in a number that kernels get.
                Norm::Rms | Norm::L2 => Norm::Rms,
                Norm::Layer | Norm::L2Clamped if self.is_reduction => Norm::Rms,
                Norm::Layer | Norm::L2Clamped => problem.norm,
            },
            dtypes: self.dtypes(problem, tensors),
            gradient: if stores_gradients { gradient(problem) } else { problem.dtypes.activation },
            adds_to_gradients: stores_gradients && matches!(problem.grad_store, GradStore::Accumulated),
            cast_order,
            accumulate,
            tensors,
            has_row_groups: !self.is_reduction && problem.rows_per_group.is_some(),
            has_parts: has_parts(problem),
            has_weight_offset: quant.is_none() || (problem.has_weight_offset && tensors.has(Tensor::Weight)),
            form,
            gate,
            quant,
        }
    }

    /// The optional tensors that the call has. In place there is no `x`, and `residual_out`
    /// overwrites the residual. Code that does not distinguish calls without `x` counts an in-place
    /// residual as a residual, and takes what a cast calls a residual for `x`, and `dresidual` for
    /// `dx`.
    const fn tensors(&self, problem: &Problem) -> TensorSet {
        let is_dx = problem.tensors.is_cast() && !self.optional.has(Tensor::X);
        let tensors = if is_dx { problem.tensors.without(Tensor::Dresidual) } else { problem.tensors };
        let adds_residual =
            if self.optional.has(Tensor::X) { tensors.has(Tensor::Residual) } else { tensors.adds_residual() };
        // Backward reads the bias for the gradient of a gate.
        let reads_bias = !matches!(self.direction, Direction::Backward) || tensors.has(Tensor::Dgate);
        let tensors = if reads_bias { tensors } else { tensors.without(Tensor::Bias) };
        tensors.set(Tensor::Residual, adds_residual).intersection(self.optional)
    }

    /// The dtypes of the tensors that the code uses; absent tensors have the activations' dtype.
    /// Sums over rows are f32 until the second stage.
    const fn dtypes(&self, problem: &Problem, tensors: TensorSet) -> DTypes {
        let DTypes { activation, weight, residual } = problem.dtypes;
        if self.is_reduction {
            return DTypes::uniform(gradient(problem));
        }
        let is_backward = matches!(self.direction, Direction::Backward);
        // A sum of parts is rounded like a sum with a residual.
        let uses_stream =
            is_backward || problem.tensors.adds_residual() || problem.tensors.is_cast() || has_parts(problem);
        DTypes {
            activation,
            weight: if has_parameters(tensors) { weight } else { activation },
            residual: if uses_stream { residual } else { activation },
        }
    }
}

/// The dtype of the stored `dweight` and `dbias`: a sum is f32 for every weight dtype.
const fn gradient(problem: &Problem) -> DType {
    match problem.storage(Tensor::Dweight) {
        Some(Storage::Float(dtype)) => dtype,
        // A call without these gradients.
        Some(Storage::Code(_) | Storage::E8m0) | None => problem.dtypes.weight,
    }
}

/// The part of a spec that the code depends on.
const fn quant_key(quant: QuantSpec, activation: DType) -> QuantSpec {
    let layout = match quant.layout {
        ScaleLayout::ColumnMajor { .. } => ScaleLayout::ColumnMajor { ld: 0 },
        ScaleLayout::PackedUe8m0 { .. } => ScaleLayout::PackedUe8m0 { ld: 0 },
        ScaleLayout::RowMajor | ScaleLayout::Swizzled128x4 => quant.layout,
    };
    // Rounding f32 to f32 is the identity.
    let source = if matches!(activation, DType::F32) { QuantSource::F32 } else { quant.source };
    QuantSpec::new(quant.codes, quant.scale).source(source).layout(layout)
}

/// How a program quantizes, as the numbers that the GPU sources use in every language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantNumbers {
    /// Source of a scale: the caller (0), or the largest magnitude in the whole matrix (1), in a
    /// row (2) or in adjacent columns of a row (3).
    pub scale: u32,
    /// Form of a scale: a quotient (0), a power of two as f32 (1), or a power of two as a byte,
    /// rounded up (2) or from the exponent alone (3).
    pub form: u32,
    /// Layout of the scales: the index in the order of [`ScaleLayout`].
    pub layout: u32,
    /// Adjacent columns that share a scale; 1 for other kinds of scale.
    pub set: u32,
}

impl QuantNumbers {
    /// The numbers of `quant`.
    pub fn of(quant: &QuantSpec) -> Self {
        let (scale, set) = match quant.scale {
            ScaleKind::Given => (0, 1),
            ScaleKind::Current => (1, 1),
            ScaleKind::Row => (2, 1),
            ScaleKind::Block { cols, .. } => (3, cols),
            ScaleKind::Mx { .. } => (3, ScaleKind::MX_COLS),
        };
        let form = match (quant.scale, quant.scale_type()) {
            (ScaleKind::Mx { rounding: ScaleRounding::Floor }, _) => 3,
            (_, ScaleType::E8m0) => 2,
            (ScaleKind::Block { is_power_of_two: true, .. }, ScaleType::F32) => 1,
            (_, ScaleType::F32) => 0,
        };
        let layout = match quant.layout {
            ScaleLayout::RowMajor => 0,
            ScaleLayout::ColumnMajor { .. } => 1,
            ScaleLayout::PackedUe8m0 { .. } => 2,
            ScaleLayout::Swizzled128x4 => 3,
        };
        QuantNumbers { scale, form, layout, set: set as u32 }
    }
}

/// Whether `x` is the sum of several parts, which only forward to floats allows.
const fn has_parts(problem: &Problem) -> bool {
    problem.parts > 1
}

const fn has_parameters(tensors: TensorSet) -> bool {
    const PARAMETERS: TensorSet = TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::NextWeight, Tensor::NextBias]);
    !tensors.intersection(PARAMETERS).is_empty()
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::Activation;

    use super::*;

    const FORWARD: Program = Program {
        stem: "forward",
        direction: Direction::Forward,
        is_reduction: false,
        stores_gradients: false,
        optional: TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Residual]),
    };
    const BACKWARD: Program = Program {
        stem: "backward",
        direction: Direction::Backward,
        is_reduction: false,
        stores_gradients: false,
        optional: TensorSet::of(&[Tensor::Weight, Tensor::Dweight, Tensor::Dbias]),
    };
    const SPLIT: Program = Program { stem: "backward_split", stores_gradients: true, ..BACKWARD };
    const REDUCE: Program = Program {
        stem: "reduce_partials",
        direction: Direction::Backward,
        is_reduction: true,
        stores_gradients: true,
        optional: TensorSet::of(&[Tensor::Dweight, Tensor::Dbias]),
    };
    const MIXED: DTypes = DTypes { activation: DType::F16, weight: DType::F32, residual: DType::Bf16 };

    const IN_PLACE: TensorSet = TensorSet::of(&[Tensor::Y, Tensor::ResidualOut]);

    fn forward(tensors: &[Tensor]) -> Problem {
        Problem::forward(Norm::Layer, 2, 3, DType::F16, tensors)
    }

    fn backward(tensors: &[Tensor]) -> Problem {
        Problem { dtypes: MIXED, ..Problem::backward(Norm::Layer, 2, 3, DType::F16, tensors) }
    }

    #[test]
    fn a_key_has_what_the_call_and_the_code_have() {
        assert_eq!(FORWARD.key(&forward(&[Tensor::Weight, Tensor::Rstd])).tensors, TensorSet::of(&[Tensor::Weight]));
        let in_place = Problem { tensors: IN_PLACE, ..forward(&[]) };
        assert_eq!(FORWARD.key(&in_place).tensors, TensorSet::of(&[Tensor::Residual]));
        // A program that binds tensors one by one distinguishes in-place residuals.
        let binds = TensorSet::of(&[Tensor::X, Tensor::Y, Tensor::Residual, Tensor::ResidualOut]);
        let program = Program { optional: binds, ..FORWARD };
        assert_eq!(program.key(&in_place).tensors, IN_PLACE);
        assert_eq!(program.key(&forward(&[Tensor::Residual])).tensors, binds.without(Tensor::ResidualOut));
        // Backward makes the gradient of a gate of the bias, and nothing else.
        let program = Program { optional: TensorSet::of(&[Tensor::Bias, Tensor::Dgate]), ..BACKWARD };
        assert_eq!(program.key(&backward(&[Tensor::Bias])).tensors, TensorSet::NONE);
        assert_eq!(program.key(&backward(&[Tensor::Bias, Tensor::Dgate])).tensors, program.optional);
        assert_eq!((REDUCE.key(&backward(&[])).norm, BACKWARD.key(&backward(&[])).norm), (Norm::Rms, Norm::Layer));
    }

    /// L2 norm is RMS norm with another factor. The clamped one has code of its own.
    #[test]
    fn a_key_has_the_norm_whose_code_a_call_runs() {
        let problem = |norm| Problem::forward(norm, 2, 3, DType::F16, &[Tensor::Weight]);
        assert_eq!(
            Norm::ALL.map(|norm| FORWARD.key(&problem(norm)).norm),
            [Norm::Rms, Norm::Layer, Norm::Rms, Norm::L2Clamped]
        );
        assert_eq!(FORWARD.key(&problem(Norm::L2)), FORWARD.key(&problem(Norm::Rms)));
    }

    #[test]
    fn pieces_read_matrices_in_their_slot() {
        let [residual, gate] = [Tensor::Residual, Tensor::Gate].map(|tensor| TensorSet::of(&[tensor]));
        let all = PieceSet::of(&Piece::ALL);
        for (pieces, slot, direction, expected) in [
            (PieceSet::NONE, Slot::Before, Direction::Forward, TensorSet::NONE),
            (all, Slot::Before, Direction::Forward, residual.union(gate)),
            (all.without(Piece::Residual), Slot::Before, Direction::Forward, gate),
            (all.without(Piece::GateBefore), Slot::Before, Direction::Forward, residual),
            (all, Slot::After, Direction::Forward, residual.union(gate)),
            (all.without(Piece::ResidualAfter), Slot::After, Direction::Forward, gate),
            (all.without(Piece::GateAfter), Slot::After, Direction::Forward, residual),
            (all, Slot::Before, Direction::Backward, gate.with(Tensor::DresidualOut)),
            (all, Slot::After, Direction::Backward, gate),
        ] {
            assert_eq!(inputs(pieces, slot, direction), expected, "{pieces:?} {slot:?} {direction:?}");
        }
    }

    #[test]
    fn dtypes_of_what_is_not_there_leave_no_trace() {
        let dtypes = |tensors: &[Tensor]| FORWARD.key(&Problem { dtypes: MIXED, ..forward(tensors) }).dtypes;
        assert_eq!(dtypes(&[]), DTypes::uniform(DType::F16));
        assert_eq!(dtypes(&[Tensor::Bias]), DTypes { residual: DType::F16, ..MIXED });
        assert_eq!(dtypes(&[Tensor::Residual]), DTypes { weight: DType::F16, ..MIXED });
        let in_place = Problem { dtypes: MIXED, tensors: IN_PLACE, ..forward(&[]) };
        assert_eq!(FORWARD.key(&in_place).dtypes, DTypes { weight: DType::F16, ..MIXED });
        assert_eq!(BACKWARD.key(&backward(&[Tensor::Dweight])).dtypes, DTypes { weight: DType::F16, ..MIXED });
        assert_eq!(BACKWARD.key(&backward(&[Tensor::Weight])).dtypes, MIXED);
        assert_eq!(REDUCE.key(&backward(&[Tensor::Dbias])).dtypes, DTypes::uniform(DType::F32));
    }

    #[test]
    fn only_what_sums_over_rows_accumulates() {
        let accumulate = |program: Program, grad_reduction, tensors: &[Tensor]| {
            program.key(&Problem { grad_reduction, ..backward(tensors) }).accumulate
        };
        for gradient in [Tensor::Dweight, Tensor::Dbias] {
            for (grad_reduction, expected) in [
                (GradReduction::Partials, Accumulate::Partials),
                (GradReduction::Locks { groups: 3 }, Accumulate::Locks),
                (GradReduction::Atomics, Accumulate::Atomics),
            ] {
                assert_eq!(accumulate(BACKWARD, grad_reduction, &[gradient]), expected);
                assert_eq!(accumulate(BACKWARD, grad_reduction, &[]), Accumulate::Partials);
                assert_eq!(accumulate(REDUCE, grad_reduction, &[gradient]), Accumulate::Partials);
            }
        }
    }

    #[test]
    fn what_becomes_of_gradients_counts_where_they_are_stored() {
        use GradStore::{Accumulated, Rounded, Sum};
        let key = |program: Program, grad_store, weight, tensors: &[Tensor]| {
            let dtypes = DTypes { weight, ..MIXED };
            program.key(&Problem { grad_store, dtypes, ..backward(tensors) })
        };
        for gradient in [Tensor::Dweight, Tensor::Dbias] {
            for (grad_store, expected) in
                [(Rounded, (DType::F16, false)), (Sum, (DType::F32, false)), (Accumulated, (DType::F32, true))]
            {
                let stored = |program, tensors: &[Tensor]| {
                    let key = key(program, grad_store, DType::F16, tensors);
                    (key.gradient, key.adds_to_gradients)
                };
                assert_eq!([SPLIT, REDUCE].map(|program| stored(program, &[gradient])), [expected; 2]);
                let reduce = key(REDUCE, grad_store, DType::F16, &[gradient]);
                assert_eq!(reduce.dtypes, DTypes::uniform(expected.0));
                // Its input has the weight's dtype.
                let split = key(SPLIT, grad_store, DType::F16, &[gradient, Tensor::Weight]);
                assert_eq!(split.dtypes, DTypes { weight: DType::F16, ..MIXED });
                assert_eq!(stored(BACKWARD, &[gradient]), (DType::F16, false));
                assert_eq!(stored(SPLIT, &[Tensor::Weight]), (DType::F16, false));
            }
            // f32 gradients are stored by the same code in every mode.
            for program in [SPLIT, REDUCE] {
                assert_eq!(key(program, Rounded, DType::F32, &[gradient]), key(program, Sum, DType::F32, &[gradient]));
            }
            let partials = |grad_store| key(BACKWARD, grad_store, DType::F32, &[gradient]);
            assert_eq!([partials(Sum), partials(Accumulated)], [partials(Rounded); 2]);
        }
    }

    #[test]
    fn groups_of_rows_count_where_there_are_rows() {
        let problem = backward(&[Tensor::Dweight]);
        for rows_per_group in [None, Some(2), Some(32)] {
            let has_row_groups = |program: Program| program.key(&Problem { rows_per_group, ..problem }).has_row_groups;
            assert_eq!(has_row_groups(FORWARD), rows_per_group.is_some());
            assert_eq!(has_row_groups(BACKWARD), rows_per_group.is_some());
            assert!(!has_row_groups(REDUCE));
        }
    }

    #[test]
    fn parts_are_a_sum_of_the_residuals_type() {
        for (parts, tensors, residual) in [
            (1, [].as_slice(), DType::F16),
            (2, &[], DType::Bf16),
            (9, &[], DType::Bf16),
            (1, &[Tensor::Residual], DType::Bf16),
            (2, &[Tensor::Residual], DType::Bf16),
        ] {
            let key = FORWARD.key(&Problem { parts, dtypes: MIXED, ..forward(tensors) });
            assert_eq!((key.has_parts, key.dtypes.residual), (parts > 1, residual), "{parts} {tensors:?}");
        }
    }

    #[test]
    fn casts_count_where_the_store_does_not_repeat_them() {
        let cast_order = |dtype, tensors: &[Tensor]| {
            let problem = Problem { dtypes: DTypes::uniform(dtype), ..forward(tensors) };
            FORWARD.key(&Problem { cast_order: CastOrder::BeforeWeight, ..problem }).cast_order
        };
        assert_eq!(cast_order(DType::Bf16, &[Tensor::Weight]), CastOrder::BeforeWeight);
        assert_eq!(cast_order(DType::Bf16, &[Tensor::Bias]), CastOrder::BeforeWeight);
        assert_eq!(cast_order(DType::Bf16, &[]), CastOrder::AtStore);
        assert_eq!(cast_order(DType::F32, &[Tensor::Weight]), CastOrder::AtStore);
        // The rounding of rstd stays without a weight, in programs that normalize.
        let rstd_first = |program: Program, tensors: &[Tensor]| {
            program.key(&Problem { cast_order: CastOrder::RstdFirst, ..forward(tensors) }).cast_order
        };
        assert_eq!(rstd_first(FORWARD, &[]), CastOrder::RstdFirst);
        let statistics = Program { optional: TensorSet::of(&[Tensor::Residual]), ..FORWARD };
        assert_eq!(rstd_first(statistics, &[Tensor::Weight]), CastOrder::AtStore);
        // A weight before the norm is another norm in every dtype and direction.
        for (program, problem) in [(FORWARD, forward(&[Tensor::Weight])), (BACKWARD, backward(&[Tensor::Weight]))] {
            let problem =
                Problem { cast_order: CastOrder::WeightFirst, dtypes: DTypes::uniform(DType::F32), ..problem };
            let key = program.key(&problem);
            assert_eq!((key.cast_order, REDUCE.key(&problem).cast_order), (CastOrder::WeightFirst, CastOrder::AtStore));
            assert!(key.pieces(problem.direction).has(Piece::WeightFirst));
        }
        // A gate after the norm is multiplied with the rounded value.
        let program = Program { optional: TensorSet::of(&[Tensor::Gate]), ..FORWARD };
        for (slot, expected) in [(Slot::After, CastOrder::BeforeWeight), (Slot::Before, CastOrder::AtStore)] {
            let gate = Some(Gate { activation: Activation::Silu, slot });
            let problem = Problem { gate, cast_order: CastOrder::BeforeWeight, ..forward(&[Tensor::Gate]) };
            let (key, ungated) = (program.key(&problem), FORWARD.key(&problem));
            assert_eq!((key.cast_order, key.gate), (expected, gate));
            assert_eq!((ungated.cast_order, ungated.gate), (CastOrder::AtStore, None));
        }
    }

    #[test]
    fn a_residual_after_the_norm_is_a_form_of_forward() {
        let after = |tensors: TensorSet| {
            let cast_order = CastOrder::BeforeWeight;
            Problem { tensors, residual_placement: ResidualPlacement::After, cast_order, ..forward(&[]) }
        };
        let sum = TensorSet::of(&[Tensor::X, Tensor::Residual, Tensor::ResidualOut]);
        let form = |tensors| FORWARD.key(&after(tensors)).form;
        assert_eq!((form(sum), form(sum.with(Tensor::Y))), (Form::AddsToResidual, Form::AddsAndNorms));
        // The residual is added after the rounding, so the store does not repeat it.
        let key = FORWARD.key(&after(sum.without(Tensor::Residual)));
        assert_eq!((key.cast_order, key.tensors.has(Tensor::Residual)), (CastOrder::BeforeWeight, true));
        assert_eq!(FORWARD.key(&forward(&[Tensor::Residual])).form, Form::Norm);
        assert_eq!(BACKWARD.key(&backward(&[])).form, Form::Norm);
        // Parameters of either norm make the weight's dtype part of the key.
        let program = Program { optional: FORWARD.optional.with(Tensor::NextBias), ..FORWARD };
        let dtypes = |tensors| program.key(&Problem { dtypes: MIXED, ..after(tensors) }).dtypes;
        assert_eq!(dtypes(sum), DTypes { weight: DType::F16, ..MIXED });
        assert_eq!(dtypes(sum.with(Tensor::Y).with(Tensor::NextBias)), MIXED);
    }
}
