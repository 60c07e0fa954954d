//! What a program is, whatever the language of its text.

use rmsnorm_spec::{DTypes, Direction, Problem, Tensor, TensorSet};

/// A program of a GPU: a text that is compiled for many keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// The stem of its file, and its name in messages.
    pub stem: &'static str,
    /// The pass that it is of, or is a part of.
    pub direction: Direction,
    /// Whether it adds up partial sums of `dweight` and `dbias`, and has no part in rows.
    pub is_reduction: bool,
    /// The optional tensors that its code leaves out where a call has not got them.
    pub optional: TensorSet,
}

impl Program {
    /// Of the tensors that the code may leave out, those that the call has. A residual counts wherever it lies: in place it
    /// is what `residual_out` overwrites.
    pub const fn tensors(&self, problem: &Problem) -> TensorSet {
        let given = problem.tensors.set(Tensor::Residual, problem.tensors.adds_residual());
        given.intersection(self.optional)
    }

    /// The dtypes of the tensors that the code has; one for all that it has not, so that equal code has equal keys.
    /// `tensors` are those that it has of the optional ones.
    pub const fn dtypes(&self, problem: &Problem, tensors: TensorSet) -> DTypes {
        let DTypes { activation, weight, residual } = problem.dtypes;
        if self.is_reduction {
            return DTypes::uniform(weight);
        }
        let of_weight = TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Dweight, Tensor::Dbias]);
        let uses_weight = !tensors.intersection(of_weight).is_empty();
        let uses_stream = matches!(self.direction, Direction::Backward) || tensors.has(Tensor::Residual);
        DTypes {
            activation,
            weight: if uses_weight { weight } else { activation },
            residual: if uses_stream { residual } else { activation },
        }
    }
}

#[cfg(test)]
mod tests {
    use rmsnorm_spec::{DType, Norm};

    use super::*;

    const FORWARD: Program = Program {
        stem: "forward",
        direction: Direction::Forward,
        is_reduction: false,
        optional: TensorSet::of(&[Tensor::Weight, Tensor::Bias, Tensor::Residual]),
    };
    const REDUCE: Program = Program {
        stem: "reduce_partials",
        direction: Direction::Backward,
        is_reduction: true,
        optional: TensorSet::of(&[Tensor::Dweight, Tensor::Dbias]),
    };
    const MIXED: DTypes = DTypes { activation: DType::F16, weight: DType::F32, residual: DType::Bf16 };

    #[test]
    fn a_key_has_what_the_call_and_the_code_have() {
        let problem = Problem::forward(Norm::Rms, 2, 3, DType::F16, &[Tensor::Weight, Tensor::Rstd]);
        assert_eq!(FORWARD.tensors(&problem), TensorSet::of(&[Tensor::Weight]));
        let in_place = Problem { tensors: TensorSet::of(&[Tensor::Y, Tensor::ResidualOut]), ..problem };
        assert_eq!(FORWARD.tensors(&in_place), TensorSet::of(&[Tensor::Residual]));
    }

    #[test]
    fn dtypes_of_what_is_not_there_leave_no_trace() {
        let problem = Problem { dtypes: MIXED, ..Problem::forward(Norm::Rms, 2, 3, DType::F16, &[]) };
        let dtypes = |tensors: &[Tensor]| FORWARD.dtypes(&problem, TensorSet::of(tensors));
        assert_eq!(dtypes(&[]), DTypes::uniform(DType::F16));
        assert_eq!(dtypes(&[Tensor::Bias]), DTypes { residual: DType::F16, ..MIXED });
        assert_eq!(dtypes(&[Tensor::Residual]), DTypes { weight: DType::F16, ..MIXED });
        let backward = Problem { dtypes: MIXED, ..Problem::backward(Norm::Rms, 2, 3, DType::F16, &[Tensor::Dbias]) };
        let program = Program { direction: Direction::Backward, ..FORWARD };
        assert_eq!(program.dtypes(&backward, TensorSet::NONE), DTypes { weight: DType::F16, ..MIXED });
        assert_eq!(REDUCE.tensors(&backward), TensorSet::of(&[Tensor::Dbias]));
        assert_eq!(REDUCE.dtypes(&backward, REDUCE.tensors(&backward)), DTypes::uniform(DType::F32));
    }
}
